"""Models: the native decoder, the adapter for transformers models, loading. May import attention, kernels, transformers."""

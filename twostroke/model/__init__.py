"""Models: the native decoder, the transformers adapter, loading. May import attention, kernels, transformers."""

"""The device sampler: from logits and device-resident row state to tokens. May import torch and kernels."""

"""Device code in Triton, and its plain PyTorch twins. May import torch and triton only."""

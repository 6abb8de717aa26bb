"""Accounting of the KV cache: which block belongs to whom. May import request and plan; no torch."""

"""Paged attention: one interface, several backends. May import kernels (and torch)."""

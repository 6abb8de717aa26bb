"""Benchmarks and their result files. May import the engine and what lies below it; prints nothing."""

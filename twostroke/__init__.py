"""twostroke: an LLM inference engine in which the CPU and the GPU never wait for each other."""

__version__ = "0.1.0"

"""The HTTP server: the engine in a process of its own, and the API in front of it. May import the engine and below."""

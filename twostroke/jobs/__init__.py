"""Long work that survives its process: files of requests. May import the engine, OpenAI's forms, and below."""

"""OpenAI's API without HTTP: request bodies, answers, errors. May import the parts that the front uses, no torch."""

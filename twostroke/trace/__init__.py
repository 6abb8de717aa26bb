"""Profiles: where the time of each step went, as a trace and as pictures. May import the engine and below."""

"""Which tokens run next: admission, chunking, preemption. May import request, plan and cache; no torch."""

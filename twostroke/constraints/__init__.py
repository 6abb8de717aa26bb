"""What the next token of a sample may be, found on the CPU from real tokens: grammars and thinking budgets.

May import request, held_input and text; no torch."""

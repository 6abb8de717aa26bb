"""The command line: takes arguments apart and prints. May import everything; heavy imports only inside commands."""

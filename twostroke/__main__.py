"""`python -m twostroke` is the command `twostroke`."""

from .cli.main import app

app(prog_name="twostroke")

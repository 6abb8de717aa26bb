"""Where the server's logs go."""

from __future__ import annotations

import logging


def log_to_stderr(level: int) -> None:
    """Write what twostroke logs from `level` on to stderr, and warnings of everybody else."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(process)d %(levelname)s %(message)s")
    logging.getLogger("twostroke").setLevel(level)

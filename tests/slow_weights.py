"""An engine process of tests that takes as long to read new weights as it is told to."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from twostroke import maintenance
from twostroke.server.engine_process import run_engine


def run_slow_engine(connection: Connection, arguments: dict[str, Any]) -> None:
    """Run an engine; `folder`: it says there that it reads by a file `reading`, until there is one `go`."""
    folder, read = Path(arguments.pop("folder")), maintenance.read_weights

    def read_slowly(weights: Any) -> Any:
        (folder / "reading").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
        return read(weights)

    with mock.patch.object(maintenance, "read_weights", read_slowly):
        run_engine(connection, arguments)

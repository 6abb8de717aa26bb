"""The command `twostroke`."""

from __future__ import annotations

import errno
import io
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import InvalidConfig, InvalidRequest, TwostrokeError, UnsupportedModel
from .batch import batch
from .bench import bench
from .chat import chat
from .demo import demo
from .generate import generate
from .profile import profile
from .serve import serve
from .simulate import simulate
from .streams import open_missing, tell

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130
"""Exit codes: the input was refused; something went wrong while running; Ctrl-C."""


class Commands(TyperGroup):
    """Turns the errors that twostroke raises on purpose into one line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        open_missing()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a model may say what the terminal's encoding cannot
        try:
            return super().invoke(ctx)
        except (InvalidRequest, InvalidConfig, UnsupportedModel) as error:
            raise _failure(error, BAD_INPUT) from error
        except TwostrokeError as error:
            raise _failure(error, FAILED) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader has what it wanted; typer ends quietly
                raise
            raise _failure(error, FAILED) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(INTERRUPTED) from error


def _failure(message: object, code: int) -> typer.Exit:
    tell(f"twostroke: {' '.join(str(message).split())}")
    return typer.Exit(code)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="An LLM inference engine in which the CPU and the GPU never wait for each other.",
)
app.command()(generate)
app.command()(batch)
app.command()(chat)
app.command()(serve)
app.command()(bench)
app.command()(profile)
app.command()(simulate)
app.command()(demo)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"twostroke {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass

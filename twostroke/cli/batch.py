"""`twostroke batch`: answer a file of requests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InvalidRequest, counted
from .flags import EngineFlags, with_flags
from .measured_speed import MeasuredSpeed, read_speed
from .streams import tell

if TYPE_CHECKING:
    from ..jobs.batch_job import BatchJob, Outcome
    from ..jobs.estimate import Estimate

SHOWN_ERRORS = 20
"""Lines that failed of which stderr tells; the output has all."""


@with_flags
def batch(
    engine: EngineFlags,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT", help="JSON lines, of OpenAI's batch form or plain; may be gzipped; - is stdin."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File where answers go, one a line; needed but for --dry-run.")
    ] = None,
    errors: Annotated[Path | None, typer.Option(help="Where failed lines go, if not there too.")] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What lines call the model, if not by its own name.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many requests, the first ones.")] = None,
    shard: Annotated[str, typer.Option(metavar="I/N", help="Only every Nth request, from the Ith on.")] = "1/1",
    price: Annotated[
        float, typer.Option(min=0, help="Of an hour of the machine, or of all with --ray, in dollars.")
    ] = 0.0,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Answer on this Ray cluster; auto is the one of this machine.")
    ] = None,
    engines: Annotated[int | None, typer.Option(min=1, help="With --ray: most engines; else one for each GPU.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count tokens, and estimate time and cost.")] = False,
    bench: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A result of twostroke bench, for the speed of a dry run.")
    ] = None,
) -> None:
    """Answer a file of requests; run again after whatever ended it, it goes on from there."""
    if bench is not None and not dry_run:
        raise InvalidRequest(f"bench={str(bench)!r} is for --dry-run alone")
    if engines is not None and ray is None:
        raise InvalidRequest(f"engines={engines} is for --ray alone")
    if output is None and not dry_run:
        raise InvalidRequest("output=None: answers need a file, --output FILE; only --dry-run does without")
    from ..jobs.batch_input import Shard
    from ..jobs.batch_job import BatchJob

    job = BatchJob(
        source=source,
        output=output,
        errors=errors,
        engine=engine.arguments(),
        model_name=served_model_name,
        limit=limit,
        shard=Shard.parse(shard),
        price=price,
        ray=ray,
        engines=engines,
    )
    say = _LineErrors()
    if dry_run:
        speed = None if bench is None else read_speed(bench)
        found = job.estimate(say)
        _print_estimate(found, speed, engines or 1, price)
        failed = found.failed
    else:
        outcome = _run(job, say)
        _print_outcome(outcome, price)
        failed = outcome.totals.failed
    if failed:
        raise typer.Exit(1)


def _run(job: BatchJob, say: _LineErrors) -> Outcome:
    try:
        return job.run(say)
    except KeyboardInterrupt:
        then = "the same command goes on from what is written" if job.begun else "nothing was written yet"
        tell(f"twostroke: interrupted; {then}")
        raise


class _LineErrors:
    """Tells of the first lines that failed."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, line: int, error: Exception) -> None:
        self._count += 1
        if self._count <= SHOWN_ERRORS:
            tell(f"twostroke: line {line}: {' '.join(str(error).split())}")
        elif self._count == SHOWN_ERRORS + 1:
            tell("twostroke: further lines failed too; the output has them all")


def _print_outcome(outcome: Outcome, price: float) -> None:
    from ..jobs.batch_progress import cost

    totals = outcome.totals
    if totals.requests and not outcome.answered:
        tell("twostroke: this batch was complete already, with")
    speed = totals.completion_tokens / totals.seconds if totals.seconds else 0.0
    money = f", ${cost(totals.seconds, price):.2f}" if price else ""
    tell(
        f"{counted(totals.requests, 'request')}, {totals.failed} failed; {totals.prompt_tokens} prompt and "
        f"{counted(totals.completion_tokens, 'output token')} in {totals.seconds:.1f} s: {speed:.1f} tokens/s{money}"
    )


def _print_estimate(found: Estimate, speed: MeasuredSpeed | None, engines: int, price: float) -> None:
    from ..jobs.batch_progress import cost

    typer.echo(f"{counted(found.requests, 'request')}, {found.failed} of which cannot be answered")
    typer.echo(
        f"{counted(found.prompt_tokens, 'prompt token')}, at most {counted(found.completion_tokens, 'output token')}"
    )
    if speed is None:
        typer.echo("time and cost: give --bench FILE, a result of twostroke bench")
        return
    seconds = speed.seconds(found.prompt_tokens, found.completion_tokens) / engines
    money = f", ${cost(seconds, price):.2f}" if price else ""
    typer.echo(
        f"about {seconds:.0f} s{money} if no text ends early: {counted(engines, 'engine')} at "
        f"{speed.tokens_per_s:.0f} output tokens/s ({speed.source})"
    )

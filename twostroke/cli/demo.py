"""`twostroke demo`: eight prompts answered together, under both loops."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ..bench.workload import CHATS, QUESTIONS
from ..sampling_params import SamplingParams
from .streams import tell
from .table import print_table

if TYPE_CHECKING:
    from ..bench.measure import Measured

WARM_UP_TOKENS = 2

ON_A_CPU = (
    "On a CPU, active means that the compute worker runs a step. There the forward pass and the loop share the cores, "
    "and the loop's own work is small beside it, so the two loops take about the same time."
)


def demo(
    model: Annotated[str | None, typer.Option(help="A model with a chat template.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 64,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
) -> None:
    """Answer eight prompts together, first with the synchronous loop, then with the asynchronous one."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    params.validate()
    given = {"device": device} if model is None else {"device": device, "model": model}
    runs = {loop: _measure(loop, params, given) for loop in ("sync", "async")}
    for question, output in zip(QUESTIONS, runs["async"].outputs, strict=True):
        typer.echo(f"> {question}\n{output.text}\n")
    columns = ("loop", "seconds", "tokens", "tokens/s", "device active")
    print_table(columns, [_row(loop, run) for loop, run in runs.items()])
    same = _tokens(runs["sync"]) == _tokens(runs["async"])
    typer.echo(f"\nThe two loops made {'the same' if same else 'DIFFERENT'} tokens.")
    if _runs_on_cpu(device):
        typer.echo(ON_A_CPU)
    if not same:
        raise typer.Exit(1)


def _measure(loop: str, params: SamplingParams, given: dict[str, str]) -> Measured:
    from .. import Engine
    from ..bench.measure import measure

    tell(f"{loop} loop: loading the model, answering {len(CHATS)} prompts together ...")
    # NOTE: the prefix cache is off, since the warm-up has the same prompts.
    with Engine(**given, loop=loop, prefix_cache=False) as engine:  # type: ignore[arg-type]  # strings for all, to mypy
        engine.generate(CHATS, replace(params, max_tokens=WARM_UP_TOKENS), progress=False)
        return measure(engine, CHATS, params)


def _row(loop: str, run: Measured) -> tuple[str, ...]:
    speed = run.tokens / run.seconds
    return loop, f"{run.seconds:.2f}", str(run.tokens), f"{speed:.1f}", f"{100 * run.active:.1f}%"


def _tokens(run: Measured) -> list[list[int]]:
    return [output.token_ids for output in run.outputs]


def _runs_on_cpu(device: str) -> bool:
    import torch

    return device.startswith("cpu") or (device == "auto" and not torch.cuda.is_available())

"""`twostroke profile`: where the time of each step goes, as a table, a trace and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InvalidConfig, counted
from .bench import LOOPS
from .folders import make_folder
from .streams import tell
from .table import print_table

if TYPE_CHECKING:
    from ..trace.profile import Profile


def profile(
    model: Annotated[str | None, typer.Option(help="A folder, hub id, GGUF file, or preset of random weights.")] = None,
    loop: Annotated[str, typer.Option(help="sync, async or both.")] = "both",
    rows: Annotated[int, typer.Option(help="Requests that run together.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 64,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each.")] = 64,
    steps: Annotated[int, typer.Option(min=4, help="Most steps of the trace: the last ones of the run.")] = 100,
    out: Annotated[Path, typer.Option(help="The folder for trace.json, timeline.html and timeline.png.")] = Path(
        "profile"
    ),
    impl: Annotated[str | None, typer.Option(help="native, transformers or auto.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or auto.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or auto.")] = None,
    slots: Annotated[int | None, typer.Option(help="Sets of buffers; steps in flight.")] = None,
    graphs: Annotated[bool | None, typer.Option("--graphs/--no-graphs", help="CUDA graphs for decode steps.")] = None,
) -> None:
    """Run a workload and show what the CPU and the three streams did, and what the compute stream waited for."""
    if loop not in LOOPS:
        raise InvalidConfig(f"loop={loop!r} must be one of {', '.join(LOOPS)}")
    from ..trace.profile import Workload, run_profile

    workload = Workload(rows, prompt_tokens, max_tokens)
    asked = {"model": model, "impl": impl, "device": device, "dtype": dtype, "slots": slots, "graphs": graphs}
    options = {name: value for name, value in asked.items() if value is not None}
    make_folder(out, "--out")
    profiles = []
    for name in LOOPS[loop]:
        tell(f"{name} loop: {counted(rows, 'request')}, {prompt_tokens} + {max_tokens} tokens each")
        profiles.append(run_profile(name, workload, steps, options))
    _print_idle(profiles)
    _write(profiles, out)


def _print_idle(profiles: list[Profile]) -> None:
    """The time of the compute stream by loop, and its idle time by cause."""
    causes = list(profiles[0].idle)
    columns = ("loop", "seconds", "steps", "active", "busy ms", *(f"idle: {cause} ms" for cause in causes))
    print_table(columns, [_row(one, causes) for one in profiles])


def _row(one: Profile, causes: list[str]) -> tuple[str, ...]:
    idle = (f"{1e3 * one.idle[cause]:.2f}" for cause in causes)
    return one.loop, f"{one.seconds:.3f}", str(one.steps), f"{100 * one.active:.1f}%", f"{1e3 * one.busy:.1f}", *idle


def _write(profiles: list[Profile], out: Path) -> None:
    from ..trace.chrome import write_chrome_trace
    from ..trace.html import write_html
    from ..trace.png import MissingPackage, write_png
    from ..trace.timeline import make_panels

    panels = make_panels(profiles)
    write_chrome_trace(profiles, out / "trace.json")
    write_html(panels, out / "timeline.html")
    written = ["trace.json", "timeline.html"]
    try:
        write_png(panels, out / "timeline.png")
        written.append("timeline.png")
    except MissingPackage as error:
        tell(f"twostroke: {error}")
    typer.echo(f"\nwritten to {out}: {', '.join(written)}")

"""`twostroke simulate`: how many devices, with what settings, for a given traffic."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..bench.result import cpu_name, current_commit, current_date, usable_cores
from ..errors import InvalidConfig, counted, shown
from ..simulate.arrivals import Arrival
from ..simulate.benchmarks import KNOWN, model_of, simulate_benchmark
from ..simulate.cluster import simulate as simulate_cluster
from ..simulate.fit import Fit, fit_results, loops_of, read_result
from ..simulate.picture import require_matplotlib, write_picture
from ..simulate.report import Report
from ..simulate.routing import RULES
from ..simulate.search import Candidate, Targets, best, parse_variants, search
from ..simulate.settings import Settings
from ..simulate.shape import cost_of_preset
from ..simulate.trace_file import TraceFile
from ..simulate.traffic import BURSTS, PATTERNS, Traffic
from .flags import engine_flag, with_flags
from .folders import make_folder
from .streams import tell
from .table import print_table

MAX_REPLICAS = 4096
MEMORY_BYTES = 130e9
"""92% of an H200's 141 GB."""


def traffic_flag(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Traffic")


DRAWN, SETTINGS = Traffic(requests=1000), Settings()


@dataclass(frozen=True, kw_only=True)
class TrafficFlags:
    """`Traffic` as flags, with its defaults."""

    requests: Annotated[int, traffic_flag("Requests to draw.")] = DRAWN.requests
    rate: Annotated[float, traffic_flag("Requests a second, on average.")] = DRAWN.rate
    pattern: Annotated[str, traffic_flag(f"{', '.join(PATTERNS)}.")] = DRAWN.pattern
    burst: Annotated[int, traffic_flag("Conversations that begin at once; with --pattern bursts.")] = DRAWN.burst
    prompt_tokens: Annotated[str, traffic_flag("A number, or a range such as 100-1024, drawn evenly.")] = "512"
    output_tokens: Annotated[str, traffic_flag("The same of answers.")] = "128"
    prefixes: Annotated[int, traffic_flag("Different beginnings that prompts share.")] = DRAWN.prefixes
    prefix_tokens: Annotated[int, traffic_flag("Tokens of each of these; 0 is none.")] = DRAWN.prefix_tokens
    turns: Annotated[int, traffic_flag("Requests of a conversation; each repeats all before it.")] = DRAWN.turns
    turn_seconds: Annotated[float, traffic_flag("From one turn to the next, on average.")] = DRAWN.turn_seconds
    seed: Annotated[int, traffic_flag("Of what is drawn.")] = DRAWN.seed

    def traffic(self) -> Traffic:
        """Raise `InvalidConfig` if a value is out of its range."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("prompt_tokens", "output_tokens"):
            values[name] = _range(name, values[name], "-")
        traffic = Traffic(**values)
        traffic.validate()
        return traffic


@dataclass(frozen=True, kw_only=True)
class SettingsFlags:
    """`Settings` as flags, with its defaults."""

    loop: Annotated[str, engine_flag("async or sync.")] = SETTINGS.loop
    slots: Annotated[int, engine_flag("Sets of buffers; steps in flight.")] = SETTINGS.slots
    max_rows: Annotated[int, engine_flag("Most samples that run together.")] = SETTINGS.max_rows
    max_step_tokens: Annotated[int, engine_flag("Most tokens of one step.")] = SETTINGS.max_step_tokens
    max_chunk_tokens: Annotated[int | None, engine_flag("Most tokens of one prompt in a step.")] = None
    block_size: Annotated[int, engine_flag("KV positions of a block.")] = SETTINGS.block_size
    num_blocks: Annotated[int | None, engine_flag("Blocks of the KV cache.")] = None
    cache_bytes: Annotated[int | None, engine_flag("Size of the KV cache in bytes.")] = None
    max_model_len: Annotated[int, engine_flag("Most tokens of prompt and output together.")] = SETTINGS.max_model_len
    prefix_cache: Annotated[
        bool, engine_flag("Reuse the KV cache of equal prompt beginnings.", "--prefix-cache/--no-prefix-cache")
    ] = SETTINGS.prefix_cache
    policy: Annotated[str, engine_flag("Whose turn it is: fcfs, priority or shortest.")] = SETTINGS.policy
    patience: Annotated[float | None, engine_flag("Seconds of waiting that make up for a lower rank.")] = None
    max_waiting: Annotated[int | None, engine_flag("Most requests in the queue.")] = None
    max_prompt_ms: Annotated[float | None, engine_flag("Time that prompts may add to a step.")] = None


def simulate(
    traffic: TrafficFlags,
    engine: SettingsFlags,
    fit: Annotated[
        list[Path], typer.Option(metavar="FILE", help="A result of twostroke bench on a GPU; may be repeated.")
    ],
    model: Annotated[
        str | None, typer.Option(help="A preset of random weights; the one of the results if not given.")
    ] = None,
    memory_bytes: Annotated[
        float, typer.Option(min=1, max=1e15, help="Of a device, for weights and cache. The default is for an H200.")
    ] = MEMORY_BYTES,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Requests as JSON lines, instead of drawn ones.")
    ] = None,
    hash_tokens: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="Tokens that a hash in the trace stands for.")
    ] = 512,
    replicas: Annotated[str, typer.Option(help="A number of engines, or a range such as 1..8.")] = "1",
    routing: Annotated[str, typer.Option(help=f"{', '.join(RULES)}.")] = "least-loaded",
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE,...", help="Try these values of an engine setting; may be repeated."),
    ] = None,
    target_ttft_ms: Annotated[
        float | None, typer.Option(min=0, help="Find replicas with which 99% get their first token within this time.")
    ] = None,
    target_itl_ms: Annotated[
        float | None, typer.Option(min=0, help="The same of 99% of the times from token to token.")
    ] = None,
    price: Annotated[float, typer.Option(min=0, help="Of an hour of a GPU, in dollars.")] = 5.0,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the figures.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here.")] = None,
    bench: Annotated[str | None, typer.Option(help=f"Simulate this benchmark: {', '.join(KNOWN)}.")] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A result to compare with; alone, of the benchmark to simulate.")
    ] = None,
) -> None:
    """Simulate engines with the real scheduler, on a clock and a step-time model that is fitted to benchmarks."""
    for path, flag in ((png, "--png"), (json_file, "--json")):
        if path is not None:
            make_folder(path.parent, flag)
    if png is not None:
        require_matplotlib("--png")
    compares = bench is not None or against is not None
    if compares:
        own: dict[str, Any] = vars(traffic) | vars(engine) | {"model": model, "hash_tokens": hash_tokens}
        own |= {"replicas": replicas, "routing": routing, "sweep": sweep, "price": price}
        own |= {"target_ttft_ms": target_ttft_ms, "target_itl_ms": target_itl_ms}
        own |= {"trace": trace and str(trace), "png": png and str(png)}
        _refuse_unused("with --bench or --against", own)
    elif trace is not None:
        _refuse_unused("with --trace", vars(traffic))
    else:
        _refuse_unused("without --trace", {"hash_tokens": hash_tokens})
        if traffic.pattern != BURSTS:
            _refuse_unused(f"with --pattern {traffic.pattern}", {"burst": traffic.burst})
    fitted = fit_results([read_result(path) for path in fit], memory_bytes)
    _print_fit(fitted)
    if compares:
        _print_comparison(fitted, bench, against, memory_bytes, json_file)
        return
    if routing not in RULES:
        raise InvalidConfig(f"routing={routing!r} must be one of {', '.join(RULES)}")
    counts = _range("replicas", replicas, "..")
    if counts[1] > MAX_REPLICAS:
        raise InvalidConfig(f"replicas={replicas} must be at most {MAX_REPLICAS}")
    if model is not None:
        fitted = replace(fitted, step_time=replace(fitted.step_time, cost=cost_of_preset(model)), model=model)
    arrivals: Iterable[Arrival] = traffic.traffic() if trace is None else TraceFile(trace, hash_tokens)
    targets = Targets(_seconds(target_ttft_ms), _seconds(target_itl_ms))

    def run(settings: Settings, count: int) -> Report:
        return simulate_cluster(arrivals, settings, fitted.step_time, memory_bytes, replicas=count, routing=routing)

    variants = parse_variants(sweep or [])
    settings, found = Settings(**asdict(engine)), []
    for one in search(variants, settings, range(counts[0], counts[1] + 1), targets, run):
        found.append(one)
        report, seconds = one.report, f"{one.wall_seconds:.1f} s ({one.cpu_seconds:.1f} s of CPU)"
        tell(
            f"replicas={report.replicas}: {counted(report.requests, 'request')}, {counted(report.steps, 'step')}, "
            f"simulated in {seconds}"
        )
        if report.refused:
            tell(f"{report.refused} refused, the first because {report.measures.refusal}")
    _print_candidates(found, targets, price)
    if png is not None:
        write_picture([(_label(one), one.report) for one in found], price, png)
    if json_file is not None:
        load = {"trace": str(trace)} if trace is not None else asdict(traffic)
        candidates = [_figures(one, price) for one in found]
        _write_json(json_file, fitted, {"traffic": load, "routing": routing, "candidates": candidates})


simulate = with_flags(simulate)


def _refuse_unused(beside: str, values: Mapping[str, Any]) -> None:
    """Raise `InvalidConfig` for a flag that changes nothing beside others, unless it has its default."""
    flags = inspect.signature(simulate).parameters
    for name, value in values.items():
        if value != flags[name].default:
            raise InvalidConfig(f"{name}={shown(value)} has no use {beside}")


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else 1e-3 * milliseconds


def _range(name: str, text: str, separator: str) -> tuple[int, int]:
    """A number, or two with `separator` between them."""
    low, _, high = text.partition(separator)
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        bounds = 0, 0
    if not 1 <= bounds[0] <= bounds[1]:
        raise InvalidConfig(f"{name}={shown(text)} must be a number, or a range such as 1{separator}8, from 1 on")
    return bounds


def _print_fit(fit: Fit) -> None:
    step = fit.step_time
    typer.echo(
        f"{fit.model} on {fit.gpu}: a step takes {step.read_factor:.3f} x reading "
        f"+ {step.compute_factor:.3f} x computing + {1e3 * step.per_step:.3f} ms; "
        f"the CPU {1e3 * step.host:.3f} ms before it"
    )
    for point in fit.points:
        measured, fitted = 1e3 * point.measured, 1e3 * point.fitted
        typer.echo(f"fit: {point.benchmark} measured {measured:.3f} ms/step, fitted {fitted:.3f}, {point.error:+.1%}")
    free = "" if len(fit.points) > fit.numbers else " (no more results than numbers: it says nothing)"
    typer.echo(f"fit: error {fit.error:.1%}{free}\n")


def _print_comparison(
    fit: Fit, bench: str | None, against: Path | None, memory_bytes: float, json_file: Path | None
) -> None:
    """The throughput of a simulated benchmark under each loop, beside the measured one."""
    result = None if against is None else read_result(against)
    name = bench or (result.benchmark if result else "")
    if result is not None and result.benchmark != name:
        raise InvalidConfig(f"--against {against} is a result of {result.benchmark!r}, not of {name!r}")
    if model_of(name) != fit.model:
        raise InvalidConfig(f"benchmark {name!r} runs {model_of(name)}, the results of --fit are of {fit.model}")
    runs = loops_of(result) if result else {}
    rows, written = [], []
    for loop in runs or ("sync", "async"):
        one = simulate_benchmark(name, fit.step_time, loop, result.workload if result else {}, memory_bytes)
        measured = runs[loop].tokens_per_s if runs else None
        error = None if measured is None else one.tokens_per_s / measured - 1
        steps = 1e3 * one.seconds / one.steps
        written.append(
            {"loop": loop, "tokens_per_s": one.tokens_per_s, "ms_per_step": steps, "measured_tokens_per_s": measured}
            | {"error": error, **one.extra}
        )
        rows.append(
            (loop, f"{one.seconds:.2f}", f"{steps:.2f}", f"{one.tokens_per_s:.1f}")
            + (("-", "-") if measured is None or error is None else (f"{measured:.1f}", f"{error:+.1%}"))
            + tuple(f"{value:.1f}" for value in one.extra.values())
        )
    extra = [name.replace("_", " ") for name in one.extra]
    print_table(("loop", "seconds", "ms/step", "tokens/s", "measured tokens/s", "difference", *extra), rows)
    if json_file is not None:
        _write_json(json_file, fit, {"simulated": name, "runs": written})


def _label(one: Candidate) -> str:
    return " ".join([f"{one.report.replicas}", *(f"{name}={value}" for name, value in one.changed.items())])


def _figures(one: Candidate, price: float) -> dict[str, Any]:
    """What a file keeps of a candidate; None is what nothing tells."""
    report = {f.name: getattr(one.report, f.name) for f in fields(Report) if f.name != "measures"}
    costs = {
        "tokens_per_s": one.report.tokens_per_s,
        "gpu_hours": one.report.gpu_hours,
        "cost": one.report.cost(price),
        "cost_per_million": one.report.cost_per_million(price),
    }
    simulated = {"wall_seconds": one.wall_seconds, "cpu_seconds": one.cpu_seconds}
    told = {name: value if math.isfinite(value) else None for name, value in (report | costs).items()}
    return {"settings": asdict(one.settings), **told, "meets_targets": one.meets, "simulated_in": simulated}


def _write_json(path: Path, fit: Fit, found: dict[str, Any]) -> None:
    points = [asdict(point) | {"error": point.error} for point in fit.points]
    facts = {
        "date": current_date(),
        "commit": current_commit(),
        "machine": {"cpu": cpu_name(), "cores": usable_cores()},
        "model": fit.model,
        "gpu": fit.gpu,
        "step_time": asdict(fit.step_time),
        "fit": points,
    }
    path.write_text(json.dumps({"simulate": facts, **found}, indent=1) + "\n")
    typer.echo(f"\nwritten to {path}")


def _print_candidates(found: list[Candidate], targets: Targets, price: float) -> None:
    columns = ["replicas", *found[0].changed, "requests", "refused", "tokens/s", "TTFT p50 ms", "p99 ms"]
    columns += ["ITL p50 ms", "p99 ms", "cached", "preempted", "busy", "GPU hours", "cost $", "$ per M tokens"]
    print_table(columns, [_row(one, price) for one in found])
    if targets.given:
        chosen = best(found)
        answer = f"replicas={_label(chosen)}: the fewest that meet" if chosen else "none meets"
        typer.echo(f"\n{answer} the targets")


def _row(one: Candidate, price: float) -> tuple[str, ...]:
    report = one.report
    waits = (report.first_token_p50, report.first_token_p99, report.inter_token_p50, report.inter_token_p99)
    return (
        str(report.replicas),
        *map(str, one.changed.values()),
        str(report.requests),
        str(report.refused),
        f"{report.tokens_per_s:.1f}",
        *(f"{1e3 * wait:.1f}" for wait in waits),
        f"{report.cached_share:.1%}",
        str(report.preemptions),
        f"{report.busy_share:.1%}",
        f"{report.gpu_hours:.3f}",
        f"{report.cost(price):.2f}",
        f"{report.cost_per_million(price):.3f}",
    )

"""Peers on twostroke's workloads: each in a process of its own, through the scripts in the peers' folder.

The scripts know the workloads, with the same token lists as `offline`, and print their figures, which are read here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from ..errors import InvalidConfig, TwostrokeError
from .options import BenchOptions
from .result import Run

TIMEOUT_SECONDS = 3600.0
LAST_LINES = 15


class PeerFailed(TwostrokeError):
    """A peer ended without its figures; the message has its last lines."""


class Peer(ABC):
    """Another engine.

    Attributes:
        name: as on the command line.
        script: of the peers' folder.
        loop: `sync` or `async`, if it has the choice; see `Run`.
    """

    name: str
    script: str
    loop: str | None = None

    @abstractmethod
    def arguments(self, benchmark: str, repetitions: int) -> list[str] | None:
        """The script's arguments for a benchmark; None if it does not know it."""

    @abstractmethod
    def parse(self, line: str, benchmark: str) -> tuple[float, int, float | None] | None:
        """Seconds, tokens and milliseconds per step from a line of output; None if it has no figures of `benchmark`."""

    @abstractmethod
    def version(self, folder: Path) -> str:
        """The engine's version, as in its packages."""

    @contextlib.contextmanager
    def environment(self, folder: Path) -> Iterator[Mapping[str, str]]:
        """The variables that the process needs."""
        yield {"PYTHONPATH": str(folder)}


class Transformers(Peer):
    """transformers' continuous batching at its best; the folder stands in for the flash-attention package."""

    name = "transformers"
    script = "ref_cb.py"
    loop = "async"
    _figures = re.compile(r"tokens=(\d+) gen=([\d.]+)s .*ms/step=([\d.]+)")

    def arguments(self, benchmark: str, repetitions: int) -> list[str] | None:
        shape = {"article": ["--n", "8192"], "gsm8k": ["--gsm", "--n", "256"]}.get(benchmark)
        if match := re.fullmatch(r"(article|rollouts)-(\d+)", benchmark):
            shape = ["--n", match[2], "--prompt", "128" if match[1] == "article" else "256"]
        if shape is None:
            return None
        # Graphs of very many sizes: compiled, 1,319 requests would warm up for longer than they run.
        compiled = "0" if benchmark == "gsm8k" else "1"
        return ["--attn", "fa3", "--async_", "1", "--graphs", "1", "--compile", compiled, *shape]

    def parse(self, line: str, benchmark: str) -> tuple[float, int, float | None] | None:
        match = self._figures.search(line)
        return (float(match[2]), int(match[1]), float(match[3])) if match else None

    def version(self, folder: Path) -> str:
        return metadata.version("transformers")


class Vllm(Peer):
    """vLLM, from a packed site folder."""

    name = "vllm"
    script = "vllm_bench.py"

    def arguments(self, benchmark: str, repetitions: int) -> list[str] | None:
        if benchmark == "small":
            return ["small", "0"]
        if benchmark == "gsm8k":
            return ["more", "1"]
        match = re.fullmatch(r"(article|rollouts)(?:-(\d+))?", benchmark)
        # The script's model takes no more than 8,448 tokens.
        if match is None or int(match[2] or 0) > 8192:
            return None
        sizes = ",".join([match[2] or "8192"] * repetitions)
        return ["article" if match[1] == "article" else "more", sizes]

    def parse(self, line: str, benchmark: str) -> tuple[float, int, float | None] | None:
        try:
            figures = json.loads(line)
        except ValueError:
            return None
        known = benchmark.split("-")[0] if benchmark.startswith("article") else benchmark
        if not isinstance(figures, dict) or figures.get("bench") != known:
            return None
        return figures["seconds"], figures["tokens"], figures.get("ms_step")

    def version(self, folder: Path) -> str:
        match = re.match(r"vllm-(.+?)-", self._archive(folder).name)
        return match[1] if match else "of unknown version"

    @contextlib.contextmanager
    def environment(self, folder: Path) -> Iterator[Mapping[str, str]]:
        with tempfile.TemporaryDirectory() as site:
            with tarfile.open(self._archive(folder)) as archive:
                archive.extractall(site, filter="tar")
            yield {
                "PYTHONPATH": site,
                "VLLM_USE_FLASHINFER_SAMPLER": "0",
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
            }

    def _archive(self, folder: Path) -> Path:
        archives = sorted(folder.glob("vllm-*-site.tar.xz"))
        if not archives:
            raise PeerFailed(f"{folder} has no vllm-VERSION-site.tar.xz")
        return archives[-1]


PEERS: dict[str, Peer] = {peer.name: peer for peer in (Transformers(), Vllm())}


def check_peers(benchmark: str, options: BenchOptions) -> None:
    """Raise `InvalidConfig` if a peer asked for is unknown, does not know the benchmark, or has no script.

    So is a folder without peers.
    """
    if options.peer_dir is not None and not options.peers:
        raise InvalidConfig(f"peer_dir={str(options.peer_dir)!r} is for peers, and none is asked for")
    for name in options.peers:
        if name not in PEERS:
            raise InvalidConfig(f"peer={name!r} must be one of {', '.join(PEERS)}")
        if PEERS[name].arguments(benchmark, 1) is None:
            raise InvalidConfig(f"peer={name!r} has no benchmark {benchmark!r}")
        if options.peer_dir is None or not (options.peer_dir / PEERS[name].script).is_file():
            raise InvalidConfig(f"peer={name!r} needs peer_dir to hold {PEERS[name].script}; it is {options.peer_dir}")


def measure_peers(
    benchmark: str, options: BenchOptions, tokens: int, failures: dict[str, str], say: Callable[[str], None]
) -> list[Run]:
    """Run the peers asked for, one after the other; one that fails is put into `failures` by name."""
    runs = []
    for name in options.peers:
        say(f"{name}, in a process of its own")
        try:
            runs += run_peer(name, benchmark, options, tokens)
        except PeerFailed as error:
            say(f"{name} failed")
            failures[name] = str(error)
    return runs


def run_peer(name: str, benchmark: str, options: BenchOptions, tokens: int) -> list[Run]:
    """Run a peer's script in a process of its own and read its figures, one run for each time that it measured.

    Args:
        tokens: output tokens that a run must have.

    Raises:
        PeerFailed: it ended without figures, or with fewer tokens than it was asked for.
    """
    peer, folder = PEERS[name], options.peer_dir
    assert folder is not None
    arguments = peer.arguments(benchmark, options.repetitions)
    assert arguments is not None
    with peer.environment(folder) as environment:
        output = _run_script(folder / peer.script, arguments, environment)
    figures = [found for line in output.splitlines() if (found := peer.parse(line, benchmark)) is not None]
    if not figures or any(found[1] != tokens for found in figures):
        raise PeerFailed(f"{name} gave no {tokens} tokens:\n{_last_lines(output)}")
    engine = f"{name} {peer.version(folder)}"
    return [
        Run(engine=engine, loop=peer.loop, seconds=seconds, tokens=count, ms_per_step=ms)
        for seconds, count, ms in figures
    ]


def _run_script(script: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return what the script printed, to either stream."""
    paths = [environment["PYTHONPATH"], os.environ.get("PYTHONPATH")]
    environment = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, str(script), *arguments]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            ended = f"ended with code {process.wait(TIMEOUT_SECONDS)}"
        except subprocess.TimeoutExpired:
            ended = f"took more than {TIMEOUT_SECONDS:g} s"
        finally:
            _end_group(process)
        log.seek(0)
        output = log.read()
    if process.returncode:
        raise PeerFailed(f"{script.name} {ended}:\n{_last_lines(output)}")
    return output


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and what it started, so that nothing of a peer runs, or holds memory, beside what comes next."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_lines(output: str) -> str:
    return "\n".join(output.splitlines()[-LAST_LINES:])

"""Fixtures that several test files share."""

import fcntl
import gc
import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # NOTE: torch reads this when it is imported, in the processes that tests start too. Threads of several workers on
    # the same cores would wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # NOTE: triton reads this when a kernel is defined, its own library's among them: set before the imports below, as
    # some versions of transformers import triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from families import save_family

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    from quick_interpreter import quicken

    quicken()

from twostroke.model.default_model import default_model_dir

# A shell has its background jobs ignore Ctrl-C, and so would they have the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A failure of `make test` is the change's own: the same examples every time. `make test-all` looks for new ones.
settings.register_profile("fixed", derandomize=True)
settings.register_profile("search", derandomize=False)
settings.load_profile("fixed")

collect_ignore_glob = [
    *([] if find_spec("fastapi") else ["test_server_*.py"]),
    *([] if find_spec("pydantic") and find_spec("msgspec") else ["test_jobs_*.py"]),
]
"""Without the packages that OpenAI's forms and the server need, what uses them is left out."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def smollm2_dir(tmp_path_factory) -> Path:
    """The default model's directory; downloaded and converted once, then cached."""
    shared = tmp_path_factory.getbasetemp().parent  # of all workers of a run
    with open(shared / "smollm2.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return default_model_dir()


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Return a function: family (see families.py) -> (directory, transformers model), made once."""
    made = {}

    def get(family):
        if family not in made:
            directory = tmp_path_factory.mktemp(family)
            made[family] = directory, save_family(family, directory)
        return made[family]

    return get


@pytest.fixture(scope="session")
def small_dir(smollm2_dir, tmp_path_factory) -> Path:
    """A small random model with the default model's tokenizer."""
    from scripted import save_small

    return save_small(smollm2_dir, tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def models(request, tmp_path_factory) -> list[Path]:
    """Two models of one shape, for tests that put one in the other's place."""
    from maintained import save_model

    folder = tmp_path_factory.mktemp("models")
    return [save_model(folder / str(seed), seed, request.param) for seed in (1, 2)]


@pytest.fixture
def no_collection():
    """The collector frees nothing meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def streamed_library(tmp_path_factory):
    """The library of the attention of decode lanes in CUDA C++, for the CPU."""
    from emulation import compiled

    sources = ["streamed_decode.cuh", "head_softmax.cuh", "pairs.cuh"]
    return compiled(tmp_path_factory.mktemp("emulated"), "streamed_decode.cpp", sources)


@pytest.fixture(scope="session")
def prefill_library(tmp_path_factory):
    """The same of the attention of prompt chunks."""
    from emulation import compiled

    sources = ["streamed_prefill.cuh", "query_rotation.cuh", "row_softmax.cuh", "pairs.cuh"]
    return compiled(tmp_path_factory.mktemp("emulated"), "prompts/streamed_prefill.cpp", sources)


@pytest.fixture
def prefill_launcher(request, monkeypatch):
    """Makes a `StreamedPrefill` for a device; on the CPU its blocks are emulated, in an order that a seed gives."""
    from streamed_prefill_case import EMULATED_BLOCKS, emulate

    from twostroke.kernels.streamed_prefill import StreamedPrefill

    def make(where, seed=0, blocks=EMULATED_BLOCKS):
        if where == "cpu":
            emulate(request.getfixturevalue("prefill_library"), monkeypatch, seed, blocks)
        return StreamedPrefill(torch.device(where))

    return make


@pytest.fixture
def launcher(request, monkeypatch):
    """Makes a `StreamedDecode` for a device; on the CPU its warps are emulated."""
    from streamed_case import emulate

    from twostroke.kernels.streamed_decode import StreamedDecode

    def make(where):
        if where == "cpu":
            emulate(request.getfixturevalue("streamed_library"), monkeypatch)
        return StreamedDecode(torch.device(where))

    return make


@pytest.fixture(scope="session")
def ray_cluster():
    """A Ray cluster of two nodes on this machine, which this process is connected to; see ray_nodes.py."""
    pytest.importorskip("ray")
    from ray_nodes import RayNodes

    with RayNodes() as nodes:
        yield nodes


@pytest.fixture(scope="session")
def tiny_engine():
    """An engine process of the tiny model, for servers of different settings; whoever uses it leaves it alive."""
    from serving import engine_process

    arguments = {"model": "tiny", "device": "cpu", "num_blocks": 600, "max_rows": 4, "seed": 0}
    with engine_process(arguments) as supervisor:
        yield supervisor


@pytest.fixture(scope="session")
def server(small_dir):
    """A server of the small model, started as a command."""
    from serving import served

    with served(
        small_dir, "--num-blocks", "600", "--max-rows", "8", "--engine-seed", "0", "--no-log-requests"
    ) as server:
        yield server

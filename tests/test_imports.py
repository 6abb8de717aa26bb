"""Which part may import which: the table of the design, held against the source.

Every import counts, also one inside a function or under `TYPE_CHECKING`, so that no part leans on another unseen.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "twostroke"

WORDS = {
    *("request", "terms", "limits", "cache_groups", "plan", "sampling_params", "structured"),
    *("held_input", "logprob_record"),
}
BELOW_ENGINE = WORDS | {
    *(
        "cache",
        "scheduler",
        "kernels",
        "attention",
        "model",
        "sampling",
        "text",
        "device",
        "runner",
        "sampling_part",
        "loop",
        "constraints",
    ),
}
ENGINE = {
    *(
        "engine",
        "build",
        "build_host_tier",
        "build_memory",
        "build_report",
        "config",
        "front",
        "inbox",
        "calls",
        "lifecycle",
        "maintenance",
    ),
    *("progress", "prompts", "rollout", "watched"),
}
"""The engine and the files it is cut into."""

ALLOWED = {
    "plain_ids": {"numpy"},
    "checks": {"numpy", "plain_ids"},
    "structured": {"checks"},
    "held_input": {"numpy"},
    "logprob_record": {"numpy"},
    "sampling_params": {"numpy", "checks", "structured", "logprob_record"},
    "logit_rules": {"numpy", "checks", "sampling_params"},
    "plan": {"numpy", "sampling_params", "logprob_record"},
    "cache_groups": set(),
    "limits": {"cache_groups"},
    "terms": {"numpy", "checks", "limits", "sampling_params", "logit_rules", "plan"},
    "request": {"numpy", "checks", "limits", "terms", "sampling_params", "logit_rules"},
    "errors": set(),
    "interrupts": set(),
    "cache": {"numpy", "request", "plan"},
    "scheduler": {"numpy", "request", "terms", "plan", "held_input", "cache", "cache_groups", "logprob_record"},
    "constraints": {"numpy", "llguidance", "checks", "structured", "limits", "terms", "request", "text"}
    | {"sampling_params"},
    "kernels": {"torch", "triton"},
    "attention": {"torch", "kernels"},
    "model": {"torch", "numpy", "transformers", "safetensors", "gguf", "tokenizers", "huggingface_hub"}
    | {"attention", "kernels"},
    "sampling": {"torch", "numpy", "kernels", "held_input", "logprob_record"},
    # transformers: for tokenizers that are not a tokenizer.json, imported when such a one is met.
    "text": {"numpy", "tokenizers", "jinja2", "transformers", "checks", "request"},
    "device": {"torch", "numpy", "plan", "logprob_record"},
    "runner": {"torch", "numpy", "device", "model", "sampling", "sampling_part", "plan", "held_input"},
    "sampling_part": {"torch", "device", "sampling", "plan"},
    "loop": set(),
    "config": set(),
    "watched": {"device"},
    "inbox": set(),
    "stderr": {"rich"},
    "progress": {"rich", "stderr", "text"},
    "prompts": {"numpy", "checks", "plain_ids", "text"},
    "build_report": set(),
    "build_host_tier": {"torch", "config"} | BELOW_ENGINE,
    "build_memory": {"torch", "config"} | BELOW_ENGINE,
    "build": {"build_host_tier", "build_memory", "build_report", "torch", "numpy", "config"} | BELOW_ENGINE,
    "calls": {"inbox"},
    "maintenance": {"torch", "build", "calls"} | BELOW_ENGINE,
    "lifecycle": {"calls", "torch", "build", "inbox", "watched"} | BELOW_ENGINE,
    "rollout": {"numpy", "prompts", "text", "checks"} | WORDS,
    "front": {"numpy", "progress", "prompts", "text", "constraints"} | WORDS,
    "engine": {"torch", "numpy"} | ENGINE | BELOW_ENGINE,
    # triton: for the kernel that reads the memory's ceiling, which no step runs. tokenizers: to make one up.
    "bench": {"torch", "triton", "numpy", "transformers", "tokenizers", "jobs"}
    | {"safetensors", "server", "prometheus_client"}
    | ENGINE
    | BELOW_ENGINE,
    # bench: workloads, floors and result files, which need no torch. model: the presets' shapes.
    "simulate": {"numpy", "matplotlib", "bench", "scheduler", "model", "config"} | WORDS,
    "trace": {"matplotlib"} | ENGINE | BELOW_ENGINE,
    # engine: only the package's version, which lies in `__init__.py`.
    "openai": {"pydantic", "pydantic_core", "msgspec", "numpy", "text", "engine"} | WORDS,
    "server": {"fastapi", "starlette", "uvicorn", "uvloop", "pydantic", "msgspec", "numpy", "openai", "trace"}
    | {"prometheus_client", "opentelemetry"}
    | ENGINE
    | BELOW_ENGINE,
    "fleet": {"ray", "starlette", "pydantic", "msgspec", "openai", "server"},
    "jobs": {"rich", "numpy", "msgspec", "pydantic", "openai", "ray", "pyarrow"}
    | {"interrupts", "stderr"}
    | ENGINE
    | BELOW_ENGINE,
    "cli": {"typer", "rich", "torch", "bench", "trace", "server", "simulate", "jobs", "interrupts"}
    | ENGINE
    | BELOW_ENGINE,
}
"""What each part may import, besides the standard library, itself, and (all but `kernels`) `errors`."""

ALSO = {"cache/offload.py": {"torch"}}
"""What single files may import beyond that."""

ENTRANCES = {"__init__", "__main__"}
"""The package's own files, which only re-export: free to import any part."""


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_names(source: str, path: Path) -> set[str]:
    """The top-level third-party packages and the parts of twostroke that a file imports."""
    package = ["twostroke", *path.relative_to(PACKAGE).parts[:-1]]
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            # NOTE: `from twostroke import x` and `from . import x` may name a part, so each name is looked at.
            modules = [".".join([*base, alias.name]) for alias in node.names]
        else:
            continue
        names |= {owner(module.split(".")) for module in modules}
    return names - set(sys.stdlib_module_names)


def owner(module: list[str]) -> str:
    """The part that a module of twostroke lies in, or the top-level package of any other."""
    if module[0] != "twostroke":
        return module[0]
    if len(module) == 1:
        return "engine"
    place = PACKAGE / module[1]
    return module[1] if place.is_dir() or place.with_suffix(".py").exists() else "engine"


def forbidden(source: str, path: Path) -> set[str]:
    part = part_of(path)
    allowed = (
        ALLOWED[part]
        | ALSO.get(str(path.relative_to(PACKAGE)), set())
        | {part}
        | (set() if part == "kernels" else {"errors"})
    )
    return imported_names(source, path) - allowed


FILES = sorted(path for path in PACKAGE.rglob("*.py") if part_of(path) not in ENTRANCES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_part_imports_only_what_the_design_lets_it(path: Path) -> None:
    assert part_of(path) in ALLOWED, f"{part_of(path)} is a new part: enter it into the table"
    assert not forbidden(path.read_text(), path)


@pytest.mark.parametrize(
    ("place", "source", "culprit"),
    [
        ("scheduler/x.py", "import torch", "torch"),
        ("scheduler/x.py", "def f():\n    import torch.cuda", "torch"),
        ("scheduler/x.py", "from ..engine import Engine", "engine"),
        ("cache/x.py", "from .. import scheduler", "scheduler"),
        ("cache/x.py", "import torch", "torch"),
        ("loop.py", "from .device.slot import Slot", "device"),
        ("loop.py", "from twostroke.runner import Runner", "runner"),
        ("kernels/x.py", "from ..errors import TwostrokeError", "errors"),
        ("text/x.py", "from twostroke import Engine", "engine"),
        ("device/x.py", "if TYPE_CHECKING:\n    from ..model.interface import Model", "model"),
    ],
)
def test_the_check_sees_every_way_to_import(place: str, source: str, culprit: str) -> None:
    assert forbidden(source, PACKAGE / place) == {culprit}


@pytest.mark.parametrize(
    "module",
    [
        *("request", "plan", "cache", "scheduler", "text", "loop", "front", "openai.chat", "cli.main"),
        *("bench.registry", "simulate.fit", "simulate.cluster"),
    ],
)
def test_torch_does_not_come_in_by_a_back_door(module: str) -> None:
    """What the arrows promise file by file must hold for what an import really loads."""
    code = f"import sys, twostroke.{module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

"""CUDA C++ sources compiled at first use, for what Triton cannot say."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import torch

SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cu")))
"""All that there are, of kernels for `CAPABILITY`."""
CAPABILITY = (9, 0)
TARGET = "90a"

_loaded: dict[str, ctypes.CDLL] = {}
_compiling: dict[str, threading.Lock] = {}
_refused: dict[str, str] = {}


class CompilerMissing(RuntimeError):
    """There is no CUDA compiler, or it refused the source; the message has its last lines."""


def compile_ahead(sources: tuple[Path, ...] = SOURCES, target: str = TARGET) -> None:
    """Begin to compile sources that will be loaded, all at once, in threads of their own.

    What goes wrong is said by who loads them.
    """
    for source in sources:
        threading.Thread(target=_compile_quietly, args=(source, target), name=f"compile {source.name}").start()


def load_library(source: Path, target: str = TARGET) -> ctypes.CDLL:
    """Return the library made from a CUDA C++ source, compiled once per source, target and compiler.

    Args:
        source: a .cu file with C functions.
        target: of the compiler, such as `90a`.

    Raises:
        CompilerMissing: the library is not there yet and cannot be made.
    """
    key = f"{source}:{target}"
    if key not in _loaded:
        try:
            _loaded[key] = ctypes.CDLL(str(_compiled(source, target)))
        except OSError as error:
            raise CompilerMissing(f"{source.name} cannot be compiled or loaded: {error}") from error
    return _loaded[key]


def _compiled(source: Path, target: str) -> Path:
    compiler = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    code = b"".join(path.read_bytes() for path in [source, *sorted(source.parent.glob("*.cuh"))])
    fingerprint = hashlib.sha256(code + f"{target} {torch.version.cuda}".encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twostroke" / "kernels"
    library = folder / f"{source.stem}-{fingerprint}.so"
    with _compiling.setdefault(library.name, threading.Lock()):
        if (refusal := _refused.get(library.name)) is not None:
            raise CompilerMissing(refusal)
        if not library.exists():
            _compile(compiler, source, target, library)
    return library


def _compile_quietly(source: Path, target: str) -> None:
    with suppress(Exception):
        _compiled(source, target)


def _compile(compiler: str, source: Path, target: str, library: Path) -> None:
    folder = library.parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / library.name
        architecture = f"arch=compute_{target},code=sm_{target}"
        command = [
            compiler,
            "-O3",
            "-std=c++17",
            "-gencode",
            architecture,
            "-shared",
            "-Xcompiler",
            "-fPIC",
            "-o",
            made,
            source,
        ]
        try:
            subprocess.run(
                [str(part) for part in command], check=True, capture_output=True, text=True, errors="replace"
            )
        except FileNotFoundError as error:
            raise CompilerMissing("no CUDA compiler (nvcc) was found") from error
        except subprocess.CalledProcessError as error:
            _refused[library.name] = f"nvcc refused {source.name}: {error.stderr[-2000:]}"
            raise CompilerMissing(_refused[library.name]) from error
        os.replace(made, library)  # two processes may compile at once: the last one wins, with the same bytes

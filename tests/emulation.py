"""Kernels in CUDA C++ on the CPU: their sources, with twins of what only a GPU has, see `emulated/warp.h`."""

import ctypes
import mmap
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import twostroke.kernels

EMULATED = Path(__file__).parent / "emulated"
KERNELS = Path(twostroke.kernels.__file__).parent
FLAGS = ["-O2", "-std=c++17", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-Wno-psabi", "-shared", "-fPIC"]

emulated = pytest.mark.skipif(
    not shutil.which("g++") or torch.cuda.is_available(), reason="needs a C++ compiler, and Triton's interpreter"
)


def compiled(folder, main, sources):
    """Return the library made in a folder from `main` of `emulated`, and from sources of the kernels."""
    for source in sources:
        shutil.copy(KERNELS / source, folder)  # alone: a header finds its neighbours first, and is to find their twins
    main = EMULATED / main
    includes = [f"-I{place}" for place in (folder, main.parent, EMULATED)]
    made = folder / f"{main.stem}.so"
    subprocess.run(["g++", *FLAGS, *includes, "-o", made, main], check=True)
    return ctypes.CDLL(str(made))


def ahead_of_a_gap(tensor):
    """Return a copy behind which no memory is."""
    begin = -tensor.nbytes % mmap.PAGESIZE
    memory = mmap.mmap(-1, begin + tensor.nbytes + mmap.PAGESIZE)
    place = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + begin + tensor.nbytes
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(place), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    moved = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=begin).view(tensor.shape)
    return moved.copy_(tensor)

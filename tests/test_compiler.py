"""CUDA C++ compiled at first use; a stand-in for the compiler, since CI has none."""

import shutil
import stat

import pytest

from twostroke.kernels import compiler
from twostroke.kernels.compiler import SOURCES, CompilerMissing, compile_ahead, load_library


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_loaded", {})
    monkeypatch.setattr(compiler, "_refused", {})
    source = tmp_path / "answer.cu"
    source.write_text('extern "C" int answer() { return 42; }\n')
    return source


def stand_in(tmp_path, monkeypatch, script):
    """Put a compiler on the path that counts its calls."""
    path = tmp_path / "bin" / "nvcc"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\necho called >> {tmp_path}/calls\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(shutil, "which", lambda name: str(path))
    return lambda: (tmp_path / "calls").read_text().count("called")


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_a_library_is_compiled_once_and_anew_when_a_header_changes(source, tmp_path, monkeypatch):
    c = shutil.which("c++")
    # The arguments of nvcc that c++ knows: what comes behind -o, and the source.
    calls = stand_in(tmp_path, monkeypatch, f'while [ "$1" != -o ]; do shift; done; {c} -shared -fPIC -o $2 -x c++ $3')
    assert load_library(source, "90a").answer() == 42
    compiler._loaded.clear()
    assert load_library(source, "90a").answer() == 42
    assert calls() == 1
    compiler._loaded.clear()
    (tmp_path / "some.cuh").write_text("// new\n")
    load_library(source, "90a")
    assert calls() == 2


def test_a_refusal_has_the_compilers_words(source, tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, "echo 'line 1: no such thing' >&2; exit 1")
    with pytest.raises(CompilerMissing, match=r"answer\.cu.*no such thing"):
        load_library(source, "90a")


def test_no_compiler_is_said_so(source, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: str(tmp_path / "nowhere"))
    with pytest.raises(CompilerMissing, match="nvcc"):
        load_library(source, "90a")


def test_a_cache_that_cannot_be_written_is_said_so(source, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CompilerMissing, match=r"answer\.cu"):
        load_library(source, "90a")


def test_all_sources_are_compiled_ahead():
    assert {source.stem for source in SOURCES} == {"streamed_decode", "streamed_prefill", "thin_linear"}


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_sources_are_compiled_beside_each_other_and_who_loads_one_waits(source, tmp_path, monkeypatch):
    """Each compiler ends only when the other has begun."""
    c, other = shutil.which("c++"), tmp_path / "other.cu"
    other.write_text('extern "C" int answer() { return 43; }\n')
    both_began = f'while [ "$(wc -l < {tmp_path}/calls)" -lt 2 ]; do sleep 0.01; done'
    script = f'{both_began}; while [ "$1" != -o ]; do shift; done; {c} -shared -fPIC -o $2 -x c++ $3'
    calls = stand_in(tmp_path, monkeypatch, script)
    compile_ahead((source, other), "90a")
    assert load_library(source, "90a").answer() == 42
    assert load_library(other, "90a").answer() == 43
    assert calls() == 2


def test_what_cannot_be_compiled_ahead_is_said_by_who_loads_it(source, tmp_path, monkeypatch):
    """And not tried again. The compiler's words may be no text."""
    calls = stand_in(tmp_path, monkeypatch, r"printf 'line 1: \377 no such thing' >&2; exit 1")
    compile_ahead((source,), "90a")
    for _ in range(2):
        with pytest.raises(CompilerMissing, match="no such thing"):
            load_library(source, "90a")
    assert calls() == 1

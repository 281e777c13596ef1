"""How the C++ kernel comes into the user's cache."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from partial_fc.head.kernels import cpu
from partial_fc.head.kernels.choice import choose
from partial_fc.head.kernels.plain import PlainKernel
from partial_fc.head.native import build as native
from partial_fc.head.native import library as native_library
from partial_fc.head.native.build import CompilerNotFoundError, build, library, runnable


@pytest.fixture
def compiled() -> Path:
    """A library that is there already."""
    build(["portable"])
    return library("portable")


@pytest.fixture
def empty_cache(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "partial-fc" / "kernels"


def compiler(path: Path, last_line: str) -> Path:
    """A program that says in PATH.log that it was called, and whose last argument is what g++ is to write."""
    path.write_text(f'#!/bin/sh\necho called >>"$0.log"\n{last_line}\n')
    path.chmod(0o755)
    return path


def test_ranks_that_start_at_once_compile_it_once(compiled, empty_cache, tmp_path, monkeypatch):
    slow = compiler(tmp_path / "slow-g++", f'sleep 1; for last; do :; done; cp "{compiled}" "$last"')
    monkeypatch.setenv("CXX", str(slow))
    ranks = [subprocess.Popen([sys.executable, native.__file__, "portable"]) for _ in range(3)]
    assert [rank.wait(timeout=60) for rank in ranks] == [0, 0, 0]
    assert Path(f"{slow}.log").read_text() == "called\n"
    assert sorted(path.name for path in empty_cache.iterdir()) == ["lock", compiled.name], "and nothing half-written"
    cpu.load.__wrapped__("portable")


def test_a_training_loads_no_more_than_set_up_compiles(monkeypatch):
    loaded = []
    monkeypatch.setattr(native_library, "load_library", lambda variant: loaded.append(variant) or native._load(variant))
    monkeypatch.setattr(cpu, "load", native_library.load.__wrapped__)
    monkeypatch.setattr(native_library, "load", native_library.load.__wrapped__)
    cpu.variant_here.__wrapped__()
    assert native_library.loaded.__wrapped__()
    assert loaded
    assert set(loaded) <= set(native.taken())


@pytest.mark.parametrize(
    "left",
    [
        *(pytest.param(lambda whole, n=n: whole[:n], id=f"cut at {n}") for n in (0, 40, 5000, -1)),
        pytest.param(lambda whole: whole[:5] + b"\xff" + whole[6:], id="of another byte order"),
    ],
)
def test_what_cannot_be_loaded_is_compiled_again_once(compiled, empty_cache, tmp_path, monkeypatch, left):
    content = compiled.read_bytes()
    empty_cache.mkdir(parents=True)
    (empty_cache / compiled.name).write_bytes(left(content))
    good = compiler(tmp_path / "g++", f'for last; do :; done; cp "{compiled}" "$last"')
    monkeypatch.setenv("CXX", str(good))
    cpu.load.__wrapped__("portable")
    assert Path(f"{good}.log").read_text() == "called\n"
    assert (empty_cache / compiled.name).read_bytes() == content


@pytest.mark.skipif("avx2" not in native.VARIANTS, reason="the names of x86-64's instruction sets")
def test_the_kernel_names_instruction_sets_as_linux_does(monkeypatch):
    avx512 = "flags : fma f16c avx2 avx512f avx512bw avx512vl avx512dq"
    for flags, best in (
        (avx512, "avx512"),
        (f"{avx512} avx512_bf16 amx_tile amx_bf16", "amx"),
        ("flags : sse2", "portable"),
    ):
        monkeypatch.setattr(Path, "read_text", lambda _, text=flags: text)
        assert best in runnable()
        assert ("amx" in runnable()) == (best == "amx")


def test_compiled_libraries_are_used_from_a_cache_that_cannot_be_written(compiled, empty_cache, monkeypatch):
    """As in a container's image, or on a read-only home."""
    empty_cache.mkdir(parents=True)
    os.link(compiled, empty_cache / compiled.name)
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setenv("PATH", os.devnull)  # no compiler
    build(["portable"])
    assert library("portable") == empty_cache / compiled.name


@pytest.fixture
def no_compiler(empty_cache, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", os.devnull)
    cpu.load.cache_clear()
    yield
    cpu.load.cache_clear()


def test_without_a_compiler_auto_takes_the_plain_kernel_and_says_so_once(no_compiler):
    choice = ("auto", torch.device("cpu"), torch.float32, "fp32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        kernels = [choose(*choice) for _ in range(2)]
    assert all(isinstance(kernel, PlainKernel) for kernel in kernels)
    (warning,) = caught
    assert "g++" in str(warning.message)
    assert "'plain'" in str(warning.message)


def test_without_a_compiler_the_kernel_that_is_asked_for_by_name_is_refused(no_compiler):
    with pytest.raises(CompilerNotFoundError, match=r"g\+\+.*'plain'"):
        choose("cpu", torch.device("cpu"), torch.float32, "fp32")

"""What a run can do without, and its evaluations: whatever they do, the trained steps are kept.

Runs are of recipe face, in this process. One run has every accessory broken at once: each must be named, once.
"""

import json
import logging
import os
import shlex
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from partial_fc import accessories, machine, pictures, terminal
from partial_fc.accessories import import_matplotlib, spare, threads
from partial_fc.checkpoint.lock import InUse, acquire
from partial_fc.checkpoint.read import Checkpoint
from partial_fc.checkpoint.saver import Saver
from partial_fc.comm import SingleWorld, all_or_none
from partial_fc.data import ImageFolder, RecordSource
from partial_fc.data.pairs import write_pairs
from partial_fc.data.sample import identity
from partial_fc.evaluate import verification
from partial_fc.head.kernels import cpu
from partial_fc.head.kernels.choice import choose
from partial_fc.head.kernels.plain import PlainKernel
from partial_fc.train.record import boards, header
from partial_fc.verbs.checkpoint.inspect import summary
from partial_fc.verbs.checkpoint.verify import VerifyOptions, verify
from tests.running import here
from tests.unit.thread_world import ThreadWorld, in_world
from tests.world.made import class_folders, image, write_rec
from tests.world.rows import Row, table

SMALL = (
    "--network tiny --image-size 40 --embedding-size 8 --batch-size 4 --num-workers 1 --warmup-steps 0 --lr-scheduler "
)
SMALL += "constant --frequent 1 --verbose 2 --checkpoint-every 2 --precision fp32"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven images of three classes, and pairs of them; cut.bin's 8th image is cut."""
    folder = tmp_path_factory.mktemp("photos")
    class_folders(folder / "train", 3, 4)
    (folder / "train/id002/3.jpg").unlink()
    files = [image(c, n) for n in range(10) for c in (0, 0, 0, 1)]
    same = [True, False] * 10
    write_pairs(folder / "whole.bin", files, same)
    write_pairs(folder / "cut.bin", [*files[:7], files[7][:300], *files[8:]], same)
    return folder


def train(root: Path, photos: Path, flags: str) -> str:
    words = ["--rec", str(photos / "train"), "--models-root", str(root), *SMALL.split(), *shlex.split(flags)]
    assert here("recipes.face.main", words) == 0
    return (root / "logs/rank-0000.log").read_text()


def broken(error: BaseException) -> Callable[..., Any]:
    def act(*_: object, **__: object) -> None:
        raise error

    return act


def wandb_that(log: Callable[..., Any]) -> SimpleNamespace:
    run = SimpleNamespace(id="x", define_metric=lambda *_, **__: None, log=log, finish=lambda: None)
    return SimpleNamespace(init=lambda **_: run, __spec__="installed")


# ---- accessories


ACCESSORIES = [
    Row("first_batch.png", "Pillow or its font", (pictures, "sheet"), "first_batch.png"),
    Row("roc.png", "matplotlib", (verification, "plot"), "the picture of "),
    Row("TensorBoard", "protobuf: Descriptors cannot be created directly", (boards.TensorBoard, "_add"), "TensorBoard"),
    Row("the bar", "tqdm", (terminal, "bar"), "the progress bar"),
    Row("peak memory", "gVisor: no VmHWM", (machine, "status_bytes"), "the peak memory"),
    Row("configuration.json", "a disk", (header, "write"), "configuration.json"),
    Row("W&B", "verl 4904, wandb 4217: its service has died", None, "--wandb faces"),
]
ERRORS = [
    Row("raises", "numpy.core.multiarray failed to import", ImportError("failed\nto import"), "ImportError"),
    Row("exits", "a library that calls sys.exit", SystemExit(3), "SystemExit: 3"),
]


@table(ERRORS)
def test_a_run_with_every_accessory_broken_ends_well(row, photos, tmp_path, monkeypatch):
    bar = terminal.bar
    for one in ACCESSORIES:
        if one.given:
            monkeypatch.setattr(*one.given, broken(row.given))
    monkeypatch.setattr(terminal, "bar", lambda *a, **k: (broken(row.given) if k["desc"] == "train" else bar)(*a, **k))
    monkeypatch.setitem(sys.modules, "wandb", wandb_that(broken(row.given)))
    log = train(tmp_path, photos, f"--max-steps 4 --wandb faces --val-targets {photos / 'whole.bin'}")
    for one in ACCESSORIES:
        lines = [line for line in log.splitlines() if one.right in line and "left out" in line]
        assert len(lines) == 1, (one.what, lines)
        assert row.right in lines[0]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["steps"], result["peak_memory_bytes"]) == (4, None)
    assert result["evaluations"]["whole/accuracy"] > 0
    assert (tmp_path / "model.safetensors").exists()


def test_what_hangs_is_left_behind(tmp_path, monkeypatch, caplog):
    """A dashboard's service."""
    caplog.set_level(logging.WARNING, "partial_fc")
    ended = threading.Event()
    monkeypatch.setattr(boards, "_END_S", 0.05)
    monkeypatch.setattr(boards, "_WAITING", 3)
    monkeypatch.setitem(sys.modules, "wandb", wandb_that(lambda _: ended.wait()))
    try:
        for rows in (2, 9):  # fewer than may wait, and more
            board = boards.open_wandb(f"faces{rows}", tmp_path, {}, SingleWorld())
            for step in range(rows):
                board.scalars(step, {"loss": 1.0})
            board.close()
    finally:
        ended.set()
    said = [record.getMessage() for record in caplog.records]
    assert [sum(word in line for line in said) for word in ("faces2", "faces9")] == [1, 1]


BACKENDS = [
    Row("a notebook's", "oobabooga 6783, deeptools 1416", "module://matplotlib_inline.backend_inline", None),
    Row("of another version", "a shell's profile", "gtk3agg_old", None),
    Row("empty", "a container's env file", "", None),
]


@table(BACKENDS)
def test_a_backend_of_others_is_no_matter(row, tmp_path, monkeypatch):
    """Beside a stand-in, which checks the variable when it is imported, as matplotlib does."""
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib/__init__.py").write_text("import os\nassert 'MPLBACKEND' not in os.environ")
    (tmp_path / "matplotlib/figure.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MPLBACKEND", row.given)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    assert import_matplotlib().__path__ == [str(tmp_path / "matplotlib")]
    assert os.environ["MPLBACKEND"] == row.given
    for name in ("matplotlib", "matplotlib.figure"):
        del sys.modules[name]


def test_an_error_that_passes_is_tried_again(caplog):
    accessories.begin_anew()
    assert spare("a", broken(OSError(28, "No space left on device")), again_s=0.0) is None
    assert spare("a", lambda: 3) == 3
    assert spare("b", broken(ValueError("x"))) is None
    assert spare("b", lambda: 3) is None
    with pytest.raises(KeyboardInterrupt):
        spare("c", broken(KeyboardInterrupt()))
    assert len(caplog.records) == 2


# ---- threads


def refuse_threads(monkeypatch: pytest.MonkeyPatch, left: int = 0) -> None:
    """As a container whose pids.max others have reached; `left` more can be started."""
    start, counts = threading.Thread.start, [left]

    def act(thread: threading.Thread) -> None:
        counts[0] -= thread.name not in ("owner", "output")  # of the start
        if counts[0] < 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", act)


@pytest.mark.parametrize("left", [0, 1, 3])
def test_refused_threads_are_done_without(left, monkeypatch):
    refuse_threads(monkeypatch, left)
    with threads(4, "images") as pool:
        assert list(pool.map(len, ("", "a", "bc"))) == [0, 1, 2]
        assert isinstance(pool.submit(broken(ValueError("x"))).exception(), ValueError)


# ---- evaluations


def test_an_evaluation_that_fails_costs_no_step(photos, tmp_path):
    """One cut JPEG of 40; it is due in each second step, and in the last."""
    flags = f"--max-steps 4 --val-targets {photos / 'cut.bin'}"
    with pytest.raises(ValueError, match=r"cut\.bin cannot be used: pair 3, image 7"):
        train(tmp_path, photos, flags)
    assert not (tmp_path / "loss.csv").exists()
    log = train(tmp_path, photos, f"{flags} --check-data off")
    assert log.count("an evaluation failed") == 1
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["steps"], result["evaluations"], len(result["problems"])) == (4, {}, 1)
    assert (tmp_path / "model.safetensors").exists()
    assert Checkpoint(tmp_path / "checkpoints/step-00000004").manifest["score"] is None
    assert "is finished" in train(tmp_path, photos, f"{flags} --check-data off")


def test_ranks_leave_together_if_one_fails():
    def act(world: ThreadWorld) -> list[Any]:
        def measure() -> str:
            world.barrier(name="a")
            if world.rank == 1 and not world.step:
                raise MemoryError
            world.barrier(name="b")
            return "done"

        found = all_or_none(measure, world, "test")
        world.step = 1
        return [found, all_or_none(measure, world, "test")]

    assert in_world(3, act) == [[(None, "rank 1: MemoryError"), ("done", "")]] * 3


# ---- data


def test_the_identity_of_data(tmp_path):
    """40 images at the front of a class; two class folders swapped by mv; another .rec of as many images."""
    folder = class_folders(tmp_path / "a", 2, 2)
    first = identity(ImageFolder(folder))
    assert identity(ImageFolder(folder)) == first
    (folder / "id000/0.jpg").rename(folder / "id000/00.jpg")
    assert identity(ImageFolder(folder)) != first
    recs = [write_rec(tmp_path / name, [(k, k % 2, image(k % 2, k + first)) for k in range(3)]) for name, first in
            (("r", 0), ("s", 5))]  # fmt: skip
    sources = [identity(RecordSource(rec)) for rec in recs]
    assert [one["samples"] for one in sources] == [3, 3]
    assert sources[0] != sources[1]


# ---- folders


def test_a_copy_of_a_running_runs_folder_is_free(tmp_path):
    (tmp_path / "run").mkdir()
    lock, _ = acquire(tmp_path / "run", "one")
    try:
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        with pytest.raises(InUse):
            acquire(tmp_path / "run", "two")
        copied, note = acquire(tmp_path / "copy", "two")
        copied.release()
        assert "in another folder" in note
    finally:
        lock.release()


def test_a_moved_folder_is_told(tmp_path, caplog):
    saver = Saver(tmp_path / "run", SingleWorld(), 1)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert saver._make_root() is None
    assert saver._make_root() is None
    saver.close()
    assert [str(tmp_path / "run") in record.getMessage() for record in caplog.records] == [True]


def test_a_checkpoint_that_a_run_removes_meanwhile_is_no_problem(photos, tmp_path, monkeypatch, capsys):
    log = train(tmp_path, photos, "--max-steps 4")
    assert "nothing is evaluated" in log  # there are no pairs
    assert f"next: `partial-fc report {tmp_path}`" in log
    old, new = sorted((tmp_path / "checkpoints").glob("step-*"))
    shutil.copytree(old, tmp_path / "checkpoints/step-00000001")
    (tmp_path / "checkpoints/step-00000001/COMPLETE").unlink()  # being removed, or being written
    check = Checkpoint.check

    def removed(self: Checkpoint, path: Path) -> None:
        shutil.rmtree(old, ignore_errors=True)
        check(self, path)

    monkeypatch.setattr(Checkpoint, "check", removed)
    assert verify(VerifyOptions((tmp_path,))) == 0
    assert capsys.readouterr().out.count("not checked") == 2
    assert "removed meanwhile" in summary(old)["problem"]
    (new / "backbone.safetensors").write_bytes(b"")
    assert verify(VerifyOptions((tmp_path,))) == 1


# ---- the kernel


IN_THE_CACHE = "for last; do :; done; case $last in */cache/*) echo no; exit 1;; esac; cp LIBRARY $last"
COMPILERS = [
    Row("fails", "a full disk, a killed g++", "echo 'fatal error: Killed signal' >&2; exit 1", PlainKernel),
    Row("writes nothing", "a broken wrapper", "exit 0", PlainKernel),
    Row("fails in the cache", "a cache on a full disk, or mounted noexec", IN_THE_CACHE, cpu.CpuKernel),
]


@table(COMPILERS)
def test_a_compiler_that_fails_ends_no_run(row, tmp_path, monkeypatch):
    import torch

    from partial_fc.head.native import build as native

    compiled = {variant: native.library(variant) for variant in native.VARIANTS}
    native.build(["portable", cpu.variant_here()])
    compiler = tmp_path / "g++"
    lines = row.given.replace("LIBRARY", str(compiled[cpu.variant_here()]))
    compiler.write_text(f"#!/bin/sh\n{lines}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu, "load", cpu.load.__wrapped__)
    monkeypatch.setattr(cpu, "variant_here", lambda: "portable")
    with (
        pytest.warns(RuntimeWarning, match="Killed signal|No such file") if row.right is PlainKernel else nullcontext()
    ):
        assert isinstance(choose("auto", torch.device("cpu"), torch.float32, "fp32"), row.right)

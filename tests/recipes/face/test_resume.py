"""Runs that are continued, by as many processes and by another number."""

import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from partial_fc.checkpoint import lock
from tests.running import ENCODER, SMALL, here, losses, result, same_tensors, steps_done, train_here, train_several
from tests.unit.models.test_arcface_torch_config import SERVER


def test_resume_continues_bit_by_bit(glyphs, tmp_path):
    """In one process, whose data another reads in its second part. (Launches of several: test_face_head.py,
    tests/faults/signals/test_kill_matrix.py.)"""
    flags = f"--dataset glyphs --rec {glyphs} --val-targets --batch-size 8 --image-size 24 --lr-scheduler constant "
    flags += "--sample-rate 0.3 --clip 5 --checkpoint-every 4 --max-steps "
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    runs = [(whole, flags + "8"), (parts, flags + "4"), (parts, flags + "8 --loader process"), (parts, flags + "8")]
    printed = [train_here(root, words) for root, words in runs][-1]
    assert f"resumed from {parts}/checkpoints/step-00000004" in printed
    assert f"{parts} is finished" in printed
    assert losses(parts) == losses(whole)
    assert result(parts)["steps"] == 8
    assert same_tensors(*(root / "checkpoints/step-00000008" for root in (whole, parts))) == 4
    assert same_tensors(whole, parts) == 1


def test_one_process_then_three_give_the_curve_of_one(glyphs, tmp_path):
    """In fp64, in the midst of an epoch, with sampled negatives and the optimizer's state."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = f"--dataset glyphs --rec {glyphs} --val-targets --check-data off --image-size 24 --lr-scheduler constant "
    common += "--sync-bn --warmup-steps 1 --sample-rate 0.5 --precision fp64 --optimizer adamw --lr 0.003"
    train_here(whole, f"{common} --batch-size 24 --max-steps 4")
    train_here(parts, f"{common} --batch-size 24 --max-steps 2")
    printed = train_several({parts: f"{common} --batch-size 8 --max-steps 4 --loader process"}, 3)
    assert f"resumed from {parts}/checkpoints/step-00000002" in printed
    assert losses(parts)[:2] == losses(whole)[:2]
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-9)


def when(happens: Callable[[], bool], act: Callable[[], object]) -> None:
    """Acts once it is so, beside a run of this process."""

    def wait() -> None:
        deadline = time.monotonic() + 60
        while not happens() and time.monotonic() < deadline:
            time.sleep(0.005)
        act()

    threading.Thread(target=wait, daemon=True).start()


# A published configuration; what has to be smaller here -> how small.
SMALLER = {'"r50"': '"tiny"', "512": "32", "128": "8", "lr = 0.1": "lr = 0.02", "93431": "50", "5179510": "8000"}
SMALLER |= {"/train_tmp/faces": "synthetic", "['lfw', \"cfp_fp\"]": "[]"}


def published() -> str:
    text = SERVER
    for theirs, ours in SMALLER.items():
        assert text.count(theirs) == 1
        text = text.replace(theirs, ours)
    return text


def test_what_ctrl_c_promises_of_a_published_config_is_true(tmp_path):
    """config.resume = False: no other run's checkpoints are loaded; the same command goes on from its own."""
    config, root = tmp_path / "mine.py", tmp_path / "run"
    config.write_text(published())
    words = ["--config", str(config), "--models-root", str(root), "--num-workers", "1", "--image-size", "16"]
    log = root / "logs/rank-0000.log"
    for _ in range(2):
        before = steps_done(root)
        when(lambda before=before: steps_done(root) > before + 2, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert here("recipes.face.main", words) == 130
    promised, _ = re.findall(r"the same command resumes from (\S+)", log.read_text())
    assert f"resumed from {promised}" in log.read_text()
    assert "not the same run" not in log.read_text()
    config.write_text(published().replace("0.02", "0.05"))
    with pytest.raises(ValueError, match=r"is of another run \(--resume same\): .* --lr 0.02, this run has 0.05"):
        here("recipes.face.main", words)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's
@pytest.mark.parametrize("removed", ["checkpoints/*", "all"])
def test_who_makes_room_ends_no_run(glyphs, tmp_path, removed):
    """rm -rf checkpoints/*, or the whole folder: the run goes on, and all that is written at its end is there."""
    root = tmp_path / "run"

    def remove() -> None:
        for path in (root / "checkpoints").iterdir() if removed != "all" else [root]:
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True) if path.is_file() else None

    flags = f"--dataset glyphs --rec {glyphs} --val-targets --batch-size 8 --image-size 24 --max-steps 30"
    when(lambda: (root / "checkpoints/step-00000005/COMPLETE").exists(), remove)
    words = ["--models-root", str(root), *SMALL, *flags.split(), "--checkpoint-every", "5"]
    assert here("recipes.face.main", words) == 0
    assert (root / "model.safetensors").exists()
    assert (root / "checkpoints/step-00000030/COMPLETE").exists()
    assert not (root / "checkpoints/step-00000005").exists()


def test_who_loses_the_folder_to_another_run_keeps_its_last_state(glyphs, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_BEAT_S", 0.02)
    root = tmp_path / "run"
    record = root / "checkpoints/owner-1.json"

    def replace() -> None:
        other = lock._text(lock.Record.here("another", record.parent.stat().st_ino), 0)
        partial = record.with_suffix(".other")
        partial.write_bytes(other)
        partial.replace(record)

    flags = f"--dataset glyphs --rec {glyphs} --val-targets --batch-size 8 --image-size 24 --max-steps"
    when(lambda: steps_done(root) > 2, replace)
    with pytest.raises(ValueError, match=r"no longer belongs to this run: .* --resume (\S+)") as raised:
        here("recipes.face.main", ["--models-root", str(root), *SMALL, *flags.split(), "5000"])
    saved = Path(str(raised.value).rpartition("--resume ")[2])
    assert saved.parent.parent.name.startswith("run.lost-")
    step = int(saved.name.removeprefix("step-"))
    log = train_here(tmp_path / "new", f"{flags} {step + 1} --resume {saved}")
    assert f"resumed from {saved}" in log


@pytest.mark.long
def test_a_compiled_run_of_two_processes_resumes_bit_by_bit(glyphs, tmp_path):
    """By torch's inductor."""
    (tmp_path / "encoder.py").write_text(ENCODER)
    flags = f"--dataset glyphs --rec {glyphs} --network {tmp_path / 'encoder.py'}:make --compile --max-steps"
    flags = f"--val-targets --batch-size 8 --check-data off --lr-scheduler constant {flags}"
    for name, steps in (("whole", 6), ("parts", 3), ("parts", 6)):
        train_several({tmp_path / name: f"{flags} {steps}"})
    assert (tmp_path / "parts/logs/rank-0000.log").read_text().count("the backbone is compiled, in") == 2
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert same_tensors(tmp_path / "whole", tmp_path / "parts") == 1

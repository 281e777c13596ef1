"""What runs do about NaN and replicas that part (--on-nan, --desync-every)."""

import json
import math
import shutil
from pathlib import Path

import pytest

from tests.running import change_manifest, endings, face, losses, same_tensors, several, train_several

FLAGS = "--max-steps 14 --batch-size 8 --checkpoint-every 5 --val-targets --image-size 24"
RUNS = {  # name -> faults, flags
    "stop": ("nan@9", ""),
    "skip": ("nan@9 nan@10", "--on-nan skip"),
    "too many skips": (" ".join(f"nan@{step}" for step in range(3, 14)), "--on-nan skip"),
    "rollback": ("nan@9", "--on-nan rollback --sample-rate 0.5"),
    "desync": ("bit@6", "--desync-every 4"),
}


@pytest.fixture(scope="module")
def runs(glyphs, tmp_path_factory):
    """name -> (models_root, how rank 0 and rank 1 ended). All in one launch of two processes."""
    root = tmp_path_factory.mktemp("guards")
    roots = {name: root / name.replace(" ", "-") for name in RUNS}
    common = f"--dataset glyphs --rec {glyphs} {FLAGS}"
    printed = several([face(roots[name], f"{common} {flags}", faults) for name, (faults, flags) in RUNS.items()])
    ended = [endings(printed, rank) for rank in (0, 1)]
    return {name: (roots[name], (ended[0][i], ended[1][i])) for i, name in enumerate(RUNS)}


def log(models_root: Path, rank: int = 0) -> str:
    return (models_root / f"logs/rank-{rank:04d}.log").read_text()


def test_stop_names_the_tensor_and_the_records(runs):
    root, ended = runs["stop"]
    assert ended[0] == ended[1]
    assert ended[0].startswith("NonFinite: the loss is nan at step 9 (usual causes: ")
    assert "The first tensor that is not finite, on rank 1: the features of record " in ended[0]
    assert len(losses(root)) == 8
    for rank in (0, 1):
        found = json.loads((root / f"non-finite/step-00000009-rank-{rank:05d}.json").read_text())
        assert len(found["micro_batches"][0]["keys"]) == 8
    assert (root / "checkpoints/step-00000005/COMPLETE").exists()


def test_skip_goes_on_and_counts(runs):
    root, ended = runs["skip"]
    assert ended == ("0", "0")
    assert len(losses(root)) == 14
    assert [step for step, loss in enumerate(losses(root), 1) if math.isnan(loss)] == [9, 10]
    assert "The update is skipped on all ranks; number 2 in a row, of at most 10" in log(root)
    _, ended = runs["too many skips"]
    assert "the loss is nan at step 13" in ended[0]
    assert "10 consecutive updates before it" in ended[0]


def test_rollback_goes_on_from_the_checkpoint_with_the_data_after_the_bad_batch(runs, glyphs, tmp_path):
    """... bit by bit as a run does that is started there by hand."""
    root, ended = runs["rollback"]
    assert ended == ("0", "0")
    assert len(losses(root)) == 14
    assert "back from step 9 to the checkpoint of step 5; the 64 samples since then" in log(root)
    manifest = json.loads((root / "checkpoints/step-00000010/manifest.json").read_text())
    assert (manifest["step"], manifest["position"], manifest["left_out"]) == (10, 16 * 14, [[16 * 5, 16 * 9]])

    by_hand = tmp_path / "by-hand"
    shutil.copytree(root / "checkpoints/step-00000005", by_hand / "checkpoints/step-00000005")
    shutil.copy(root / "loss.csv", by_hand)
    change_manifest(by_hand / "checkpoints/step-00000005", lambda manifest: manifest | {"position": 16 * 9})
    flags = f"--dataset glyphs --rec {glyphs} {FLAGS} --sample-rate 0.5"
    train_several({by_hand: flags})
    assert losses(by_hand) == losses(root)
    again = json.loads((by_hand / "checkpoints/step-00000014/manifest.json").read_text())
    assert again["position"] == 16 * 18
    same_tensors(*(folder / "checkpoints/step-00000014" for folder in (root, by_hand)))


def test_replicas_that_part_end_the_run_on_all_ranks(runs):
    root, ended = runs["desync"]
    assert ended[0] == ended[1]
    assert ended[0].startswith("ValueError: step 8: the replicas have diverged: rank 0 and rank 1 differ")
    assert "a checkpoint of step 4 or before" in ended[0]
    assert len(losses(root)) == 8

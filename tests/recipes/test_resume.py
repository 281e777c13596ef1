"""Runs that are continued, by as many processes and by another number."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.recipes.conftest import losses, result, train, train_several


@pytest.mark.parametrize("launcher", ["one process", "horovodrun --gloo", "torchrun"])
def test_resume_continues_bit_by_bit(glyphs, tmp_path, launcher):
    flags = f"--dataset glyphs --rec {glyphs} --val-targets --batch-size 8 --lr-scheduler constant --sample-rate 0.3 "
    flags += "--dropout 0.2 --clip 5 --checkpoint-every 4 --max-steps "
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, flags + "12", launcher=launcher)
    train(parts, flags + "4", launcher=launcher)
    printed = train(parts, flags + "12", launcher=launcher)
    assert "resumed from" in printed
    assert losses(parts) == losses(whole)
    finished = result(parts)
    assert "is finished" in train(parts, flags + "12", launcher=launcher)
    assert result(parts) == finished
    if launcher == "one process":
        assert "is ahead of where this run would start" in train(parts, flags + "12 --resume never", expect=1)
    files = sorted(path.name for path in (whole / "checkpoints/step-00000012").glob("*.safetensors"))
    assert len(files) == (4 if launcher == "one process" else 6)
    for name in files:
        a, b = (load_file(root / "checkpoints/step-00000012" / name) for root in (whole, parts))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a), name


# precision -> (flags, steps, how near the losses must be)
EXACT = {
    "fp64": ("--precision fp64 --optimizer adamw --lr 0.003", 9, 1e-9),
    # Rounding differs with the number of processes; some more steps, and training has magnified it beyond this.
    "fp32": ("--precision fp32 --optimizer sgd --lr 0.01", 8, 1e-5),
}


@pytest.fixture(scope="module")
def one_eight_three(glyphs, tmp_path_factory):
    """precision -> (folder of a run of one process, folder of one that had 1, then 8, then 3).

    In the midst of an epoch, with sampled negatives and the optimiser's state, the same images in each step.
    """
    root = tmp_path_factory.mktemp("one-eight-three")
    folders = {precision: (root / precision / "whole", root / precision / "parts") for precision in EXACT}

    def runs(part: int, batch_size: int, last: int | None = None) -> dict[Path, str]:
        common = f"--dataset glyphs --rec {glyphs} --val-targets --check-data off --lr-scheduler constant --sync-bn "
        common += f"--sample-rate 0.5 --batch-size {batch_size} "
        return {
            folders[precision][part]: f"{common} {flags} --max-steps {last or num_steps}"
            for precision, (flags, num_steps, _) in EXACT.items()
        }

    train_several(runs(0, 24) | runs(1, 24, 3), num_processes=1)
    for num_processes, first, last in ((8, 3, 6), (3, 6, None)):
        printed = train_several(runs(1, 24 // num_processes, last), num_processes)
        for _, parts in folders.values():
            assert f"resumed from {parts}/checkpoints/step-{first:08d}" in printed
    return folders


@pytest.mark.parametrize("precision", EXACT)
def test_one_process_then_eight_then_three_give_the_curve_of_one(one_eight_three, precision):
    _, num_steps, near = EXACT[precision]
    whole, continued = map(losses, one_eight_three[precision])
    assert len(whole) == len(continued) == num_steps
    assert whole[:3] == continued[:3]
    assert max(abs(a - b) / a for a, b in zip(whole, continued, strict=True)) < near

"""Margin and sample rate by step, and weights of samples, in recipe `face`."""

import pytest

from tests.recipes.conftest import losses, same_tensors, train_here, train_several

BY_STEP = "--loss cosface --margins None --sample-rate-schedule '0:0.3 50%:0.5 6:1.0' --margin-schedule '0:0 25%:0.2'"


def common(glyphs) -> str:
    words = f"--dataset glyphs --rec {glyphs} --val-targets --check-data off --lr-scheduler constant --warmup-steps 0 "
    return words + f"--head-catch-up exact {BY_STEP} --max-steps 8 "


def test_a_run_whose_rate_and_margin_change_resumes_bit_by_bit(glyphs, tmp_path):
    """From before and from behind a change, and says where they are."""
    whole = tmp_path / "whole"
    log = train_here(whole, common(glyphs) + "--batch-size 8 --checkpoint-every 3 --keep-checkpoints 3")
    assert "--sample-rate-schedule '0:0.3 50%:0.5 6:1.0': 0.3 from step 1 on, 0.5 from step 5 on, 1 from step 7" in log
    assert "head, step 5: sample rate 0.5, before 0.3" in log
    assert log.index("head, step 3: margin") < log.index("head, step 5") < log.index("head, step 7: sample rate 1.0")
    for step in (3, 6):
        rest = tmp_path / f"rest-{step}"
        train_here(rest, common(glyphs) + f"--batch-size 8 --resume {whole}/checkpoints/step-0000000{step}")
        rows = [(root / "loss.csv").read_text().splitlines()[1:] for root in (whole, rest)]
        assert rows[1] == rows[0][step:]
        same_tensors(*(root / "checkpoints/step-00000008" for root in (whole, rest)))


def test_three_processes_have_the_curve_of_one(glyphs, tmp_path):
    flags = common(glyphs) + "--sync-bn --precision fp64 --lr 0.003"
    train_here(tmp_path / "one", f"{flags} --batch-size 24")
    train_several({tmp_path / "three": f"{flags} --batch-size 8"}, 3)
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)


def test_a_changed_end_moves_what_is_said_in_percent(glyphs, tmp_path):
    """As it moves the learning rate, with a note."""
    flags = f"--dataset glyphs --rec {glyphs} --val-targets --check-data off --batch-size 8 --warmup-steps 0 "
    flags += "--sample-rate-schedule '0:0.3 50%:0.5' --max-steps "
    train_here(tmp_path, flags + "4")
    log = train_here(tmp_path, flags + "12")
    assert "--max-steps 4, this run has 12: allowed, but --sample-rate-schedule '0:0.3 50%:0.5' is 0.3" in log
    assert "in the next step, and was to be 0.5" in log
    with pytest.raises(ValueError, match="step 30 is not in this run, which ends after 12"):
        train_here(tmp_path / "new", flags.replace("50%", "30") + "12")
    assert not (tmp_path / "new/loss.csv").exists()

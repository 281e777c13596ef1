"""Margin and sample rate by step, and weights of samples, in recipe `face`."""

import numpy as np
import pytest

from partial_fc.data.open import open_source
from tests.running import losses, same_tensors, train_here, train_several

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


@pytest.mark.long
def test_with_another_batch_size_percentages_count_samples(glyphs, tmp_path):
    """4 steps of 8 are made, as much as 2 of 16: half of the run, 3.5 of these, is at step 5.5."""
    flags = f"--dataset glyphs --rec {glyphs} --val-targets --check-data off --warmup-steps 0 --epochs 0.1 "
    flags += "--sample-rate-schedule '0:0.3 50%:0.5' "
    log = train_here(tmp_path / "whole", flags + "--batch-size 8 --checkpoint-every 4 --keep-checkpoints 4")
    assert "0.5 from step 8 on" in log
    resumed = f"--batch-size 16 --resume {tmp_path}/whole/checkpoints/step-00000004"
    log = train_here(tmp_path / "rest", flags + resumed)
    assert "5 more steps remain, 9 in all" in log
    assert "0.5 from step 7 on" in log
    assert "head, step 7: sample rate 0.5, before 0.3" in log


def weighted(glyphs, path, change=lambda weight_N: weight_N) -> str:
    """Flags with weights of the records, saved at the path."""
    weight_N = np.random.default_rng(0).uniform(0.2, 3.0, len(open_source(glyphs, None)))
    np.save(path, change(weight_N))
    return f"--dataset glyphs --rec {glyphs} --val-targets --check-data off --warmup-steps 0 --sample-weights {path} "


@pytest.mark.long
def test_three_processes_have_the_curve_of_one(glyphs, tmp_path):
    flags = f"{common(glyphs)} {weighted(glyphs, tmp_path / 'w.npy')} --sync-bn --precision fp64 --lr 0.003"
    train_here(tmp_path / "one", f"{flags} --batch-size 24")
    train_several({tmp_path / "three": f"{flags} --batch-size 8"}, 3)
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda weight_N: weight_N[:-1], r"expected floating numbers, \(\d+,\): one for each record"),
        (lambda weight_N: np.where(np.arange(len(weight_N)) == 5, -1.0, weight_N), "the weight of record 5 is -1.0"),
    ],
)
def test_weights_that_do_not_fit_stop_the_run_before_its_first_step(glyphs, tmp_path, change, words):
    with pytest.raises(ValueError, match=rf"w\.npy.*{words}"):
        train_here(tmp_path / "run", weighted(glyphs, tmp_path / "w.npy", change) + "--max-steps 3")
    assert not (tmp_path / "run/loss.csv").exists()

"""What becomes of a run when one of its processes gets a signal: the table in the docs, and a few cells of it. `make
torture` plays all of them."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.signals import kill_matrix
from tests.faults.signals.kill_matrix import EVERY, Chain, play
from tests.faults.signals.kill_table import differences, promised
from tests.faults.signals.launches import LAUNCHES


def test_the_docs_have_every_process_of_every_launcher():
    targets = {(name, target) for name in LAUNCHES for target in ("rank 0", "rank 1", *LAUNCHES[name].above)}
    assert {key[:2] for key in promised()} == targets
    assert promised()["run.sh", "launcher", "TERM"] == ("ends, 1", "saved, 1")


@pytest.mark.long
def test_a_launcher_that_is_killed_or_asked_to_end_takes_its_processes_with_it(tmp_path):
    chains = [
        Chain("own launch", "launcher", ("INT", "HUP", "KILL")),
        Chain("own launch", "rank 1", ("USR1",)),
        Chain("torchrun", "launcher", ("TERM", "KILL")),
        Chain("run.sh", "supervisor", ("KILL",)),
        Chain("horovodrun --gloo", "launcher", ("TERM",)),
    ]
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(chain.play, tmp_path / str(n), None, 0.05) for n, chain in enumerate(chains)]
    seen = [cell for future in futures for cell in future.result()]
    assert not differences(seen)


@pytest.mark.long
def test_what_lost_a_process_and_was_stopped_ends_as_if_nothing_had_been(tmp_path, monkeypatch):
    """Bit by bit: started again by run.sh, and by hand. (tests/unit/train/test_run_restarts.py has the other ways of
    run.sh --restarts.)"""
    monkeypatch.setattr(kill_matrix, "_FLAGS", ["--checkpoint-every", str(EVERY), "--max-steps", "120"])
    seen, wrong = play(tmp_path, [Chain("run.sh --restarts", "rank 1", ("KILL", "TERM"))], at_once=1)
    assert not wrong
    assert not differences(seen)

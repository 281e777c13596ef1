"""Two hosts whose cable loses packets, and is out for some seconds: TCP carries the run through to the same end, which
is that of two processes of one host."""

import shlex
import time

import pytest

from benchmarks.hosts.two_hosts import Unavailable, two_hosts
from tests.cluster.conftest import JOB
from tests.cluster.test_two_hosts import ended, on_both, start_on
from tests.running import environment, steps_done, train_several

STEPS = 30
FLAGS = [*JOB, "--num-images", "64", "--max-steps", str(STEPS)]
OUT_S = 3.0


@pytest.mark.long
def test_losses_are_the_same_through_lost_packets_and_an_outage(tmp_path):
    root = tmp_path / "run"
    try:
        with two_hosts() as hosts:
            typed = on_both("--gpus, --nodes", tmp_path, FLAGS)
            processes = start_on(hosts, typed, environment())
            with hosts.lossy():
                while steps_done(root) < 5:
                    assert processes[0].poll() is None, processes[0].communicate()[0][-4000:]
                    time.sleep(0.05)
                lost = [hosts.lost_packets(host) for host in (0, 1)]
            with hosts.cut():
                time.sleep(0.5)  # what is on its way arrives
                seen = steps_done(root)
                time.sleep(OUT_S)
                assert steps_done(root) <= seen + 1  # rank 0 may finish the one it is in
                assert seen < STEPS - 1
            for status, printed in ended(processes):
                assert status == 0, printed[-4000:]
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert min(lost) > 100
    train_several({tmp_path / "whole": shlex.join(FLAGS)})
    assert (root / "loss.csv").read_text() == (tmp_path / "whole/loss.csv").read_text()

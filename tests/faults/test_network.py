"""Two hosts whose cable loses packets, and is out for some seconds: TCP carries the run through to the same end, which
is that of two processes of one host."""

import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.two_hosts import ADDRESSES, TwoHosts, Unavailable, two_hosts
from tests.faults.ranks import steps_done
from tests.recipes.conftest import SMALL, environment, train_several

STEPS = 30
JOB = shlex.split(
    f"--dataset synthetic --num-classes 100 --num-images 64 --image-size 32 --batch-size 8 --max-steps {STEPS}"
)
OUT_S = 3.0


def start(hosts: TwoHosts, models_root: Path) -> list[subprocess.Popen[str]]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    words = ["timeout", "200", sys.executable, "train.py", "face", *SMALL, *JOB, "--models-root", str(models_root)]
    words += ["--nodes", "2", "--gpus", "1", "--master-addr", ADDRESSES[0], "--master-port", "8890"]
    return [hosts.start(i, [*words, "--nr", str(i)], env=environment(), **pipes) for i in (0, 1)]


def ended_well(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        printed, _ = process.communicate()
        assert process.returncode == 0, printed[-4000:]


@pytest.mark.long
def test_losses_are_the_same_through_lost_packets_and_an_outage(tmp_path):
    try:
        with two_hosts() as hosts:
            processes = start(hosts, tmp_path / "disturbed")
            with hosts.lossy():
                while steps_done(tmp_path / "disturbed") < 5:
                    assert processes[0].poll() is None, processes[0].communicate()[0][-4000:]
                    time.sleep(0.05)
                lost = [hosts.lost_packets(host) for host in (0, 1)]
            with hosts.cut():
                time.sleep(0.5)  # what is on its way arrives
                seen = steps_done(tmp_path / "disturbed")
                time.sleep(OUT_S)
                assert steps_done(tmp_path / "disturbed") <= seen + 1  # rank 0 may finish the one it is in
                assert seen < STEPS - 1
            ended_well(processes)
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert min(lost) > 100
    train_several({tmp_path / "whole": shlex.join(JOB)})
    assert (tmp_path / "disturbed/loss.csv").read_text() == (tmp_path / "whole/loss.csv").read_text()

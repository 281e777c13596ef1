"""A host is lost, the other goes on from the last commit; it comes back, and takes its classes again."""

import json
import shlex
import sys
import time

import pytest

from benchmarks.hosts.two_hosts import ADDRESSES, TwoHosts
from tests.cluster.conftest import JOB
from tests.cluster.elastic_job import EVERY, kill_all, running, stop, trainers
from tests.recipes.conftest import train_here

LIMIT_S = 30.0


def rows_of(root) -> list[str]:
    """The rows of the loss curve; no step is missing."""
    rows = (root / "loss.csv").read_text().splitlines()[1:]
    assert [int(row.partition(",")[0]) for row in rows] == list(range(1, len(rows) + 1))
    return rows


def stranger(hosts: TwoHosts, env: dict[str, str], host: int, *words: object) -> str:
    command = [sys.executable, "-m", "tests.cluster.stranger", *map(str, words)]
    status, printed = hosts.run(host, command, timeout_s=60, env=env)
    assert status == 0, printed
    return printed


@pytest.mark.long
def test_a_host_is_lost_and_comes_back(hosts, env, tmp_path):
    """The one with rank 0, the status server and the log. On one host, what follows is what a run does that resumes
    from the checkpoint of that step.

    Before, a stranger tries to have horovodrun execute his code (CVE-2024-10190): its store refuses him, on the one
    address where it listens, and the token that he would need is on no command line."""
    root = tmp_path / "run"
    flags = shlex.split(f"--checkpoint-every {EVERY} --keep-checkpoints 1000 --sample-rate 0.5")
    with running(hosts, env, root, flags, rank_0=1) as job:
        job.wait_for("step 36/")
        first, second = (json.loads(stranger(hosts, env, host, "look")) for host in (0, 1))
        ((address, port),) = first["stores"]
        assert [at for at, number in first["listening"] if number == int(port)] == [address] == [ADDRESSES[0]]
        assert second["stores"] == first["stores"]
        (token,) = second["tokens"]
        assert first["tokens"] == [token]
        assert not [word for word in first["words"] + second["words"] if token in word]
        assert stranger(hosts, env, 1, "put", address, port, tmp_path / "executed") == "403\n"
        assert not (tmp_path / "executed").exists()

        # Just when a checkpoint is complete: one that is being written would stay without its end.
        before = set(root.glob("checkpoints/*/COMPLETE"))
        while set(root.glob("checkpoints/*/COMPLETE")) == before:
            time.sleep(0.01)
        kill_all(hosts, 1)
        step, seconds = job.recovered()
        assert step >= 30
        assert step % EVERY == 0
        assert seconds < LIMIT_S
        again, _ = job.recovered(2)
        job.wait_for(rf"step {again + 20 - again % 4}/")
        stop(hosts, 1, job)
        printed = job.printed
    assert "missing: rank 0" in printed
    assert "rank 0 of 1 (horovod)" in printed
    assert printed.count("rank 0 of 2 (horovod)") == 2
    trained = rows_of(root)
    assert len(trained) >= again + 16
    assert (root / "checkpoints" / f"step-{len(trained):08d}" / "COMPLETE").exists()

    resumed = tmp_path / "resumed"
    resumed.mkdir()
    (resumed / "loss.csv").write_text((root / "loss.csv").read_text())
    more = shlex.split(
        f"--lr-scheduler constant --sample-rate 0.5 --max-steps {again} --resume {root}/checkpoints/step-{step:08d}"
    )
    train_here(resumed, shlex.join([*JOB, *more]))
    assert rows_of(resumed) == trained[:again]


@pytest.mark.long
def test_a_host_whose_cable_breaks_is_given_up(hosts, env, glyphs, tmp_path):
    """Nothing arrives any more, and nobody is told; its processes, which still run, do not come back. New ones first
    come without the data: its disk is not mounted yet. The others go on, and do not look at theirs again."""
    flags = shlex.split(f"--checkpoint-every 0 --dataset glyphs --rec {glyphs} --num-classes 80 --val-targets")
    with running(hosts, env, tmp_path, flags, rank_0=1) as job:
        job.wait_for("the commit of step 20 is complete")
        # (A host that is late on a busy machine may have cost a world already.)
        recoveries, worlds = (job.printed.count(words) for words in ("recovered in", "global batch 2 x 8"))
        with hosts.cut():
            hosts.run(1, ["mount", "-t", "tmpfs", "tmpfs", str(glyphs)], timeout_s=10)
            step, seconds = job.recovered(recoveries + 1)
            assert step >= 20, job.printed[:20000]
            assert seconds < LIMIT_S
            job.wait_for(rf"step {step + 20 - step % 4}/")
        job.wait_for("continue without it: rank 1 cannot open it")
        hosts.run(1, ["umount", str(glyphs)], timeout_s=10)
        job.wait_for("global batch 2 x 8", worlds + 1)
        assert job.printed.count("--check-data quick: ") == 1
        assert job.process.poll() is None
        assert trainers(hosts, 1, tmp_path) == 1

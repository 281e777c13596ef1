"""docs/reliability.md, "Hosts that come and go": torchrun restarts a job with the hosts that are there, and each start
resumes from the newest checkpoint."""

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from benchmarks.hosts.two_hosts import ADDRESSES, TwoHosts
from partial_fc.comm.torch_dist import LOST_AFTER_S
from tests.cluster.conftest import JOB
from tests.running import ROOT, steps_done, train_here
from tests.waiting import until

FOR_EVER = shlex.split("--lr-scheduler constant --max-steps 1000000 --frequent 1 --keep-checkpoints 10000")
STARTS = re.compile(r"rank 0 of (\d) \(torch\)")
STEPS = re.compile(r"step (\d+)/")
RESUMES = re.compile(r"resum\w+ from \S*/step-(\d+)")
EVERY = 50  # steps between checkpoints
LIMIT_S = 180.0


@dataclass
class Job:
    """An endless job on the hosts whose agents run. What all of them print is in one file."""

    hosts: TwoHosts
    env: Mapping[str, str]
    root: Path
    rendezvous: str
    flags: list[str]
    agents: dict[int, subprocess.Popen] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root.mkdir()
        (self.root / "out").touch()

    def start(self, host: int) -> None:
        """Types docs/reliability.md's command there."""
        env = {**self.env, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        job = [
            *documented(self.rendezvous),
            "train.py",
            "face",
            "--models-root",
            str(self.root / "run"),
            *JOB,
            *FOR_EVER,
            *self.flags,
        ]
        with (self.root / "out").open("a") as out:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
            self.agents[host] = self.hosts.start(host, ["timeout", "1200", *job], env=env, cwd=ROOT, **pipes)

    def processes(self, host: int, of: str) -> list[psutil.Process]:
        """Of the job on a host: "torchrun", or the "workers". They are seen from outside of it, as root."""
        network, found = os.readlink(f"/proc/{self.hosts.pids[host]}/ns/net"), []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                words = process.cmdline()
                is_agent = any(word.endswith("torchrun") for word in words[:2])
                if str(self.root) in " ".join(words) and words[0] != "timeout" and is_agent == (of == "torchrun"):
                    found += [process] if os.readlink(f"/proc/{process.pid}/ns/net") == network else []
        return found

    def send(self, host: int, number: int, *of: str) -> None:
        for process in [process for one in of for process in self.processes(host, one)]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    @property
    def printed(self) -> str:
        return (self.root / "out").read_text(errors="replace")

    def last_step(self) -> int:
        """Of the loss curve."""
        return steps_done(self.root / "run")

    def rows(self) -> list[str]:
        return rows_of(self.root / "run")

    def goes_on(self, size: int, starts: int, seconds: float = LIMIT_S) -> "Went":
        """Waits until the job trains on with that many ranks; starts: how often it had been started before."""
        began = time.monotonic()

        def trains() -> bool:
            parts = self.parts()[starts + 1 :]
            return bool(parts) and parts[-1].startswith(str(size)) and bool(STEPS.search(parts[-1]))

        until(trains, seconds, said=lambda: self.printed[-8000:])
        took_s, parts = time.monotonic() - began, self.parts()
        before = [int(step) for step in STEPS.findall(parts[starts])]
        resumed = RESUMES.findall(parts[-1]) or RESUMES.findall(parts[-2])
        return Went(took_s, int(resumed[-1]) if resumed else 0, max(before, default=0))

    def parts(self) -> list[str]:
        """What was printed before the first start, and after each, from the number of its ranks on."""
        printed = self.printed
        starts = [match.start(1) for match in STARTS.finditer(printed)]
        return [printed[a:b] for a, b in zip([0, *starts], [*starts, len(printed)], strict=True)]

    def num_starts(self) -> int:
        return len(self.parts()) - 1


@dataclass
class Went:
    """How it went on: seconds until it trained; the step of the checkpoint; the last step before."""

    seconds: float
    resumed: int
    last: int

    @property
    def lost(self) -> int:
        return max(0, self.last - self.resumed)


def rows_of(root: Path) -> list[str]:
    """Of the loss curve; each is whole."""
    path = root / "loss.csv"
    return path.read_text().rpartition("\n")[0].splitlines()[1:] if path.exists() else []


def documented(rendezvous: str) -> list[str]:
    """The page's command up to the recipe, with a rank for each host, and a rendezvous of this test's."""
    page = (ROOT / "docs/reliability.md").read_text()
    typed = page[page.index("torchrun --nnodes=1:2") :].partition("train.py face")[0].replace("\\\n", " ")
    words = [word for word in shlex.split(typed) if not word.startswith(("--rdzv-endpoint", "--nproc"))]
    return [*words, "--nproc_per_node=1", *shlex.split(rendezvous)]


@contextmanager
def running(hosts: TwoHosts, env: Mapping[str, str], root: Path, rendezvous: str, flags: str) -> Iterator[Job]:
    job = Job(hosts, env, root, rendezvous, shlex.split(flags))
    try:
        yield job
    finally:
        for host in (0, 1):
            job.send(host, signal.SIGKILL, "torchrun", "workers")
        for agent in job.agents.values():
            agent.kill()
            agent.wait()


def test_a_host_that_comes_later_takes_part(hosts, env, tmp_path):
    """The short half; the other test has all that the page says."""
    with running(hosts, env, tmp_path / "job", f"--rdzv-endpoint={ADDRESSES[0]}:29400", "--checkpoint-every 0") as job:
        job.start(0)
        job.goes_on(1, 0)
        starts = job.num_starts()
        job.start(1)
        assert job.goes_on(2, starts).lost == 0


@pytest.mark.long
def test_hosts_come_and_go_and_each_step_counts_once(hosts, env, tmp_path):
    store = f"--rdzv-conf=last_call_timeout=5,store_type=file --rdzv-endpoint={tmp_path}/store"
    events: dict[str, tuple[Callable[[Job], None], int]] = {
        "host 2 joins": (lambda job: job.start(1), 2),
        "worker of host 2 killed": (lambda job: job.send(1, signal.SIGKILL, "workers"), 2),
        "agent of host 2 gets TERM": (lambda job: job.send(1, signal.SIGTERM, "torchrun"), 1),
        "host 2 joins again": (lambda job: job.start(1), 2),
        "host 2 killed": (lambda job: job.send(1, signal.SIGKILL, "torchrun", "workers"), 1),
        "host 2 returns": (lambda job: job.start(1), 2),
        "first host killed": (lambda job: job.send(0, signal.SIGKILL, "torchrun", "workers"), 1),
        "first host returns": (lambda job: job.start(0), 2),
    }
    with running(hosts, env, tmp_path / "job", store, f"--checkpoint-every {EVERY}") as job:
        job.start(0)
        job.goes_on(1, 0)
        for event, (act, size) in events.items():
            time.sleep(2)
            starts = job.num_starts()
            act(job)
            went = job.goes_on(size, starts)
            print(f"{event}: {size} ranks after {went.seconds:.0f} s, {went.lost} steps lost")
            assert went.lost <= (EVERY if "killed" in event else 0), event
            if event == "host 2 killed":
                until(lambda: job.last_step() >= went.resumed + 8)  # noqa: B023
                alone = went.resumed, job.rows()[: went.resumed + 8]
        last = job.last_step()
        until(lambda: job.last_step() > last)
        rows = job.rows()
    assert [int(row.partition(",")[0]) for row in rows] == list(range(1, len(rows) + 1))

    again = tmp_path / "again"
    again.mkdir()
    (again / "loss.csv").write_text((job.root / "run/loss.csv").read_text())
    since, expected = alone
    more = f"--max-steps {since + 8} --resume {job.root}/run/checkpoints/step-{since:08d}"
    train_here(again, shlex.join([*JOB, *FOR_EVER, *shlex.split(more)]))
    assert rows_of(again) == expected


@pytest.mark.long
def test_a_lost_host_is_told_from_a_stopped_process(hosts, env, tmp_path):
    """With the default --comm-timeout of ten minutes."""
    with running(
        hosts, env, tmp_path / "job", f"--rdzv-endpoint={ADDRESSES[0]}:29400", f"--checkpoint-every {EVERY}"
    ) as job:
        for host in (0, 1):
            job.start(host)
        job.goes_on(2, 0)
        starts = job.num_starts()
        job.send(1, signal.SIGSTOP, "workers")
        time.sleep(LOST_AFTER_S + 30)
        job.send(1, signal.SIGCONT, "workers")
        last = job.last_step()
        until(lambda: job.last_step() > last + 2)
        assert job.num_starts() == starts
        with hosts.cut():
            cut = job.goes_on(1, starts)
            assert cut.seconds < 90
        back = job.goes_on(2, job.num_starts())
    for event, went in (("cable cut", cut), ("cable back", back)):
        print(f"{event}: {went.seconds:.0f} s, {went.lost} steps lost")

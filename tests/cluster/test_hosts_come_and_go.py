"""docs/reliability.md, "Hosts that come and go": torchrun's own engine restarts a job with the hosts that are there, and
each run resumes from the newest checkpoint."""

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.hosts.two_hosts import TwoHosts
from tests.cluster.conftest import JOB
from tests.recipes.conftest import ROOT
from tests.waiting import until

FOR_EVER = shlex.split("--lr-scheduler constant --max-steps 1000000 --frequent 1 --keep-checkpoints 10000")
STARTS = re.compile(r"rank 0 of (\d) \(torch\)")
RESUMES = re.compile(r"resum\w+ from \S*/step-(\d+)")
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
        typed = [*documented(), *shlex.split(self.rendezvous), "train.py", "face"]
        env = {**self.env, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        job = [*typed, "--models-root", str(self.root / "run"), *JOB, *FOR_EVER, *self.flags]
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
        rows = (self.root / "run/loss.csv").read_text().splitlines() if (self.root / "run/loss.csv").exists() else []
        number = rows[-1].partition(",")[0] if rows else ""
        return int(number) if number.isdigit() else 0

    def goes_on(self, size: int, starts: int, seconds: float = LIMIT_S) -> "Went":
        """Waits until the job trains on with that many ranks; starts: how often it had been started before."""
        began, last = time.monotonic(), self.last_step()

        def trains() -> bool:
            found = list(STARTS.finditer(self.printed))[starts:]
            return bool(found) and found[-1][1] == str(size) and "step " in self.printed[found[-1].end() :]

        until(trains, seconds, said=lambda: self.printed[-8000:])
        took_s = time.monotonic() - began
        resumed = RESUMES.findall(
            self.printed[list(STARTS.finditer(self.printed))[starts - 1].end() :] if starts else ""
        )
        return Went(took_s, int(resumed[-1]) if resumed else 0, last)

    def num_starts(self) -> int:
        return len(STARTS.findall(self.printed))


@dataclass
class Went:
    """How it went on: seconds until it trained; the step of the checkpoint; the last step before."""

    seconds: float
    resumed: int
    last: int

    @property
    def lost(self) -> int:
        return max(0, self.last - self.resumed)


def documented() -> list[str]:
    """The page's command, as far as a test has the same."""
    return shlex.split(
        "torchrun --nnodes=1:2 --nproc_per_node=1 --max-restarts=100 --rdzv-id=job1 --rdzv-backend=c10d "
        "--rdzv-conf=last_call_timeout=5"
    )


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

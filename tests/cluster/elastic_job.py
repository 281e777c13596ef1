"""A small job under `horovodrun --min-np 1 --host-discovery-script`, on two hosts that are lost and come back. (How
fast it goes on: benchmarks/hosts/elastic.py.)"""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.hosts.two_hosts import ADDRESSES, TwoHosts
from tests.cluster.conftest import JOB
from tests.waiting import until

EVERY = 10  # steps between commits
# In a host's own process numbers. (sys.argv: the job's folder, the signal.)
_SIGNAL = """
import psutil, sys
root, number = sys.argv[1], int(sys.argv[2])
trainers = [p for p in psutil.process_iter(["cmdline"]) if root in (words := p.info["cmdline"] or [])
            and any(word.endswith("train.py") for word in words)]
for p in trainers if number else []:
    p.send_signal(number)
print(len(trainers))
"""
_STARTS_S = 90.0  # a process, on a machine that has much else to do


@dataclass
class Job:
    """A running job, and what it has printed so far."""

    root: Path
    process: subprocess.Popen
    limit_s: float = 2 * _STARTS_S

    @property
    def printed(self) -> str:
        return (self.root / "out").read_text(errors="replace")

    def end(self) -> str:
        return self.printed[-6000:]

    def wait_for(self, pattern: str, nth: int = 1) -> re.Match[str]:
        """The nth place where the pattern is in what was printed; raises AssertionError where it does not come."""
        until(lambda: len(re.findall(pattern, self.printed)) >= nth, self.limit_s, self.process, self.end)
        return list(re.finditer(pattern, self.printed))[nth - 1]

    def recovered(self, nth: int = 1) -> tuple[int, float]:
        """(step from which it went on for the nth time, seconds since the step before). That is a commit, or a
        checkpoint that is newer: of a step that has both, the commit is whole some steps later."""
        seconds = self.recovery(nth)
        step = self.wait_for(r"resumed from (?:the commit of step |\S+/step-)(\d+)", nth)
        return int(step[1]), float(seconds[1])

    def recovery(self, nth: int) -> re.Match[str]:
        """What the log says of the nth: its seconds, and what they were spent on."""
        return self.wait_for(r"recovered in ([\d.]+) s: (.*)\n", nth)


@contextmanager
def running(
    hosts: TwoHosts,
    env: Mapping[str, str],
    root: Path,
    flags: list[str],
    slots: tuple[int, int] = (1, 1),
    rank_0: int | None = None,
) -> Iterator[Job]:
    """Runs an endless job within the block. horovodrun itself is on the first host. slots: processes of each host.
    rank_0: the host that has it at the start; none: by chance."""
    root.mkdir(parents=True, exist_ok=True)
    host_file = root / "hosts"
    host_file.write_text("".join(f"{a} slots={n}\n" for a, n in zip(ADDRESSES, slots, strict=True)))
    notices_soon(hosts)
    launch = ["timeout", "--kill-after=5", "900", "horovodrun", "-np", str(sum(slots)), "--min-np", "1"]
    launch += ["--host-discovery-script", "hosts/discover.sh", "--blacklist-cooldown-range", "3", "5"]
    launch += ["--network-interfaces", "eth0", "--disable-cache", "bash", "config.sh", "--models-root", str(root)]
    constant = ["--lr-scheduler", "constant", "--max-steps", "1000000", "--frequent", "4"]
    with (
        (root / "out").open("w") as out,
        hosts.start(
            0,
            [*launch, *JOB, *constant, "--commit-every", str(EVERY), *flags],
            env={**env, "HOST_FILE": str(host_file), **first(rank_0)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            yield Job(root, process)
        finally:
            for host in (0, 1):
                kill_all(hosts, host)


def first(host: int | None) -> dict[str, str]:
    """horovodrun numbers its hosts as they lie in a set: by the hashes of their names."""
    if host is None:
        return {}
    order = "import sys; print(list(set(sys.argv[1:]))[0])"
    for seed in map(str, range(100)):
        env = {"PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", order, *ADDRESSES], env=env, capture_output=True, text=True)
        if done.stdout.strip() == ADDRESSES[host]:
            return env
    raise AssertionError(f"no order of {ADDRESSES} begins with host {host}")


def notices_soon(hosts: TwoHosts) -> None:
    """What docs/reliability.md has users write into ~/.ssh/config: a connection to a host that is gone ends."""
    config = hosts.folder / "ssh_config"
    if "ServerAliveInterval" not in config.read_text():
        config.write_text(f"{config.read_text()}ServerAliveInterval 2\nServerAliveCountMax 3\n")


def kill_all(hosts: TwoHosts, host: int) -> None:
    """Every process of the host but its first, the sshd that waits for new connections; returns when they are gone."""
    with suppress(ProcessLookupError):
        hosts.start(host, ["sh", "-c", "kill -9 -1"], stderr=subprocess.DEVNULL).wait(30)
    while "python" in hosts.run(host, ["ps", "-e", "-o", "comm="], timeout_s=10)[1]:
        time.sleep(0.05)  # the system takes back what they had


def stop(hosts: TwoHosts, host: int, job: Job) -> None:
    """Asks the trainers of a host to write a checkpoint and end; all others do so, too."""
    assert trainers(hosts, host, job.root, signal.SIGUSR1)
    job.process.wait(_STARTS_S)


def trainers(hosts: TwoHosts, host: int, root: Path, send: int = 0) -> int:
    """How many processes of the job run on a host; each is sent the signal, if one is given."""
    command = [sys.executable, "-c", _SIGNAL, str(root), str(int(send))]
    with hosts.start(host, command, stdout=subprocess.PIPE, text=True) as process:
        return int(process.communicate(timeout=30)[0])

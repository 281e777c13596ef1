"""A small job under `horovodrun --min-np 1 --host-discovery-script`, on two hosts that are lost and come back.

python -m tests.cluster.elastic_job FOLDER --rounds 20 --seed 1      again and again, three processes, as root
python -m tests.cluster.elastic_job FOLDER --processes 1+1 --how kill --num-classes 200000 --embedding-size 512
"""

import argparse
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.two_hosts import ADDRESSES, TwoHosts, two_hosts
from tests.cluster.conftest import JOB
from tests.recipes.conftest import environment
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
_STEP = r"\bstep \d+/"
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


def lose_and_take_back(hosts: TwoHosts, job: Job, how: str, nth: int) -> tuple[float, float]:
    """The second host is lost ("kill": all its processes; "cut": the cable, for so long that the first goes on alone;
    "out": taken out of the host file) and comes back: the job's recoveries number nth and nth + 1. Their seconds."""
    if how == "kill":
        kill_all(hosts, 1)
        lost = job.recovered(nth)
    elif how == "out":
        host_file = job.root / "hosts"
        both = host_file.read_text()
        host_file.write_text(both.splitlines(keepends=True)[0])
        lost = job.recovered(nth)
        host_file.write_text(both)
    else:
        with hosts.cut():
            lost = job.recovered(nth)
    return lost[1], job.recovered(nth + 1)[1]


def many_times(given: argparse.Namespace, flags: list[str], limit_s: float = 30.0) -> None:
    """The second host is lost in one way or the other, at any moment, and comes back, again and again; raises
    AssertionError where the first one does not go on within limit_s, or a step is missing at the end."""
    chance = random.Random(given.seed)
    first_host, second_host = map(int, given.processes.split("+"))
    flags = ["--checkpoint-every", "50", *flags]
    with two_hosts() as hosts, running(hosts, environment(), given.root, flags, (first_host, second_host)) as job:
        job.wait_for("step 20/")
        for number in range(given.rounds):
            steps_told = len(re.findall(_STEP, job.printed))
            job.wait_for(_STEP, steps_told + 1)  # or a return would count among the seconds of the next loss
            time.sleep(chance.uniform(0, 5))
            how = chance.choice(given.how)
            lost_s, _ = lose_and_take_back(hosts, job, how, 2 * number + 1)
            lost, back = (job.recovery(2 * number + nth) for nth in (1, 2))
            print(
                f"round {number + 1}, {how}: went on after {lost[1]} s ({lost[2]}); it came back, all went on after "
                f"{back[1]} s ({back[2]})",
                flush=True,
            )
            assert lost_s < limit_s
        stop(hosts, 1, job)
    steps = [int(row.partition(",")[0]) for row in (given.root / "loss.csv").read_text().splitlines()[1:]]
    assert steps == list(range(1, len(steps) + 1))
    print(f"{len(steps)} steps, none missing")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(epilog="Other flags are the job's.")
    parser.add_argument("root", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", default="2+1", help="of the first host, and of the second")
    parser.add_argument("--how", nargs="+", choices=("kill", "cut", "out"), default=("kill", "cut"))
    many_times(*parser.parse_known_args())

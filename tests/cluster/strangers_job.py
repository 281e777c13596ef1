"""A job trains on two hosts while somebody on a third throws all that he has at every socket of it.

python -m tests.cluster.strangers_job FOLDER --seconds 60            as root; prints what came of it, as JSON
python -m tests.cluster.strangers_job FOLDER --launcher horovodrun --messages 10000 --connections 2000
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from benchmarks.two_hosts import ADDRESSES, TwoHosts, two_hosts
from tests.cluster.stranger import listeners
from tests.cluster.test_two_hosts import FLAGS, HOSTS, LAUNCHERS, own_launch
from tests.faults.ranks import steps_done
from tests.recipes.conftest import ROOT, environment

_MPI = ["horovodrun", "--mpi", "-np", "2", "-H", HOSTS, "--network-interfaces", "eth0", "--disable-cache"]
COMMANDS = {
    "--nodes": lambda root: [own_launch(host, root) for host in (0, 1)],
    "horovodrun --mpi": lambda root: [[*_MPI, "bash", "config.sh", "--models-root", str(root), *FLAGS]],
    **LAUNCHERS,
}
_BEFORE_LINE = re.compile(r"(\[[\d,]+\]<std(out|err)>:)?(rank \d+: )?")  # horovodrun's, and ours
_STEP = re.compile(r"step \d+/\d+ · ")
# What Open MPI's daemons, who answer anybody, say of each message that is not theirs (SECURITY.md).
_DAEMON = re.compile(r"\[\S+:\d+\] tcp_peer_recv_connect_ack: invalid header type: \d+")
_GATE = f"{ADDRESSES[0]}:8888"  # of own_launch
_BEFORE = 20  # steps, after which memory is what it stays
_STARTS_S = 300.0  # on a machine that has much else to do


@dataclass
class Outcome:
    """What an attack came to. Memory and descriptors are rank 0's, more than before."""

    steps_before: int = 0
    steps_after: int = 0
    memory_bytes: int = 0
    descriptors: int = 0
    sockets: list[str] = field(default_factory=list)
    thrown: dict[str, int] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)  # printed meanwhile that are not of the training's log
    lines_of_daemons: int = 0
    losses_are_equal: bool = False

    def check(self) -> None:
        assert self.thrown.get("no answer", 0) + self.thrown.get("connections", 0) > 0, self
        assert self.steps_after > self.steps_before, self
        assert self.losses_are_equal, self
        assert self.lines == [], self
        assert self.memory_bytes < 16 << 20, self
        assert self.descriptors < 32, self


class Training:
    """A job on the two hosts; endless, unless it has a number of steps."""

    def __init__(self, hosts: TwoHosts, env: Mapping[str, str], launcher: str, root: Path, steps: int = 1_000_000):
        root.mkdir(parents=True)
        self.root, self._hosts = root, hosts
        flags = ["--max-steps", str(steps), "--lr-scheduler", "constant"]
        self._logs = [root / f"printed.{number}" for number in (0, 1)]
        self._processes = []
        for host, words in enumerate(COMMANDS[launcher](root)):
            with self._logs[host].open("w") as log:
                pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
                self._processes.append(hosts.start(host, [*words, *flags], env=dict(env), **pipes))

    @property
    def printed(self) -> str:
        return "".join(log.read_text(errors="replace") for log in self._logs if log.exists())

    def lines(self, since: tuple[int, ...] = (0, 0)) -> list[str]:
        """What was printed after so many bytes of each log, `sizes()` then."""
        texts = [log.read_bytes()[size:] for log, size in zip(self._logs, since, strict=True) if log.exists()]
        return b"".join(texts).decode(errors="replace").splitlines()

    def sizes(self) -> tuple[int, ...]:
        return tuple(log.stat().st_size if log.exists() else 0 for log in self._logs)

    def wait_for(self, steps: int) -> None:
        deadline = time.monotonic() + _STARTS_S
        while steps_done(self.root) < steps:
            assert all(process.poll() is None for process in self._processes), self.printed[-4000:]
            assert time.monotonic() < deadline, self.printed[-4000:]
            time.sleep(0.1)

    def rank_0(self) -> psutil.Process:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                words, environ = process.cmdline(), process.environ()
                ranks = (environ.get(name) for name in ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK"))
                if str(self.root) in words and "python" in Path(words[0]).name and "0" in ranks:
                    return process
        raise AssertionError(f"no rank 0: {self.printed[-4000:]}")

    def end(self) -> None:
        """As a scheduler does: the ranks finish their step."""
        self.rank_0().send_signal(signal.SIGTERM)
        self.wait()

    def wait(self) -> None:
        for process in self._processes:
            process.wait(timeout=600)


def attack(
    hosts: TwoHosts,
    env: Mapping[str, str],
    folder: Path,
    seconds: float,
    messages: int,
    connections: int,
    launcher: str = "--nodes",
) -> Outcome:
    """The gate is attacked from before the start on, all other sockets from step _BEFORE on, for so many seconds."""
    outcome = Outcome()
    with hosts.stranger() as three:

        def throw(for_s: float, targets: list[str]) -> subprocess.Popen:
            words = [sys.executable, "-m", "tests.cluster.stranger", "throw", str(for_s), str(messages)]
            words += [str(connections), *targets]
            return three.start(2, words, stdout=subprocess.PIPE, text=True, env={**env, "PYTHONPATH": str(ROOT)})

        early = throw(min(seconds, 10.0), [_GATE])
        job = Training(hosts, env, launcher, folder / "attacked")
        job.wait_for(_BEFORE)
        early.communicate()
        listening = {
            (address if address in ADDRESSES else ADDRESSES[host], port)
            for host in (0, 1)
            for _, address, port in listeners(hosts.pids[host], str(job.root))
            if not address.startswith("127.")
        }
        outcome.sockets = sorted(f"{address}:{port}" for address, port in listening)
        rank_0 = job.rank_0()
        memory, descriptors = rank_0.memory_info().rss, rank_0.num_fds()
        outcome.steps_before, printed_before = steps_done(job.root), job.sizes()
        thrower = throw(seconds, outcome.sockets)
        while thrower.poll() is None:
            outcome.memory_bytes = max(outcome.memory_bytes, rank_0.memory_info().rss - memory)
            outcome.descriptors = max(outcome.descriptors, rank_0.num_fds() - descriptors)
            time.sleep(0.1)
        outcome.thrown = json.loads(thrower.communicate()[0].splitlines()[-1])
        outcome.steps_after = steps_done(job.root)
        lines = job.lines(printed_before)
        logs = [log.read_text() for log in (job.root / "logs").glob("rank-*.log")]
        of_training = {line.partition(" I ")[2] for log in logs for line in log.splitlines()}
        outcome.lines = [
            line
            for line in lines
            if not (_DAEMON.fullmatch(line) or _STEP.match(said := _BEFORE_LINE.sub("", line)) or said in of_training)
        ]
        outcome.lines_of_daemons = sum(_DAEMON.fullmatch(line) is not None for line in lines)
        job.end()
    undisturbed = Training(hosts, env, launcher, folder / "undisturbed", steps_done(job.root))
    undisturbed.wait()
    curves = [(one.root / "loss.csv").read_text() for one in (job, undisturbed)]
    outcome.losses_are_equal = curves[0] == curves[1] and curves[0].count("\n") > outcome.steps_after
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--messages", type=int, default=10_000, help="at each socket")
    parser.add_argument("--connections", type=int, default=2_000, help="held at each socket")
    parser.add_argument("--launcher", choices=list(COMMANDS), default="--nodes")
    options = parser.parse_args()
    env = environment()
    env |= {name: os.environ[name] for name in ("PARTIAL_FC_ADMIT",) if name in os.environ}
    with two_hosts() as hosts:
        outcome = attack(
            hosts, env, options.folder, options.seconds, options.messages, options.connections, options.launcher
        )
    print(json.dumps(asdict(outcome), indent=1))
    outcome.check()


if __name__ == "__main__":
    main()

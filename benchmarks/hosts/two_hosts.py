"""Two hosts on this machine, as far as a program can tell: for tests/cluster, for benchmarks, and to try things out.

    python -m benchmarks.hosts.two_hosts --rate 100mbit bash          a shell on the first host; as root, on Linux

Each host has its own network, processes, name, /run and /dev/shm (Linux namespaces), and an sshd; it shares this
machine's files, as over a network folder. One cable joins them (a veth pair), eth0 on both; nothing else is reachable.
ssh between them asks nothing and neither reads nor writes anything in ~/.ssh.

Nothing of a host has a name outside: no `ip netns`, no file under /etc. All of it ends with the host's first process,
and that ends with the process that made it, also when this is killed.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ADDRESSES = ("10.77.0.1", "10.77.0.2")
TOOLS = ("ip", "tc", "mount", "hostname", "unshare", "nsenter", "setpriv", "ssh", "ssh-keygen", "sshd")
# Where a user's PATH may lack them.
_SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin"

# The first process of a host ($1: its folder, $2: its name). It goes on when the cable is there.
_FIRST_PROCESS = """
set -e
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /run
mkdir -m 755 /run/sshd
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind "$1/hosts" /etc/hosts
hostname "$2"
ip link set lo up
echo ready
read -r cable
exec "$(command -v sshd)" -D -e -f "$1/sshd_config"
"""


class Unavailable(RuntimeError):
    """This machine, or this user on it, cannot have two hosts; says why."""


@dataclass(frozen=True)
class TwoHosts:
    """Two hosts, numbered 0 and 1, as `two_hosts` yields them."""

    folder: Path
    """Keys and settings of ssh, logs of sshd; removed at the end."""
    pids: tuple[int, ...]
    """Processes of this machine that hold a host each."""

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen:
        """Runs a command there, in the current folder; options as for subprocess.Popen.

        Ending the returned process leaves what it started running: let `timeout` end it, or the host's end.
        """
        env = options.pop("env", dict(os.environ))
        path = f"{self.folder}/bin:{Path(sys.executable).parent}:{_with_system_path(env)}"
        as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return subprocess.Popen([*_entered(self.pids[host]), *command], env={**env, **as_root, "PATH": path}, **options)

    def run(self, host: int, command: Sequence[str], timeout_s: float, **options: Any) -> tuple[int, str]:
        """(exit status, what it printed) of a command there; after timeout_s it is ended, with status 124."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        limited = ["timeout", "--kill-after=5", str(timeout_s), *command]
        with self.start(host, limited, text=True, **pipes, **options) as process:
            printed, _ = process.communicate()
        return process.returncode, printed

    def sent_bytes(self, host: int) -> int:
        """Bytes that left that host through the cable so far, with all headers, from Ethernet's up."""
        return int(Path(f"/proc/{self.pids[host]}/root/sys/class/net/eth0/statistics/tx_bytes").read_text())

    def limit(self, rate: str | None) -> None:
        """Limits the cable to `rate` each way ("100mbit", see tc(8)); None: to what the machine can."""
        # A token bucket: 64 kB leave at once; what would wait for more than 100 ms is dropped, as by a switch.
        self._queue(["tbf", "rate", rate, "burst", "64kb", "latency", "100ms"] if rate else ["noqueue"])

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Drops all packets, and tells nobody, as a switch without power does. Afterwards the cable has no limit."""
        self._queue(["blackhole"])
        try:
            yield
        finally:
            self.limit(None)

    @contextmanager
    def lossy(self, rate: str = "200mbit") -> Iterator[None]:
        """Loses all but the first two or three of several packets in a row, each way, as a switch without buffers does:
        about four of ten in a training. (The kernel's netem, which loses at random, is not everywhere.)"""
        self._queue(["tbf", "rate", rate, "burst", "4kb", "limit", "5kb"])
        try:
            yield
        finally:
            self.limit(None)

    def lost_packets(self, host: int) -> int:
        """Packets of this host that were lost since the cable last got other properties."""
        shown = _checked([*_entered(self.pids[host]), "tc", "-s", "qdisc", "show", "dev", "eth0"])
        return int(shown.partition("(dropped ")[2].partition(",")[0])

    def _queue(self, discipline: list[str]) -> None:
        for pid in self.pids[:2]:
            _checked([*_entered(pid), "tc", "qdisc", "replace", "dev", "eth0", "root", *discipline])


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Makes two joined hosts, and ends them and every process on them.

    Raises Unavailable where namespaces cannot be had or a tool is missing, RuntimeError where ssh does not answer.
    """
    _check_tools()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="two-hosts-")))
        # Open MPI keeps files by host name and process number in /tmp: the name must be of this run alone.
        names = tuple(f"{folder.name.lower().replace('_', '-')}-{number}" for number in (1, 2))
        _write_settings(folder, names)
        holders = [stack.enter_context(_host(folder, name)) for name in names]
        pids = (holders[0].pid, holders[1].pid)
        _join(pids)
        for holder in holders:
            assert holder.stdin is not None
            holder.stdin.write("cable\n")
            holder.stdin.flush()
        hosts = TwoHosts(folder, pids)
        _wait_for_ssh(hosts)
        yield hosts


def _check_tools() -> None:
    if os.geteuid() != 0:
        raise Unavailable("two hosts on one machine need root (network namespaces)")
    missing = [tool for tool in TOOLS if _which(tool) is None]
    if missing:
        raise Unavailable(f"two hosts on one machine need {', '.join(missing)}; `make setup` installs them")


def _write_settings(folder: Path, names: Sequence[str]) -> None:
    """One host key for both hosts and one key for whoever logs in."""
    for key in ("host_key", "key"):
        _checked(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(folder / key)])
    pairs = list(zip(ADDRESSES, names, strict=True))
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for address, name in pairs)]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    public = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text("".join(f"{address},{name} {public}" for address, name in pairs))
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/key.pub\nStrictModes no\nPidFile none\n"
        "PermitRootLogin prohibit-password\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\n"
        "MaxStartups 100\n"
    )
    (folder / "ssh_config").write_text(
        f"IdentityFile {folder}/key\nIdentitiesOnly yes\nIdentityAgent none\nBatchMode yes\nConnectTimeout 10\n"
        f"UserKnownHostsFile {folder}/known_hosts\nGlobalKnownHostsFile /dev/null\n"
    )
    # horovodrun and mpirun call whichever `ssh` the PATH has.
    wrapper = folder / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {_which("ssh")} -F {folder}/ssh_config "$@"\n')
    wrapper.chmod(0o755)


@contextmanager
def _host(folder: Path, name: str) -> Iterator[subprocess.Popen]:
    """A host without its cable. The kernel ends the holder with the thread that made it, then all that runs there."""
    separate = ["--net", "--mount", "--uts", "--pid", "--mount-proc", "--fork", "--kill-child"]
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", *separate]
    command += ["sh", "-c", _FIRST_PROCESS, "sh", str(folder), name]
    log = folder / f"{name}.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PATH": _with_system_path(os.environ)},
            start_new_session=True,  # Ctrl-C is for us: we end the host
        ) as holder,
    ):
        try:
            assert holder.stdout is not None
            if holder.stdout.readline() != "ready\n":
                raise Unavailable(f"no namespaces for a second host here: {log.read_text().strip()}")
            yield holder
        finally:
            holder.send_signal(signal.SIGKILL)


def _join(pids: tuple[int, int]) -> None:
    try:
        first = ["nsenter", "--target", str(pids[0]), "--net"]
        peer = ["peer", "name", "eth0", "netns", str(pids[1])]
        _checked([*first, "ip", "link", "add", "eth0", "type", "veth", *peer])
        for pid, address in zip(pids, ADDRESSES, strict=True):
            there = ["nsenter", "--target", str(pid), "--net"]
            _checked([*there, "ip", "address", "add", f"{address}/24", "dev", "eth0"])
            _checked([*there, "ip", "link", "set", "eth0", "up"])
    except RuntimeError as error:
        raise Unavailable(f"no cable between two network namespaces here: {error}") from error


def _wait_for_ssh(hosts: TwoHosts) -> None:
    deadline = time.monotonic() + 120  # on a machine that has much else to do
    for host in (0, 1):
        while True:
            status, printed = hosts.run(1 - host, ["ssh", ADDRESSES[host], "true"], timeout_s=15)
            if status == 0:
                break
            if time.monotonic() > deadline:
                logs = "\n".join(log.read_text() for log in hosts.folder.glob("*.log"))
                raise RuntimeError(f"ssh {ADDRESSES[host]} does not answer: {printed}\n{logs}")
            time.sleep(0.05)


def _entered(pid: int) -> list[str]:
    """Words before a command that put it into the host that `pid` holds."""
    # The holder itself counts among this machine's processes; those it starts are the host's.
    children = f"--pid=/proc/{pid}/ns/pid_for_children"
    return ["nsenter", "--target", str(pid), "--net", "--mount", "--uts", children, f"--wdns={Path.cwd()}"]


def _with_system_path(env: Mapping[str, str]) -> str:
    return f"{env.get('PATH', os.defpath)}:{_SYSTEM_PATH}"


def _which(tool: str) -> str | None:
    return shutil.which(tool, path=_with_system_path(os.environ))


def _checked(command: list[str]) -> str:
    env = {**os.environ, "PATH": _with_system_path(os.environ)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hosts.two_hosts", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--rate", help="what the cable carries each way, for example 100mbit; else as much as it can")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="runs on the first host (bash); the second: 10.77.0.2"
    )
    options = parser.parse_args()
    with two_hosts() as hosts:
        hosts.limit(options.rate)
        with hosts.start(0, options.command or ["bash"]) as process:
            return process.wait()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Unavailable, RuntimeError) as error:
        sys.exit(f"two_hosts: {error}")

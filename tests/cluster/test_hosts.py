"""The two hosts themselves: what they are to programs, and that nothing of them stays."""

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.two_hosts import ADDRESSES

ROOT = Path(__file__).parents[2]


def test_hosts_see_each_other_and_nothing_else(hosts):
    names = []
    for host in (0, 1):
        status, routes = hosts.run(host, ["ip", "route"], timeout_s=10)
        assert (status, len(routes.splitlines())) == (0, 1)  # no default route: only the cable's network
        _, name = hosts.run(host, ["hostname"], timeout_s=10)
        # Gloo listens where a host's own name points to: never 127.0.0.1.
        _, entry = hosts.run(host, ["getent", "hosts", name.strip()], timeout_s=10)
        assert entry.split()[0] == ADDRESSES[host]
        _, processes = hosts.run(host, ["ps", "-e", "-o", "comm="], timeout_s=10)
        assert set(processes.split()) == {"sshd", "timeout", "ps"}
        names.append(name)
    assert names[0] != names[1]
    assert hosts.run(0, ["ssh", ADDRESSES[1], "hostname"], timeout_s=10) == (0, names[1])
    assert hosts.run(1, ["ssh", ADDRESSES[0], "hostname"], timeout_s=10) == (0, names[0])


def test_what_crosses_the_cable_is_counted(hosts):
    before = hosts.sent_bytes(0), hosts.sent_bytes(1)
    copy = f"head -c 1000000 /dev/urandom | ssh {ADDRESSES[1]} 'cat >/dev/null'"
    assert hosts.run(0, ["sh", "-c", copy], timeout_s=30) == (0, "")
    sent = hosts.sent_bytes(0) - before[0], hosts.sent_bytes(1) - before[1]
    assert 1_000_000 < sent[0] < 2_000_000
    assert 0 < sent[1] < 500_000  # answers


def test_the_cable_can_be_made_slow_and_fast_again(hosts):
    for rate, shown in (("1gbit", "tbf"), ("100mbit", "rate 100Mbit"), (None, "noqueue"), (None, "noqueue")):
        hosts.limit(rate)
        for host in (0, 1):
            assert shown in hosts.run(host, ["tc", "qdisc", "show", "dev", "eth0"], timeout_s=10)[1]


def test_nothing_outlives_a_killed_maker(hosts, tmp_path):
    """hosts: for its skip. Another pair beside it, whose maker has no chance to tidy up: its folder stays."""
    marker = "86399.125"  # seconds, as no other process sleeps
    command = [sys.executable, "-m", "benchmarks.two_hosts", "sh", "-c", f"echo up; sleep {marker}"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        assert maker.stdout.readline() == "up\n"
        maker.kill()
    deadline = time.monotonic() + 30
    while alive := sleeping(marker):
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def sleeping(marker: str) -> list[str]:
    """Processes with these words in their command line, those that only wait to be reaped left out."""
    listed = subprocess.run(["ps", "-e", "-o", "stat=,args="], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if marker in line and not line.startswith("Z")]

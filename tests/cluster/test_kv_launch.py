"""`partial-fc launch` over ssh and mpirun: MXNet's servers and workers on two hosts, and how they end there."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hosts.two_hosts import ADDRESSES, TwoHosts
from tests.recipes.mxnet.test_kv_launch import needs_mxnet

ROOT = Path(__file__).parents[2]
LAUNCH = [sys.executable, "-m", "partial_fc", "launch"]
JOB = [sys.executable, str(ROOT / "tests/recipes/mxnet/kv_job.py")]
# The network of a second cable.
OTHERS = ("10.78.0.1", "10.78.0.2")


@pytest.fixture
def host_file(tmp_path) -> Path:
    path = tmp_path / "hosts"
    path.write_text("".join(f"{address}\n" for address in ADDRESSES))
    return path


@pytest.fixture
def second_cable(hosts) -> Iterator[str]:
    """Between the hosts; the name of its interface on both."""
    inside = [["nsenter", "--target", str(pid), "--net", "ip"] for pid in hosts.pids]
    peer = ["peer", "name", "eth1", "netns", str(hosts.pids[1])]
    subprocess.run([*inside[0], "link", "add", "eth1", "type", "veth", *peer], check=True)
    for ip, address in zip(inside, OTHERS, strict=True):
        subprocess.run([*ip, "address", "add", f"{address}/24", "dev", "eth1"], check=True)
        subprocess.run([*ip, "link", "set", "eth1", "up"], check=True)
    yield "eth1"
    subprocess.run([*inside[0], "link", "del", "eth1"], check=True)


def launch(hosts: TwoHosts, env: dict[str, str], words: list[str], **more: str) -> tuple[int, str]:
    env = {**env, "PYTHONPATH": str(ROOT), **more}
    return hosts.run(0, [*LAUNCH, *words], timeout_s=100, env=env)


def wait_for_quiet(hosts: TwoHosts) -> None:
    """Until nothing runs on either host but what was there before."""
    deadline = time.monotonic() + 30
    for host in (0, 1):
        while True:
            _, listed = hosts.run(host, ["ps", "-e", "-o", "comm="], timeout_s=10)
            if not (left := set(listed.split()) - {"sshd", "timeout", "ps"}):
                break
            assert time.monotonic() < deadline, left
            time.sleep(0.1)


@pytest.mark.long
@needs_mxnet
def test_a_job_over_ssh_talks_where_dmlc_interface_says(hosts, env, host_file, second_cable):
    words = ["-n", "2", "-s", "1", "-H", str(host_file), *JOB]
    status, printed = launch(hosts, env, words, DMLC_INTERFACE=second_cable, PS_VERBOSE="1")
    assert status == 0, printed
    for number in (0, 1):
        assert f"worker {number}: [3.0, 3.0, 3.0]\n" in printed
    # What PS_VERBOSE prints: that of the other host, too.
    bound = [line for line in printed.splitlines() if "Bind to" in line]
    assert sum("ip=10.78.0.1," in line for line in bound) == 3, bound
    assert sum("ip=10.78.0.2," in line for line in bound) == 1
    wait_for_quiet(hosts)


@pytest.mark.long
@needs_mxnet
def test_a_job_under_mpirun(hosts, env, host_file):
    words = ["-n", "2", "-s", "1", "--launcher", "mpi", "-H", str(host_file), *JOB, "raise"]
    status, printed = launch(hosts, env, words, PS_VERBOSE="1")
    assert printed.count("workers: [3.0, 3.0, 3.0]\n") == 2
    assert "ip=10.77.0.2," in printed
    # MXNet's number of a worker may be another one than mpirun's, but one of the two fails.
    assert "workers: worker 1 on two-hosts-" in printed
    assert "ended with exit status 4\n" in printed
    assert (
        f"workers on {ADDRESSES[1]}, {ADDRESSES[0]} (mpirun) ended with exit status 4; ending scheduler, servers\n"
        in printed
    )
    assert status == 4
    wait_for_quiet(hosts)


SCRIPT = 'echo "$DMLC_ROLE $DMLC_TASK_ID on $(hostname) at $DMLC_NODE_HOST in $PWD: $A"; {}'


def test_the_folder_is_copied_and_a_failure_names_its_host(hosts, env, host_file, tmp_path):
    source, there = tmp_path / "it's source", tmp_path / "the copy"
    source.mkdir()
    script = SCRIPT.format("sleep 1; [ $DMLC_ROLE$DMLC_TASK_ID != worker1 ] || kill -KILL $$; sleep 300 & wait")
    (source / "job.sh").write_text(script)
    words = ["-n", "2", "-s", "2", "-H", str(host_file), "--sync-dst-dir", str(there)]
    words += ["--env", "A=it's; $HOME", "sh", "job.sh"]
    begun = time.monotonic()
    status, printed = launch(hosts, env, ["--dry-run", *words])
    assert status == 0, printed
    assert not there.exists()
    status, printed = hosts.run(
        0, ["env", "-C", str(source), *LAUNCH, *words], timeout_s=60, env={**env, "PYTHONPATH": str(ROOT)}
    )
    name = hosts.run(1, ["hostname"], timeout_s=10)[1].strip()
    assert f"worker 1: worker 1 on {name} at {ADDRESSES[1]} in {there}: it's; $HOME\n" in printed
    assert f"worker 1 on {ADDRESSES[1]} ended with exit status 137, signal 9 (Killed)" in printed
    assert status == 137
    assert time.monotonic() - begun < 30
    wait_for_quiet(hosts)


def test_ranks_of_a_torch_job_and_a_host_that_is_not_there(hosts, env, host_file):
    script = 'echo "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, $MASTER_ADDR, $GLOO_SOCKET_IFNAME"'
    status, printed = launch(hosts, env, ["-n", "3", "-s", "0", "-H", str(host_file), "sh", "-c", script])
    assert status == 0, printed
    assert sorted(printed.splitlines()) == [
        "starting 3 processes",
        f"worker 0: 0 of 3, 0 of 2, {ADDRESSES[0]}, eth0",
        f"worker 1: 1 of 3, 1 of 2, {ADDRESSES[0]}, eth0",
        f"worker 2: 2 of 3, 0 of 1, {ADDRESSES[0]}, eth0",
    ]
    host_file.write_text(f"{ADDRESSES[1]}\n{ADDRESSES[1]}:23\n")
    status, printed = launch(hosts, env, ["-n", "1", "-s", "1", "-H", str(host_file), "sleep", "300"])
    assert f"worker 0 on {ADDRESSES[1]} ended with exit status 255" in printed
    assert "Connection refused" in printed
    assert status == 255
    wait_for_quiet(hosts)

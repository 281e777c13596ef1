"""Two hosts meet through a Redis server that runs on one of them."""

import shlex
import subprocess
import sys

import pytest

from benchmarks.hosts.two_hosts import ADDRESSES
from tests.cluster.test_two_hosts import ended, start_on
from tests.redis_server import command, skip_without
from tests.running import ROOT
from tests.waiting import free_port

RECIPE = str(ROOT / "tests/recipes/launchers/rendezvous_job.py")
JOB = [sys.executable, "-m", "partial_fc", "train", RECIPE, "--num_shards", "2"]


@pytest.fixture
def redis(hosts):
    """Its port, on the first host's address; the password is "right"."""
    skip_without()
    port = free_port()
    server = command(port, "--bind", ADDRESSES[0], "--requirepass", "right")
    with hosts.start(0, ["timeout", "300", *server], stdout=subprocess.DEVNULL):
        answers = f"until (exec 3<>/dev/tcp/{ADDRESSES[0]}/{port}); do sleep 0.1; done 2>/dev/null"
        assert hosts.run(1, ["bash", "-c", answers], timeout_s=20)[0] == 0
        yield port
        shutdown = f"exec 3<>/dev/tcp/{ADDRESSES[0]}/{port}; printf 'AUTH right\\r\\nSHUTDOWN NOSAVE\\r\\n' >&3"
        hosts.run(0, ["bash", "-c", shutdown], timeout_s=20)


def on_host(host: int, port: int, *flags: str) -> list[str]:
    return [*JOB, "--shard_id", str(host), "--redis_host", ADDRESSES[0], "--redis_port", str(port), *flags]


def test_two_hosts_find_each_other(hosts, env, redis, tmp_path):
    """Also where the hosts' own names are 127.0.1.1, as Debian writes it into /etc/hosts."""
    env = env | {"REDIS_PASSWORD": "right", "PYTHONPATH": str(ROOT)}
    names = [hosts.run(host, ["hostname"], 20)[1].strip() for host in (0, 1)]
    commands = []
    for host, name in enumerate(names):
        (tmp_path / name).write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        as_debian = f"mount --bind {tmp_path / name} /etc/hosts; exec {shlex.join(on_host(host, redis))} "
        as_debian += "--run_id two"
        commands.append(["unshare", "--mount", "sh", "-c", as_debian])
    before = hosts.sent_bytes(1)
    for host, (status, printed) in enumerate(ended(*start_on(hosts, commands, env))):
        assert status == 0, printed
        assert f"rank {host} of 2, 0 of 1 here: 3" in printed
    assert hosts.sent_bytes(1) > before

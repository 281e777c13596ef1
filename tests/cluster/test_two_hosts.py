"""Every launcher trains over two hosts what it trains on one, and says when it cannot reach the other.
(--nodes 2 trains in tests/faults/test_network.py.)"""

import shlex
import subprocess
from pathlib import Path

import pytest

from benchmarks.hosts.two_hosts import TwoHosts
from tests.cluster.conftest import JOB, commands
from tests.recipes.launchers.test_rendezvous import ended
from tests.running import losses, result, train_several

STEPS = 25
FLAGS = [*JOB, "--max-steps", str(STEPS)]


def on_both(launcher: str, folder: Path, flags: list[str]) -> list[list[str]]:
    """What is typed on the first host, or on each."""
    words = commands(folder, "face")[launcher, 2]
    return [[*typed, "--models-root", str(folder / "run"), *flags] for typed in words]


def start_on(hosts: TwoHosts, commands: list[list[str]], env: dict[str, str]) -> list[subprocess.Popen[str]]:
    """The commands, one for each host from the first on, side by side; each ends after 300 s with status 124."""
    env = {**env, "RECIPE": "face", "NETWORK_INTERFACE": "eth0"}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    limit = ["timeout", "--kill-after=5", "300"]
    return [hosts.start(i, [*limit, *c], env=env, text=True, **pipes) for i, c in enumerate(commands)]


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory) -> list[float]:
    """The losses of two processes that share a host."""
    models_root = tmp_path_factory.mktemp("one-host")
    train_several({models_root: shlex.join(FLAGS)})
    return losses(models_root)


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["horovodrun --gloo", "run.sh", "torchrun"])
def test_trains_over_the_cable_as_on_one_host(hosts, env, on_one_host, tmp_path, launcher):
    before = [hosts.sent_bytes(host) for host in (0, 1)]
    for status, printed in ended(*start_on(hosts, on_both(launcher, tmp_path, FLAGS), env), timeout=None):
        assert status == 0, printed[-6000:]
    ours = losses(tmp_path / "run")
    assert len(ours) == STEPS
    # Half of the 1e-4 that any two launchers may differ by.
    assert max(abs(a - b) for a, b in zip(ours, on_one_host, strict=True)) < 5e-5
    assert ours[-1] != ours[0]
    # The gradients of the backbone went from each host to the other (of two ranks each sends what it hands in).
    traffic = result(tmp_path / "run")["traffic_per_step"]
    gradients = sum(count["bytes"] for name, count in traffic.items() if name.startswith("backbone/gradient"))
    assert gradients > 100_000
    for host in (0, 1):
        assert hosts.sent_bytes(host) - before[host] > STEPS * gradients


@pytest.mark.long
def test_a_cable_that_breaks_is_reported_on_both_hosts(hosts, env, tmp_path):
    """Packets vanish and no connection is closed: only --comm-timeout can tell."""
    endless = [*JOB, "--max-steps", "1000000", "--comm-timeout", "4"]
    processes = start_on(hosts, on_both("--gpus, --nodes", tmp_path, endless), env)
    printed_before = ""
    for line in processes[0].stdout or ():
        printed_before += line
        if "step 20/" in line:
            break
    with hosts.cut():
        (status_0, printed_0), (status_1, printed_1) = ended(*processes, timeout=None)
    assert status_0 not in (0, 124), printed_before + printed_0
    assert status_1 not in (0, 124), printed_1
    assert "has not finished after" in printed_0
    assert "missing: rank 1" in printed_0
    assert "missing: rank 0" in printed_1

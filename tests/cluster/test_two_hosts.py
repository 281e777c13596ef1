"""Every launcher trains over two hosts what it trains on one, and says when it cannot reach the other."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.two_hosts import ADDRESSES, TwoHosts
from tests.cluster.conftest import JOB
from tests.recipes.conftest import losses, result, train_several

STEPS = 25
HOSTS = ",".join(f"{address}:1" for address in ADDRESSES)
FLAGS = [*JOB, "--max-steps", str(STEPS)]


def horovodrun(models_root: Path) -> list[str]:
    """--disable-cache: or it writes into the user's home that these addresses answer."""
    launch = ["horovodrun", "--gloo", "-np", "2", "-H", HOSTS, "--network-interfaces", "eth0", "--disable-cache"]
    return [*launch, "bash", "config.sh", "--models-root", str(models_root), *FLAGS]


def run_sh(models_root: Path) -> list[str]:
    models_root.mkdir(exist_ok=True)
    host_file = models_root / "hosts"
    host_file.write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
    settings = ["env", "NETWORK_INTERFACE=eth0", f"MODELS_ROOT={models_root}"]
    return [*settings, "bash", "run.sh", str(host_file), *FLAGS]


def torchrun(host: int, models_root: Path) -> list[str]:
    launch = ["torchrun", "--nnodes=2", f"--node_rank={host}", "--nproc_per_node=1"]
    launch += [f"--master_addr={ADDRESSES[0]}", "--master_port=8887"]
    return [*launch, "train.py", "face", "--models-root", str(models_root), *FLAGS]


def own_launch(host: int, models_root: Path) -> list[str]:
    """The PyTorch tutorial's command line: the program starts its processes itself."""
    launch = ["--nodes", "2", "--gpus", "1", "--nr", str(host)]
    launch += ["--master-addr", ADDRESSES[0], "--master-port", "8888"]
    return [sys.executable, "train.py", "face", *launch, "--models-root", str(models_root), *FLAGS]


# launcher -> what is typed: on the first host, or on each of them. (run.sh is mpirun. train.py --nodes 2:
# tests/faults/test_network.py.)
LAUNCHERS = {
    "horovodrun": lambda root: [horovodrun(root)],
    "run.sh": lambda root: [run_sh(root)],
    "torchrun": lambda root: [torchrun(host, root) for host in (0, 1)],
}


def start_on(hosts: TwoHosts, commands: list[list[str]], env: dict[str, str]) -> list[subprocess.Popen[str]]:
    """The commands, one for each host from the first on, side by side; each ends after 300 s with status 124."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    limit = ["timeout", "--kill-after=5", "300"]
    return [hosts.start(i, [*limit, *c], env=env, text=True, **pipes) for i, c in enumerate(commands)]


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Status and output of each."""
    outputs = [process.communicate()[0] for process in processes]
    return [(process.returncode, printed) for process, printed in zip(processes, outputs, strict=True)]


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory) -> list[float]:
    """The losses of two processes that share a host."""
    models_root = tmp_path_factory.mktemp("one-host")
    train_several({models_root: shlex.join(FLAGS)})
    return losses(models_root)


@pytest.mark.long
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_trains_over_the_cable_as_on_one_host(hosts, env, on_one_host, tmp_path, launcher):
    before = [hosts.sent_bytes(host) for host in (0, 1)]
    for status, printed in ended(start_on(hosts, LAUNCHERS[launcher](tmp_path), env)):
        assert status == 0, printed[-6000:]
    ours = losses(tmp_path)
    assert len(ours) == STEPS
    # Half of the 1e-4 that any two launchers may differ by.
    assert max(abs(a - b) for a, b in zip(ours, on_one_host, strict=True)) < 5e-5
    assert ours[-1] != ours[0]
    # The gradients of the backbone went from each host to the other (of two ranks each sends what it hands in).
    traffic = result(tmp_path)["traffic_per_step"]
    gradients = sum(count["bytes"] for name, count in traffic.items() if name.startswith("backbone/gradient"))
    assert gradients > 100_000
    for host in (0, 1):
        assert hosts.sent_bytes(host) - before[host] > STEPS * gradients


@pytest.mark.long
def test_a_cable_that_breaks_is_reported_on_both_hosts(hosts, env, tmp_path):
    """Packets vanish and no connection is closed: only --comm-timeout can tell."""
    endless = ["--max-steps", "1000000", "--comm-timeout", "4"]
    processes = start_on(hosts, [[*own_launch(host, tmp_path), *endless] for host in (0, 1)], env)
    printed_before = ""
    for line in processes[0].stdout or ():
        printed_before += line
        if "step 20/" in line:
            break
    with hosts.cut():
        (status_0, printed_0), (status_1, printed_1) = ended(processes)
    assert status_0 not in (0, 124), printed_before + printed_0
    assert status_1 not in (0, 124), printed_1
    assert "has not finished after" in printed_0
    assert "missing: rank 1" in printed_0
    assert "missing: rank 0" in printed_1

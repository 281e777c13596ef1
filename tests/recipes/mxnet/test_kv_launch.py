"""`partial-fc launch --launcher local`: MXNet's scheduler, servers and workers of this host, and how they end. (What
they sum, and a job that ends well: test_mnist_kvstore.py.)"""

import signal
import socket
import subprocess
import sys
from importlib.util import find_spec

import psutil
import pytest

from tests.recipes.launchers.test_spawn import wait_for_end
from tests.running import ROOT, environment
from tests.waiting import until

LAUNCH = [sys.executable, "-m", "partial_fc", "launch", "--launcher", "local"]
JOB = [sys.executable, str(ROOT / "tests/recipes/mxnet/kv_job.py")]
HOST = socket.gethostname()
# Only processes that are started here load it.
needs_mxnet = pytest.mark.skipif(find_spec("mxnet") is None, reason="MXNet is not installed")


def start(*words: str, launcher: list[str] = LAUNCH) -> subprocess.Popen[str]:
    env = {**environment(), "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    # A shell that runs the tests in the background ignores SIGINT, and what is ignored stays so.
    return subprocess.Popen(["env", "--default-signal=INT", *launcher, *words], env=env, text=True, **pipes)


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    out, err = process.communicate(timeout=100)
    return process.returncode, sorted(out.splitlines()), err


def family(pid: int) -> list[int]:
    """A process and all that it has started."""
    return [pid, *(process.pid for process in psutil.Process(pid).children(recursive=True))]


@pytest.mark.long
@needs_mxnet
def test_a_killed_server_ends_the_job_and_nothing_is_left(tmp_path):
    """In MXNet itself all workers wait: for ever."""
    job = start("-n", "2", "-s", "2", *JOB, "wait", str(tmp_path / "all-work"))
    at_work = tmp_path / "all-work"
    until(lambda: at_work.exists() and len(at_work.read_text().split()) == 2, job=job)
    members = family(job.pid)
    jobs = [process for process in map(psutil.Process, members) if process.cmdline()[: len(JOB)] == JOB]
    (server,) = (p for p in jobs if (p.environ()["DMLC_ROLE"], p.environ()["DMLC_TASK_ID"]) == ("server", "1"))
    server.kill()
    status, _, err = ended(job)
    assert f"server 1 on {HOST} ended with exit status 137, signal 9 (Killed)" in err
    assert status == 137
    wait_for_end(members)


@needs_mxnet
def test_a_scheduler_that_cannot_listen_ends_the_job():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, _, err = ended(start("-n", "1", "-s", "1", "--env", f"DMLC_PS_ROOT_PORT={port}", *JOB))
    assert "scheduler: MXNetError: Check failed: my_node_.port != -1 (-1 vs. -1) : bind failed" in err
    assert f"scheduler on {HOST} ended with exit status 1; ending server 0, worker 0" in err
    assert status == 1


# ---- shell scripts are quicker


ROLES = 'echo "$DMLC_ROLE $DMLC_TASK_ID of $DMLC_NUM_WORKER, $DMLC_NUM_SERVER at $DMLC_NODE_HOST $MINE $ITS"'


def test_each_process_is_told_who_it_is():
    words = ["-n", "2", "--env", "MINE=it's", "--env-server", "ITS:a b", "--env-worker", "ITS=c", "sh", "-c", ROLES]
    status, out, err = ended(start(*words))
    assert status == 0, err
    assert out == [
        "scheduler: scheduler 0 of 2, 2 at  it's ",  # ps-lite's listens at DMLC_PS_ROOT_URI
        "server 0: server 0 of 2, 2 at 127.0.0.1 it's a b",
        "server 1: server 1 of 2, 2 at 127.0.0.1 it's a b",
        "worker 0: worker 0 of 2, 2 at 127.0.0.1 it's c",
        "worker 1: worker 1 of 2, 2 at 127.0.0.1 it's c",
    ]


def test_without_servers_workers_are_ranks():
    script = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR; [ -z $DMLC_ROLE ]"
    status, out, err = ended(start("-n", "2", "-s", "0", "sh", "-c", script))
    assert status == 0, err
    assert out == ["worker 0: 0 2 0 2 127.0.0.1", "worker 1: 1 2 1 2 127.0.0.1"]


def test_a_server_that_cannot_start_ends_the_job():
    script = "[ $DMLC_ROLE = server ] && exec no-such-program; sleep 300"
    status, _, err = ended(start("-n", "1", "sh", "-c", script))
    assert f"server 0 on {HOST} ended with exit status 127; ending scheduler, worker 0" in err
    assert status == 127


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_whatever_ends_the_launcher_leaves_nothing(number, expected):
    job = start("-n", "1", "-s", "1", "sh", "-c", "echo up; exec sleep 300")
    assert job.stdout is not None
    assert len([job.stdout.readline() for _ in range(3)]) == 3
    members = family(job.pid)
    assert len(members) >= 10  # three times COMMAND, its guard, and the shell that has the status
    job.send_signal(number)
    assert ended(job)[0] == expected
    wait_for_end(members)


def test_servers_that_stay_are_ended_after_the_workers():
    script = "[ $DMLC_ROLE = worker ] || exec sleep 300"
    monkey = [sys.executable, "-c", "from partial_fc import supervisor; supervisor._HELPER_GRACE_S = 0.2; "]
    monkey[-1] += "import sys; from recipes.mxnet.launch.command import launch; sys.exit(launch(sys.argv[1:]))"
    status, _, err = ended(start("--launcher", "local", "-n", "1", "sh", "-c", script, launcher=monkey))
    assert (status, err) == (0, "starting 3 processes\n")

"""Launchers that are not ours, as they start a command. tests/world/test_launchers.py has the variables of many."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from partial_fc import comm
from tests.recipes.launchers import rendezvous_job
from tests.waiting import free_port

ROOT = Path(__file__).parents[3]
MPIRUN = "mpirun -np 2 --oversubscribe --allow-run-as-root --bind-to none"
LINES = {
    "torch.distributed.launch": "{python} -m torch.distributed.launch --nproc_per_node=2 --master_port={port} {job}",
    "mpirun of torchrun": MPIRUN
    + " bash -c '{python} -m torch.distributed.run --nproc_per_node=1 --nnodes=2 --node_rank=$OMPI_COMM_WORLD_RANK"
    " --master_addr=127.0.0.1 --master_port={port} {job}'",
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "local"), [("torch.distributed.launch", "1 of 2"), ("mpirun of torchrun", "0 of 1")]
)
def test_ranks_find_each_other(launcher, local):
    line = LINES[launcher].format(python=sys.executable, port=free_port(), job=f"train.py {rendezvous_job.__file__}")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI"))}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=240)
    assert f"rank 1 of 2, {local} here: 3" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0


def test_a_dead_horovodrun_is_named_before_horovod_starts(monkeypatch):
    """Variables of horovodrun in a shell that it started, or exported by hand."""
    given = {"RANK": 0, "SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 2, "CONTROLLER": "gloo"}
    given |= {"GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "GLOO_RENDEZVOUS_PORT": free_port()}
    for name, value in given.items():
        monkeypatch.setenv(f"HOROVOD_{name}", str(value))
    with pytest.raises(comm.StartError, match="unset HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE"):
        comm.init()


def test_without_horovod_mpirun_has_a_remedy(monkeypatch):
    """`pip install .` brings no Horovod."""
    for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", "0" if "RANK" in name else "2")
    monkeypatch.setitem(sys.modules, "horovod", None)
    monkeypatch.delitem(sys.modules, "partial_fc.comm.horovod", raising=False)
    monkeypatch.delitem(sys.modules, "horovod.torch", raising=False)
    with pytest.raises(comm.StartError, match=r"needs Horovod here.*torchrun"):
        comm.init()

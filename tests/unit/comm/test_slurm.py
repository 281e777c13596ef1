"""What srun says of a task, as its manual has it."""

import pytest

from partial_fc.comm import Launch, detect
from partial_fc.comm.launch import slurm
from tests.unit.comm.test_launch import HOROVODRUN, MPIRUN, TORCHRUN
from tests.world.test_launchers import env

# Task 3 of 5 on three nodes: 2 on the first, 2 on the second, 1 on the third.
SRUN = env("SLURM_JOB_ID=4711 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_NTASKS=5")
SRUN |= env("SLURM_STEP_NUM_TASKS=5 SLURM_STEP_TASKS_PER_NODE=2(x2),1 SLURM_STEP_NODELIST=gpu[07-08],gpu12")
# The shell of a job, whatever was asked for.
SHELL = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


def test_a_task_of_srun():
    launch = detect(SRUN)
    assert launch == Launch("torch", 3, 5, 1, 2, "srun", "gpu07", launch.master_port)
    last = detect(SRUN | {"SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"})
    assert (last.rank, last.local_rank, last.local_size) == (4, 0, 1)
    assert (last.master_addr, last.master_port) == (launch.master_addr, launch.master_port)


def test_the_port_depends_on_job_and_step_and_is_not_one_that_linux_gives_away():
    ports = [
        slurm.task(SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).master_port
        for job in range(900_000, 900_020)
        for step in range(5)
    ]
    assert len(set(ports)) == len(ports)
    assert all(1024 < port < 32768 for port in ports)


def test_master_address_and_port_of_the_user_win():
    launch = detect(SRUN | {"MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "2222"})
    assert (launch.master_addr, launch.master_port) == ("10.1.1.1", 2222)


@pytest.mark.parametrize("step_id", [None, "", "-5", "4294967291", "4294967290", "batch"])
def test_the_shell_of_a_job_is_one_process_however_many_tasks_it_has_asked_for(step_id):
    shell = SHELL if step_id is None else SHELL | {"SLURM_STEP_ID": step_id}
    assert detect(shell) == Launch("single")


def test_tasks_are_counted_by_the_step_not_by_the_job():
    assert detect(SRUN | {"SLURM_NTASKS": "64"}).size == 5
    assert detect({k: v for k, v in SRUN.items() if k != "SLURM_STEP_NUM_TASKS"}).size == 5


@pytest.mark.parametrize("other", [TORCHRUN, MPIRUN, HOROVODRUN])
def test_a_launcher_inside_a_step_wins(other):
    assert detect(SRUN | other) == detect(other)


@pytest.mark.parametrize(
    "name", [n for n in SRUN if n not in ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")]
)
def test_a_missing_variable_is_named(name):
    with pytest.raises(ValueError, match=f"{name} is not set"):
        detect({k: v for k, v in SRUN.items() if k != name})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "5 tasks.*6 tasks on 3 node"),
        ({"SLURM_NODEID": "3"}, "on node 3"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "counts like"),
        ({"SLURM_PROCID": "three"}, "SLURM_PROCID='three' is not a whole number"),
        ({"SLURM_PROCID": "5"}, "rank 5 of 5"),
        ({"SLURM_LOCALID": "2"}, "local rank 2 of 2"),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, "set MASTER_ADDR to the host of task 0"),
        ({"SLURM_STEP_NODELIST": "gpu[07"}, r"node\[01-03,07\]"),
        ({"MASTER_PORT": "70000"}, "between 1 and 65535"),
    ],
)
def test_contradictions_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        detect(SRUN | change)


@pytest.mark.parametrize(
    ("short", "first"),
    [
        ("gpu5", "gpu5"),
        ("node[01-03,07],gpu5", "node01"),
        ("a[098-101]", "a098"),
        ("rack[1-2]node[0-1]-ib", "rack1node0-ib"),
        ("n[3],m-1.cluster.local", "n3"),
        ("m-1.cluster.local,n[3]", "m-1.cluster.local"),
    ],
)
def test_the_first_host_of_a_node_list(short, first):
    assert slurm.first_host(short) == first


@pytest.mark.parametrize("bad", ["", "a[1-2", "a]1[", ",a", "a[-1]", "a[x]", "a[]", "a[1,]", "a b", "a[1[2]]"])
def test_node_lists_that_are_none(bad):
    with pytest.raises(ValueError, match="node list"):
        slurm.first_host(bad)

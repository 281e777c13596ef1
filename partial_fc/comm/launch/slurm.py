"""The launch by SLURM's srun, read from the environment: this task's rank, its neighbours, and rank 0's host.

Variables: https://slurm.schedmd.com/srun.html, OUTPUT ENVIRONMENT VARIABLES.
"""

import re
from collections.abc import Mapping

from partial_fc.comm.launch import Launch, integer

# A job's own shells are steps too, with reserved numbers from here on (slurm.h), possibly printed as signed numbers.
_RESERVED_STEP_IDS = 0xFFFFFFF0
# Below Linux's ports for outgoing connections (32768 and up), above those of services.
_PORTS = range(12000, 32000)


def in_step(environ: Mapping[str, str]) -> bool:
    """Returns whether srun started this process.

    SLURM_PROCID and SLURM_NTASKS are not enough: batch scripts and the shell of salloc also have them, but are one
    process each, in no step or one with a reserved number.
    """
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _RESERVED_STEP_IDS


def task(environ: Mapping[str, str]) -> Launch:
    """Returns the launch by srun; one process of one if srun did not start it, or started it alone.

    MASTER_ADDR and MASTER_PORT take precedence over the step's first host and a port computed from the numbers of job
    and step, which rarely collides between jobs. Raises ValueError if variables are missing or contradictory.
    """
    if not in_step(environ):
        return Launch("single")
    size = _integer(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS")
    if size == 1:
        return Launch("single")
    node = _integer(environ, "SLURM_NODEID")
    rank = _integer(environ, "SLURM_PROCID")
    tasks = tasks_per_node(_text(environ, "SLURM_STEP_TASKS_PER_NODE"))
    if sum(tasks) != size or not 0 <= node < len(tasks):
        raise ValueError(
            f"srun says {size} tasks, this one on node {node}, but SLURM_STEP_TASKS_PER_NODE="
            f"{environ['SLURM_STEP_TASKS_PER_NODE']}: {sum(tasks)} tasks on {len(tasks)} node(s). Are variables of "
            "another step left over? Start with a fresh `srun`"
        )
    address = environ.get("MASTER_ADDR")
    if not address and rank == 0 and node != 0:
        raise ValueError(
            f"srun put task 0 on node {node} of the step, not on its first (--distribution?), so the others would look "
            "for it in the wrong place: set MASTER_ADDR to the host of task 0"
        )
    address = address or first_host(_text(environ, "SLURM_STEP_NODELIST"))
    if environ.get("MASTER_PORT"):
        port = _integer(environ, "MASTER_PORT")
    else:
        number = _integer(environ, "SLURM_JOB_ID") * 101 + _integer(environ, "SLURM_STEP_ID")
        port = _PORTS[number % len(_PORTS)]
    return Launch("torch", rank, size, _integer(environ, "SLURM_LOCALID"), tasks[node], "srun", address, port)


def first_host(node_list: str) -> str:
    """Returns the first host of SLURM's short form: "node[01-02,07],gpu5" -> node01."""
    name = re.match(r"(?:[^,\[\]\s]|\[\d+(?:[-,]\d+)*\])+(?=,|$)", node_list)
    if not name:
        raise ValueError(f"node list {node_list!r}: expected names and brackets like node[01-03,07],gpu5")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", name[0])


def tasks_per_node(text: str) -> list[int]:
    """Expands "2(x3),1" -> 2 2 2 1."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={text!r}: expected counts like 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise ValueError(
            f"started by srun (SLURM_STEP_ID={environ['SLURM_STEP_ID']}), but {name} is not set; start with "
            "`srun --export=ALL`, or unset SLURM_STEP_ID to run one process"
        )
    return environ[name]


def _integer(environ: Mapping[str, str], name: str) -> int:
    return integer(name, _text(environ, name))

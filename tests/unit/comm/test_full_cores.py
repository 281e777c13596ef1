"""Processes that share a machine: what MPI is told where they fill its cores, and memory that is kept."""

import json
import subprocess
import sys

import pytest

from partial_fc.comm.launch import Launch, full_cores

# Two blocks of 64 MB, one after the other, all of whose pages are written to; pages that the kernel had to give.
KEEPS = """
import json, resource
import numpy as np
from partial_fc import memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.empty(2**26, np.uint8).fill(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

memory.keep_freed()
faults()
print(json.dumps(faults()))
"""


@pytest.mark.parametrize(
    ("num_cores", "num_processes", "threads", "yields"),
    [
        (2, 2, "1", True),
        (16, 2, "1", False),
        (16, 2, "8", True),
        (16, 2, "8,2", True),
        (16, 2, None, True),  # they divide the cores
        (2, 1, "1", False),
        (1, 4, None, True),
    ],
)
def test_ranks_that_wait_in_mpi_leave_their_cores_where_all_are_in_use(num_cores, num_processes, threads, yields):
    launch = Launch("horovod", 0, num_processes, 0, num_processes)
    environ = {"OMPI_COMM_WORLD_LOCAL_SIZE": str(num_processes)} | ({"OMP_NUM_THREADS": threads} if threads else {})
    assert full_cores.settings(launch, num_cores, environ) == ({full_cores.YIELD: "1"} if yields else {})
    # The user's own word stays; so do processes that MPI has not started.
    assert full_cores.settings(launch, num_cores, environ | {full_cores.YIELD: "0"}) == {}
    assert full_cores.settings(launch, num_cores, {"OMP_NUM_THREADS": "1"}) == {}


def test_a_large_block_that_is_freed_serves_the_next_one():
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", KEEPS], env=environ, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) < 100  # 16,384 pages of 4 kB otherwise, or 32 of 2 MB

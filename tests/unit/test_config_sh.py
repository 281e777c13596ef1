"""config.sh: what it finds out about the machine, and tells the processes."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORES = len(os.sched_getaffinity(0))
YIELD = "OMPI_MCA_mpi_yield_when_idle"


@pytest.fixture
def config(tmp_path):
    """(environment of the process that config.sh starts, what config.sh itself printed) in a launch's environment."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nenv\n")
    python.chmod(0o755)
    outer = {name: os.environ[name] for name in ("PATH", "HOME")}

    def config(**environ: object) -> tuple[dict[str, str], str]:
        env = {**outer, "PYTHON": str(python), **{name: str(value) for name, value in environ.items()}}
        done = subprocess.run(["bash", ROOT / "config.sh"], env=env, capture_output=True, text=True, check=True)
        return dict(line.partition("=")[::2] for line in done.stdout.splitlines()), done.stderr

    return config


def test_ranks_that_wait_in_mpi_leave_full_cores_to_others_and_one_says_so(config):
    full = {"OMPI_COMM_WORLD_LOCAL_SIZE": CORES, "OMP_NUM_THREADS": 1}
    environ, printed = config(**full, OMPI_COMM_WORLD_LOCAL_RANK=0)
    assert environ[YIELD] == "1"
    assert f"{YIELD}=1" in printed
    environ, printed = config(**full, OMPI_COMM_WORLD_LOCAL_RANK=1)
    assert (environ[YIELD], printed) == ("1", "")
    # Without OMP_NUM_THREADS, too: a single process takes all cores.
    assert config(OMPI_COMM_WORLD_LOCAL_SIZE=1)[0][YIELD] == "1"


@pytest.mark.parametrize(
    "environ",
    [
        {"HOROVOD_LOCAL_SIZE": CORES, "OMP_NUM_THREADS": 1},
        {"OMPI_COMM_WORLD_LOCAL_SIZE": 2, "OMP_NUM_THREADS": 1, YIELD: "0"},
    ],
    ids=["not over MPI", "the user's own word"],
)
def test_otherwise_the_setting_is_left_alone(config, environ):
    started, printed = config(**environ)
    assert started.get(YIELD) == environ.get(YIELD)
    assert printed == ""


def test_with_cores_to_spare_ranks_that_wait_keep_theirs(config):
    if CORES == 1:
        pytest.skip("one core is always full")
    assert YIELD not in config(OMPI_COMM_WORLD_LOCAL_SIZE=1, OMP_NUM_THREADS=CORES - 1)[0]

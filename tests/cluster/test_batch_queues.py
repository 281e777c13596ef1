"""What a real Grid Engine and a real SLURM do with our commands, where Debian's packages are installed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import ROOT, environment

pytestmark = pytest.mark.long
LAUNCH = [sys.executable, "-m", "partial_fc", "launch", "--launcher", "sge"]
SAY = 'echo "$DMLC_ROLE $DMLC_TASK_ID $A $DMLC_PS_ROOT_URI"'
NEEDED = {
    "sge": (
        "apt-get install gridengine-master gridengine-exec gridengine-client",
        ("sge_qmaster", "sge_execd", "qsub"),
    ),
    "slurm": ("apt-get install slurm-wlm", ("slurmctld", "slurmd", "munged", "srun")),
}


@pytest.fixture
def in_queue(tmp_path):
    """Starts a command beside the queue, in tmp_path."""

    def start(queue: str, *command: str) -> subprocess.Popen[str]:
        install, programs = NEEDED[queue]
        path = f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin:/sbin"
        missing = [program for program in (*programs, "unshare", "setpriv") if not shutil.which(program, path=path)]
        if missing or os.geteuid():
            pytest.skip(f"no {', '.join(missing)} here ({install})" if missing else "needs root")
        env = environment() | {"PATH": path, "PYTHONPATH": str(ROOT), "DMLC_INTERFACE": "eth0"}
        script = str(ROOT / "tests/cluster/batch_queue.sh")
        words = ["timeout", "--kill-after=5", "150", "bash", script, queue, *command]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(words, cwd=tmp_path, env=env, text=True, **pipes)  # type: ignore[call-overload]

    return start


def outputs(folder: Path) -> str:
    """What the tasks printed, in the order of their numbers."""
    files = sorted(folder.glob("partial-fc-launch.o*"), key=lambda path: int(path.suffix[1:]))
    return "".join(path.read_text() for path in files)


def test_the_tasks_of_sge(in_queue, tmp_path):
    """Their numbers, their environment, and the PATH of who submits, which qsub itself does not hand on."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "say").write_text(f"#!/bin/sh\n{SAY}\n")
    (tmp_path / "bin" / "say").chmod(0o755)
    given = [*LAUNCH, "-n", "3", "-s", "1", "--env-worker", "A:b c", "say"]
    job = in_queue("sge", "env", f"PATH={tmp_path}/bin:{os.environ['PATH']}:/usr/sbin", *given)
    printed = job.communicate()[0]
    assert job.returncode == 0, printed
    expected = [*(f"worker {n} b c 10.88.0.1" for n in range(3)), "server 0  10.88.0.1"]
    assert outputs(tmp_path).splitlines() == expected, printed


def test_a_task_of_sge_that_fails_ends_the_job_and_names_itself(in_queue, tmp_path):
    script = "[ $DMLC_ROLE$DMLC_TASK_ID = worker1 ] && exit 3; sleep 100"
    job = in_queue("sge", *LAUNCH, "-n", "3", "-s", "1", "sh", "-c", script)
    printed = job.communicate()[0]
    assert job.returncode == 3, printed
    assert "tasks on SGE ended with exit status 3" in printed
    assert "worker 1 on grid ended with exit status 3\n" in outputs(tmp_path)


def test_a_launcher_that_is_ended_leaves_no_task(in_queue, tmp_path):
    """SIGTERM after both run: the queue is empty, and nothing sleeps any more."""
    script = f"""
{subprocess.list2cmdline([*LAUNCH, "-n", "2", "-s", "1"])} sh -c 'touch begun.$DMLC_ROLE$DMLC_TASK_ID; sleep 1000' &
until [ -e begun.worker0 ] && [ -e begun.worker1 ] && [ -e begun.server0 ]; do sleep 0.2; done
kill -TERM $!
wait $!
echo "status $?"
for i in $(seq 50); do [ -n "$(qstat)$(pgrep -x sleep)" ] || break; sleep 0.2; done
echo "left: $(qstat)$(pgrep -x sleep)."
"""
    printed = in_queue("sge", "bash", "-c", script).communicate()[0]
    assert re.search(r"status [1-9]", printed), printed
    assert "left: ." in printed


def test_the_ranks_of_srun(in_queue, tmp_path):
    """Two nodes, of which the first has two tasks; they find each other without a word more."""
    code = (
        "from partial_fc.comm.launch import start; from partial_fc.flags import LaunchFlags; import torch; "
        "world = start.join(LaunchFlags(), 'cpu'); "
        "t = world.all_reduce(torch.tensor([1 + world.rank]), name='sum').item(); "
        "print(f'rank {world.rank} of {world.size}, {world.local_rank} of {world.local_size}: {t}', flush=True)"
    )
    job = in_queue("slurm", "srun", "--nodes=2", "--ntasks=3", "--distribution=block", sys.executable, "-c", code)
    printed = job.communicate()[0]
    assert job.returncode == 0, printed
    expected = ["rank 0 of 3, 0 of 2: 6", "rank 1 of 3, 1 of 2: 6", "rank 2 of 3, 0 of 1: 6"]
    assert sorted(re.findall(r"rank \d of .*", printed)) == expected, printed


def test_slurms_signal_before_the_time_is_up(in_queue, tmp_path):
    """scancel's, which --signal=USR1@N sends by itself, reaches the ranks: they write a checkpoint and end with 75."""
    flags = (
        "--backbone tiny --dataset synthetic --num-classes 20 --image-size 32 --batch-size 2 --max-steps 100000 "
        f"--lr-scheduler constant --frequent 1 --models-root {tmp_path}/run"
    )
    batch = tmp_path / "batch"
    batch.write_text(
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --output=out\n"
        f'srun {sys.executable} {ROOT}/train.py face {flags}\necho "srun ended with $?"\n'
    )
    script = """
sbatch batch
until grep -q "step 1/" out; do sleep 0.3; done
scancel --signal=USR1 1
until grep -q "srun ended" out; do sleep 0.3; done
"""
    in_queue("slurm", "bash", "-c", script).communicate()
    printed = (tmp_path / "out").read_text()
    assert "srun ended with 75" in printed, printed
    assert "the same command resumes from" in printed
    assert list((tmp_path / "run/checkpoints").glob("step-*/COMPLETE"))

"""The environments in which launchers, queues and clouds start a command: the world that is right there.

Each row has the variables that its program sets, as its source or manual names them; the launch is read from them.
"""

import json
import re
import socket
import subprocess
from pathlib import Path

import pytest

from partial_fc.comm import Launch, StartError, detect, unused
from partial_fc.comm.launch import ONE_A_HOST, meet_ranks, start
from partial_fc.comm.launch import detect as launchers
from partial_fc.flags import LaunchFlags
from partial_fc.verbs.train import without_local_rank
from tests.waiting import free_port
from tests.world.rows import Row, table


def env(words: str) -> dict[str, str]:
    """Returns the variables that a shell would set by these words."""
    return dict(word.split("=", 1) for word in words.split())


MASTER = env("MASTER_ADDR=host-0 MASTER_PORT=29500")


def numbered(prefix: str, rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    names = (f"{prefix}{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    return dict(zip(names, map(str, (rank, size, local_rank, local_size)), strict=True))


def torchrun(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    said = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    group = {"GROUP_RANK": rank // local_size, "GROUP_WORLD_SIZE": size // local_size}
    elastic = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": 0}
    return {name: str(value) for name, value in (said | group | elastic).items()} | MASTER


def srun(rank: int, tasks: str, node: int, local: int, size: int) -> dict[str, str]:
    said = {"SLURM_JOB_ID": 7, "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": size, "SLURM_STEP_TASKS_PER_NODE": tasks}
    said |= {"SLURM_STEP_NODELIST": "gpu[1-2]", "SLURM_PROCID": rank, "SLURM_LOCALID": local, "SLURM_NODEID": node}
    return {name: str(value) for name, value in (said | {"SLURM_NTASKS": size}).items()}


def kubernetes(rank: int, size: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), **MASTER, "PYTHONUNBUFFERED": "1"}


def pet(nodes: str = "2", processes: str = "1") -> dict[str, str]:
    said = {"PET_NNODES": nodes, "PET_NPROC_PER_NODE": processes, "PET_NODE_RANK": "1"}
    return said | env("PET_MASTER_ADDR=host-0 PET_MASTER_PORT=29500")


def cluster(**tasks: int) -> str:
    named = {name: [f"{name}-{number}:2222" for number in range(count)] for name, count in tasks.items()}
    return json.dumps({"cluster": named, "task": {"type": next(iter(tasks)), "index": 0}})


OMPI = numbered("OMPI_COMM_WORLD_", 1, 2, 0, 1) | env("PMIX_RANK=1 PMIX_NAMESPACE=4711")
BATCH = env("SLURM_JOB_ID=7 ENVIRONMENT=BATCH SLURM_PROCID=0 SLURM_TASK_PID=99")
RAY = MASTER | env("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 NODE_RANK=0")
AZURE = env("AZUREML_NODE_COUNT=2 AZ_BATCH_MASTER_NODE=10.0.0.4:6000")
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "1"}
SKY = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
SHELL = env("SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_JOB_NUM_NODES=2")
DEEPSPEED = env("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_SIZE=2 CROSS_RANK=1 CROSS_SIZE=2")


SRUN = srun(3, "2(x2)", 1, 1, 4)

# Backend, rank of all, rank of the host's, and who started the process.
ALONE = "single 0/1 0/1 "
BY_TORCHRUN = "torch 3/4 1/2 torchrun"
POD = f"torch 1/2 0/1 {ONE_A_HOST}"


@table(
    [
        # ---- taken
        Row("torchrun, one host", "torch.distributed.elastic", torchrun(1, 2, 1, 2), "torch 1/2 1/2 torchrun"),
        Row("torchrun, two hosts", "the same", torchrun(3, 4, 1, 2), BY_TORCHRUN),
        Row(
            "accelerate launch",
            "its launch.py",
            torchrun(1, 2, 1, 2) | env("ACCELERATE_MIXED_PRECISION=no"),
            "torch 1/2 1/2 torchrun",
        ),
        Row("accelerate of 1", "its launch.py", env("ACCELERATE_MIXED_PRECISION=no ACCELERATE_USE_CPU=False"), ALONE),
        Row("deepspeed", "deepspeed/launcher/launch.py", DEEPSPEED | MASTER, "torch 3/4 1/2 deepspeed"),
        Row(
            "horovodrun --gloo",
            "horovod/runner/gloo_run.py",
            numbered("HOROVOD_", 3, 4, 1, 2) | env("HOROVOD_CONTROLLER=gloo HOROVOD_CROSS_SIZE=2"),
            "horovod 3/4 1/2 horovodrun",
        ),
        Row("horovodrun --mpi, mpirun", "Open MPI FAQ", OMPI, "horovod 1/2 0/1 mpirun (Open MPI)"),
        Row(
            "Intel MPI, MPICH",
            "hydra: pmi_proxy",
            env("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2"),
            "horovod 1/2 1/2 mpirun (MPICH, Intel MPI)",
        ),
        Row(
            "PALS",
            "Cray mpiexec(1)",
            env("PMI_RANK=3 PMI_SIZE=4 PALS_RANKID=3 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=2"),
            "horovod 3/4 1/2 mpiexec (PALS)",
        ),
        Row("mpirun -npernode 1 torchrun", "Azure ML, LSF: tutorials", OMPI | torchrun(3, 4, 1, 2), BY_TORCHRUN),
        Row("srun torchrun", "tutorials", srun(1, "1(x2)", 1, 0, 2) | torchrun(3, 4, 1, 2), BY_TORCHRUN),
        Row("srun", "srun(1)", SRUN, "torch 3/4 1/2 srun"),
        Row("srun, WORLD_SIZE exported before", "tutorials", SRUN | MASTER | env("WORLD_SIZE=4"), "torch 3/4 1/2 srun"),
        Row(
            "srun, RANK and LOCAL_RANK exported by a wrapper",
            "tutorials",
            SRUN | MASTER | env("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1"),
            "torch 3/4 1/2 srun",
        ),
        Row("srun --mpi=pmi2", "slurm mpi_pmi2", SRUN | env("PMI_RANK=3 PMI_SIZE=4"), "torch 3/4 1/2 srun"),
        Row(
            "srun -n 1",
            "srun(1)",
            srun(0, "1", 0, 0, 1) | env("PMI_RANK=0 PMI_SIZE=1 ENVIRONMENT=BATCH SLURM_JOB_NUM_NODES=2"),
            ALONE,
        ),
        Row("jsrun with MASTER_*", "jsrun(1)", numbered("JSM_NAMESPACE_", 3, 4, 1, 2) | MASTER, "torch 3/4 1/2 jsrun"),
        Row(
            "MVAPICH with MASTER_*",
            "mvapich2 mpispawn.c",
            numbered("MV2_COMM_WORLD_", 3, 4, 1, 2) | MASTER,
            "torch 3/4 1/2 mpirun_rsh (MVAPICH)",
        ),
        Row("Kubeflow v1, PyTorchJob", "training-operator envvar.go; kubeflow/trainer 1790", kubernetes(1, 2), POD),
        Row("Kubeflow v1.8, which adds PET_*", "the same, later", kubernetes(1, 2) | pet("2", "auto"), POD),
        Row("Volcano", "volcano pytorch.go", kubernetes(1, 3) | env("VC_TASK_INDEX=0"), f"torch 1/3 0/1 {ONE_A_HOST}"),
        Row(
            "Vertex AI",
            "Lightning 13374",
            kubernetes(1, 2) | {"CLUSTER_SPEC": cluster(workerpool0=1, workerpool1=1)},
            POD,
        ),
        Row("Alibaba PAI", "PAI DLC's manual", kubernetes(1, 2) | env("NPROC_PER_NODE=8"), POD),
        Row("PyTorchJob of one", "training-operator envvar.go", kubernetes(0, 1), f"torch 0/1 0/1 {ONE_A_HOST}"),
        Row("Ray Train", "ray/train/torch/config.py", RAY, "torch 1/2 1/2 torchrun"),
        Row(
            "Azure ML, PyTorch",
            "learn.microsoft.com",
            AZURE | MASTER | env("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 NODE_RANK=1"),
            BY_TORCHRUN,
        ),
        Row("Azure ML, MPI", "the same", AZURE | OMPI, "horovod 1/2 0/1 mpirun (Open MPI)"),
        Row("SageMaker with mpirun", "its toolkit", SAGEMAKER | OMPI, "horovod 1/2 0/1 mpirun (Open MPI)"),
        Row("SageMaker with torchrun", "its toolkit", SAGEMAKER | torchrun(1, 2, 0, 1), "torch 1/2 0/1 torchrun"),
        Row("SageMaker, one host", "sagemaker-training-toolkit params.py", {"SM_HOSTS": '["algo-1"]'}, ALONE),
        Row("shell of salloc", "salloc(1)", SHELL, ALONE),
        Row(
            "shell of salloc in a step of its own",
            "slurm.conf(5)",
            SHELL | env("SLURM_STEP_ID=4294967290 SLURM_PROCID=0 SLURM_PTY_PORT=34889 PMI_RANK=0 PMI_SIZE=1"),
            ALONE,
        ),
        Row("sbatch of one task", "sbatch(1)", BATCH | env("SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1"), ALONE),
        Row(
            "bsub on one host",
            "bsub(1)",
            {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "host1 16", "LSB_HOSTS": "host1 host1"},
            ALONE,
        ),
        Row(
            "shell of bsub -Is",
            "bsub(1)",
            {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "host1 4 host2 4", "LSB_INTERACTIVE": "Y"},
            ALONE,
        ),
        Row("qsub, no file of hosts", "qsub(1)", env("PBS_JOBID=7 PBS_NODEFILE=/var/spool/pbs/aux/nowhere"), ALONE),
        Row("Ray of 1", "ray", torchrun(0, 1, 0, 1), "torch 0/1 0/1 torchrun"),
        Row(
            "Colab, Kaggle",
            "printenv there",
            env("COLAB_GPU=1 KAGGLE_KERNEL_RUN_TYPE=Interactive MPLBACKEND=module://x CUDA_VISIBLE_DEVICES="),
            ALONE,
        ),
        Row("WORLD_SIZE=1 RANK=0 alone", "notebooks", env("RANK=0 WORLD_SIZE=1"), ALONE),
        Row("empty strings", "Helm", env("RANK= WORLD_SIZE= PET_NNODES= SM_HOSTS= OMPI_COMM_WORLD_SIZE="), ALONE),
        Row("TF_CONFIG of one", "tf-operator", {"TF_CONFIG": cluster(worker=1, ps=2)}, ALONE),
    ]
)
def test_a_world_is_taken(row):
    launch = detect(row.given)
    ranks = f"{launch.rank}/{launch.size} {launch.local_rank}/{launch.local_size}"
    assert f"{launch.backend} {ranks} {launch.launcher}" == row.right
    if launch.backend == "torch" and launch.launcher != "srun":
        assert (launch.master_addr, launch.master_port) == ("host-0", 29500)
    assert unused(launch, 1, row.given) == []


@table(
    [
        Row("Kubeflow v2 without torchrun", "kubeflow/trainer torch.go", pet(), "PET_NNODES"),
        Row("Kubeflow, elastic", "training-operator elastic.go", pet("1:4"), "PET_NNODES"),
        Row(
            "Kubeflow v1.8, for torchrun", "training-operator envvar.go", kubernetes(1, 4) | pet("2", "2"), "LOCAL_RANK"
        ),
        Row("jsrun", "IBM jsrun(1)", numbered("JSM_NAMESPACE_", 1, 2, 0, 1), "MASTER_ADDR"),
        Row("MVAPICH", "mvapich2 mpispawn.c", numbered("MV2_COMM_WORLD_", 1, 2, 0, 1), "MASTER_ADDR"),
        Row(
            "flux run",
            "flux-core src/shell",
            env("FLUX_TASK_RANK=1 FLUX_JOB_SIZE=2 FLUX_TASK_LOCAL_ID=1 FLUX_JOB_NNODES=1"),
            "LOCAL_WORLD_SIZE",
        ),
        Row("PMI without local ranks", "MPICH's simple PMI", env("PMI_RANK=1 PMI_SIZE=2"), "MPI_LOCALRANKID"),
        Row("SageMaker without a distribution", "sagemaker-training-toolkit params.py", SAGEMAKER, "SM_HOSTS"),
        Row(
            "Vertex AI, own container",
            "its manual",
            {"CLUSTER_SPEC": cluster(workerpool0=1, workerpool1=3)},
            "CLUSTER_SPEC",
        ),
        Row("TFJob", "training-operator tensorflow.go", {"TF_CONFIG": cluster(chief=1, worker=2, ps=1)}, "TF_CONFIG"),
        Row("WORLD_SIZE in a batch script", "tutorials", BATCH | MASTER | env("WORLD_SIZE=4"), "srun"),
        Row(
            "WORLD_SIZE exported, other than srun's",
            "tutorials",
            srun(1, "1(x2)", 1, 0, 2) | MASTER | env("WORLD_SIZE=16"),
            "WORLD_SIZE=16",
        ),
        Row("RANK without a master", "half of what an operator sets", env("RANK=1 WORLD_SIZE=2"), "MASTER_ADDR"),
        Row("LOCAL_RANK by hand", "old scripts", kubernetes(1, 2) | env("LOCAL_RANK=1"), "LOCAL_WORLD_SIZE"),
        Row("HOROVOD_RANK alone", "left over", env("HOROVOD_RANK=1"), "HOROVOD_SIZE"),
    ]
)
def test_a_size_that_nobody_uses_is_refused(row):
    with pytest.raises(ValueError, match=row.right) as error:
        unused(detect(row.given), 1, row.given)
    assert "unset" in str(error.value)


@table(
    [
        Row("sbatch without srun", "sbatch(1)", BATCH | env("SLURM_NTASKS=4 SLURM_JOB_NUM_NODES=1"), ["SLURM_NTASKS"]),
        Row("sbatch -N 2 without srun", "sbatch(1)", BATCH | env("SLURM_JOB_NUM_NODES=2"), ["SLURM_JOB_NUM_NODES"]),
        Row("bsub of two", "bsub(1)", {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "host1 4 host2 4"}, ["LSB_MCPU_HOSTS"]),
        Row("Grid Engine", "qsub -pe; sge_pe(5)", env("JOB_ID=7 NHOSTS=2 NSLOTS=8"), ["NHOSTS"]),
        Row("SkyPilot", "docs.skypilot.co, distributed jobs", SKY, ["SKYPILOT_NUM_NODES"]),
        Row("dstack", "dstack.ai", env("DSTACK_NODES_NUM=2 DSTACK_NODE_RANK=0"), ["DSTACK_NODES_NUM"]),
        Row("LeaderWorkerSet", "kubernetes-sigs/lws", env("LWS_GROUP_SIZE=2 LWS_WORKER_INDEX=0"), ["LWS_GROUP_SIZE"]),
        Row("Azure ML without a distribution", "learn.microsoft.com", AZURE, ["AZUREML_NODE_COUNT"]),
        Row("Kubeflow, processes of one host", "kubeflow/trainer torch.go", pet("1", "4"), ["PET_NPROC_PER_NODE"]),
        Row("a torchrun for each mpirun", "torchrun's default", OMPI | torchrun(0, 2, 0, 2), ["OMPI_COMM_WORLD_SIZE"]),
        Row(
            "a torchrun for each srun",
            "same",
            srun(1, "1(x2)", 1, 0, 2) | torchrun(0, 8, 0, 8),
            ["SLURM_STEP_NUM_TASKS"],
        ),
        Row("torchrun --nnodes=1 in Kubeflow", "the same", pet() | torchrun(0, 2, 0, 2), ["PET_NNODES"]),
    ]
)
def test_a_size_that_nobody_uses_is_told(row):
    lines = unused(detect(row.given), 1, row.given)
    assert [line.split()[1] for line in lines] == row.right


def test_hosts_of_pbs_are_counted_in_their_file(tmp_path):
    """qsub(1): a line for each process."""
    nodes = tmp_path / "7.pbs"
    given = {"PBS_NODEFILE": str(nodes)}
    nodes.write_text("host1\nhost1\n")
    assert unused(detect(given), 1, given) == []
    nodes.write_text("host1\nhost1\nhost2\n")
    assert "says 2" in unused(detect(given), 1, given)[0]
    assert unused(detect(given), 1, given | env("PBS_ENVIRONMENT=PBS_INTERACTIVE")) == []


def test_flags_use_the_hosts(monkeypatch, capsys):
    """--nodes, as in a Kubeflow pod without torchrun; --gpus of one in a batch job."""
    for name, value in (pet() | env("SLURM_NTASKS=4 ENVIRONMENT=BATCH SLURM_JOB_ID=7")).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(start, "spawn_here", lambda *_: 5)
    with pytest.raises(ValueError, match="PET_NNODES"):
        start.start(LaunchFlags(gpus=2))
    assert start.start(LaunchFlags(nodes=2, master_addr="host-0")) == 5
    monkeypatch.delenv("PET_NNODES")
    assert start.start(LaunchFlags(gpus=4)) == 5
    assert capsys.readouterr().err == ""
    assert start.start(LaunchFlags()) is None
    assert "SLURM_NTASKS" in capsys.readouterr().err


def test_gpus_in_a_pod_are_those_of_its_host(monkeypatch):
    """Kubeflow, PAI: RANK is the pod's; --gpus starts processes in each."""
    for name, value in kubernetes(1, 2).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(start, "spawn_here", lambda *what: what)
    assert start.start(LaunchFlags(gpus=4)) == (LaunchFlags(gpus=4), 2, 1, "host-0", 29500)


@table(
    [
        Row(
            "torch.distributed.launch",
            "insightface 1699, timm 1724",
            ["--local-rank=1", "face", "--rec", "x"],
            ["face", "--rec", "x"],
        ),
        Row("deepspeed", "Megatron-DeepSpeed 178", ["--local_rank=1", "face", "--rec", "x"], ["face", "--rec", "x"]),
        Row(
            "after the recipe",
            "old launch scripts",
            ["face", "--rec", "x", "--local_rank", "1", "--lr", "-1"],
            ["face", "--rec", "x", "--lr", "-1"],
        ),
        Row("a default of many scripts", "timm train.py", ["face", "--local_rank=-1"], ["face"]),
    ]
)
def test_local_rank_of_the_command_line(row, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert without_local_rank(row.given, "train.py") == row.right


def test_a_local_rank_that_the_launcher_contradicts_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit, match="2"):
        without_local_rank(["--local-rank=1", "face"], "train.py")
    assert "LOCAL_RANK=0" in capsys.readouterr().err
    monkeypatch.setenv("PARTIAL_FC_PARENT", "1")  # a process of --gpus has its parent's command line
    assert without_local_rank(["--local-rank=1", "face"], "train.py") == ["face"]


def test_a_dead_torchrun_is_named_at_once(monkeypatch):
    """Variables of torchrun in a shell that it started, or exported by hand."""
    for name, value in (torchrun(0, 2, 0, 2) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StartError, match=r"unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"):
        meet_ranks.meet(detect(), 60)


@table(
    [
        Row("srun -n 4 --pty bash", "srun(1): the other tasks end", env("SLURM_PTY_PORT=34889"), r"srun --pty"),
        Row("tasks that ended", "an import that fails", {}, r"why they ended"),
    ]
)
def test_what_srun_has_left_is_named_with_the_first_line_of_waiting(row, monkeypatch, capsys):
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in (srun(0, "4", 0, 0, 4) | port | row.given).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(meet_ranks, "_LINGER_S", 0)
    monkeypatch.setattr(meet_ranks, "_SOON_S" if row.given else "_NOTICE_S", 0.1)
    said = rf"{row.right}.*unset SLURM_STEP_ID"
    with pytest.raises(StartError, match=said) as error:
        meet_ranks.meet(detect(), 0.3)
    assert "--nr" not in str(error.value)
    waits = capsys.readouterr().err
    assert re.search(rf"waits at 127\.0\.0\.1:\d+ for rank 1, rank 2, rank 3\. .*{said}", waits)


def test_a_master_of_several_hosts_that_is_called_localhost_listens_for_them():
    """kubeflow/pytorch-operator gives MASTER_ADDR=localhost to the master."""
    several = Launch("torch", 0, 2, 0, 1, ONE_A_HOST, "localhost", free_port())
    with meet_ranks._listen(several) as listening:
        assert listening.getsockname()[0] in ("::", "0.0.0.0")
    with meet_ranks._listen(Launch("torch", 0, 2, 0, 2, "torchrun", "localhost", free_port())) as listening:
        assert listening.getsockname()[0] in ("127.0.0.1", "::1")


def test_a_launcher_that_listens_is_no_error():
    with socket.create_server(("127.0.0.1", 0)) as server:
        launchers.expect(Launch("single"), "store", "127.0.0.1", server.getsockname()[1])


def test_configuration_of_a_process_takes_the_inner_launcher(tmp_path):
    """config.sh under `mpirun -npernode 1 torchrun`: the cores are torchrun's processes'."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "threads $OMP_NUM_THREADS"\n')
    python.chmod(0o755)
    environ = OMPI | torchrun(0, 2, 0, 2) | {"PATH": "/usr/bin:/bin", "PYTHON": str(python), "REC": "x"}
    environ["OMPI_COMM_WORLD_LOCAL_SIZE"], environ["LOCAL_WORLD_SIZE"] = "1", "4000"
    done = subprocess.run(
        ["bash", "config.sh"], env=environ, cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert done.stdout == "threads 1\n", done.stderr

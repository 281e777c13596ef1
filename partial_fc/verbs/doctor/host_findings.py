"""Findings from the hosts' own facts (probe.facts): ok, warning or fault, with the remedy."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from partial_fc.comm.launch.hosts import Host

Status = Literal["ok", "warning", "fault"]
_GIB = 1 << 30


@dataclass(frozen=True)
class HostFinding:
    """The result of one check on one host."""

    status: Status
    host: str
    subject: str
    observed: str
    remedy: str = ""

    def __str__(self) -> str:
        more = f"\n{'':10}{self.remedy}" if self.remedy else ""
        return f"{self.status:10}{self.host}: {self.subject}: {self.observed}{more}"

    @classmethod
    def judge(cls, good: bool, host: str, subject: str, observed: str, remedy: str) -> "HostFinding":
        """Returns ok if the fact is good, else a warning with the remedy."""
        return cls("ok", host, subject, observed) if good else cls("warning", host, subject, observed, remedy)


def host_findings(host: Host, facts: dict[str, Any], num_hosts: int) -> Iterator[HostFinding]:
    """Yields the findings from one host's facts for a run on num_hosts."""
    yield _horovod(host.name, facts)
    remedy = "run.sh and horovodrun --mpi need it; horovodrun --gloo does not"
    yield HostFinding.judge(bool(facts["mpirun"]), host.name, "MPI", facts["mpirun"] or "no mpirun", remedy)
    yield _gpus(host.name, facts, host.slots)
    yield from _machine(host.name, facts, host.slots)
    if num_hosts > 1:
        yield _name(host.name, facts["name"], facts["own_address"])


def _horovod(host: str, facts: dict[str, Any]) -> HostFinding:
    horovod, version = facts["horovod"], facts["packages"]["horovod"]
    if "error" in horovod:
        status: Status = "warning" if horovod["error"] == "not installed" else "fault"
        remedy = "run `make setup` (docs/launching.md); torchrun, srun and --gpus work without it"
        return HostFinding(status, host, "Horovod", f"{version} {horovod['error']}".strip(), remedy)
    built = horovod["built"]
    observed = f"{version} for {' and '.join(horovod['frameworks'])}, built with {' and '.join(built) or 'nothing'}"
    if not {"gloo", "mpi"} & set(built):
        remedy = "build it again with MPI or Gloo: remove .venv and run `make setup`"
        return HostFinding("fault", host, "Horovod", observed, remedy)
    if facts["gpus"] and "nccl" not in built:
        remedy = "gradients would be copied through host memory: HOROVOD_GPU_OPERATIONS=NCCL make setup"
        return HostFinding("warning", host, "Horovod", observed, remedy)
    return HostFinding("ok", host, "Horovod", observed)


def _gpus(host: str, facts: dict[str, Any], slots: int) -> HostFinding:
    torch, gpus, version = facts["torch"], facts["gpus"], facts["packages"]["torch"]
    if "error" in torch:
        return HostFinding("fault", host, "torch", torch["error"], "run `make setup` there")
    if gpus and not torch["gpus"]:
        observed = f"{version} finds none of the {len(gpus)} GPU(s) that nvidia-smi lists"
        remedy = "install torch for CUDA (TORCH_INDEX_URL, `make setup`); see CUDA_VISIBLE_DEVICES"
        return HostFinding("fault", host, "GPUs", observed, remedy)
    if not torch["gpus"]:
        return HostFinding("ok", host, "GPUs", f"none; torch {version} computes on {facts['cores']} core(s)")
    observed = f"{torch['gpus']}, torch {version}, CUDA {torch['cuda']}, NCCL {torch['nccl']}"
    if slots > torch["gpus"]:
        remedy = "give the host as many slots as it has GPUs"
        return HostFinding("fault", host, "GPUs", f"{observed}; {slots} processes", remedy)
    return HostFinding("ok", host, "GPUs", observed)


def _machine(host: str, facts: dict[str, Any], slots: int) -> Iterator[HostFinding]:
    if not facts["gpus"] and slots > facts["cores"]:
        remedy = "each process needs a core: give fewer slots"
        yield HostFinding("warning", host, "cores", f"{facts['cores']} for {slots} processes", remedy)
    memory, shm = facts["memory_bytes"], facts["shm_bytes"]
    remedy = "a process with its libraries needs about 1 GiB; `partial-fc plan` computes the memory of a head"
    yield HostFinding.judge(memory >= 4 * _GIB, host, "memory", _free(memory), remedy)
    remedy = "NCCL and Gloo use it: mount -o remount,size=8G /dev/shm, docker run --shm-size=8g"
    yield HostFinding.judge(shm >= _GIB, host, "/dev/shm", _free(shm), remedy)
    disk = facts["disk"]
    observed = f"{disk['path']}, {_free(disk['free_bytes'])}"
    if disk["writable"]:
        remedy = "checkpoints hold centres and their optimizer state, --keep-checkpoints times"
        yield HostFinding.judge(disk["free_bytes"] >= 10 * _GIB, host, "models root", observed, remedy)
    else:
        yield HostFinding("fault", host, "models root", f"{observed}, not writable", "give another --models-root")
    soft, hard = facts["open_files"]
    observed = f"at most {soft}" if soft >= 0 else "no limit"
    remedy = f"each process keeps a connection to many others: ulimit -n {hard if hard > 0 else 65536}"
    yield HostFinding.judge(not 0 <= soft < 4096, host, "open files", observed, remedy)


def _free(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB free"


def _name(host: str, name: str, address: str) -> HostFinding:
    if address and not address.startswith("127."):
        return HostFinding("ok", host, "name", f"{name} is {address}")
    observed = f"its own name, {name}, is {f'the address {address}' if address else 'not known'} to itself"
    remedy = f"Gloo would listen there: give {name} its real address in /etc/hosts"
    return HostFinding("fault", host, "name", observed, remedy)


def common_findings(answers: list[tuple[Host, dict[str, Any]]]) -> Iterator[HostFinding]:
    """Compares facts that must be equal on all hosts with the first host's."""
    if len(answers) < 2:
        return
    first, first_facts = answers[0]
    for subject, remedy, value in (
        ("checkout", "copy it, or pull the same commit", lambda f: f["checkout"] or "not there"),
        ("python", "run `make setup` there", lambda f: f["python"]),
        ("packages", "run `make setup` there: constraints.txt has the versions", _packages),
        ("MPI", "install the same Open MPI", lambda f: f["mpirun"]),
        ("GPUs", "all ranks compute on the same kind of device", lambda f: "some" if f["gpus"] else "none"),
    ):
        expected = value(first_facts)
        others = [(host, value(facts)) for host, facts in answers[1:] if value(facts) != expected]
        for host, theirs in others:
            yield HostFinding("fault", host.name, subject, f"{_differing(theirs, expected)} as on {first.name}", remedy)
        if not others and subject in ("checkout", "packages"):
            yield HostFinding("ok", "all", subject, f"the same on {len(answers)} hosts: {expected}")


def _packages(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in facts["packages"].items() if version)


def _differing(theirs: str, ours: str) -> str:
    """Returns what is in one of two lists only."""
    left, right = theirs.split(", "), ours.split(", ")
    only = [[word for word in one if word not in other] for one, other in ((left, right), (right, left))]
    return f"{', '.join(only[0]) or 'nothing'}, not {', '.join(only[1]) or 'nothing'}"

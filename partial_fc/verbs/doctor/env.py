"""`partial-fc doctor env`: checks that this machine, and the hosts of a run, can train together."""

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from partial_fc.comm.launch.hosts import ROOT, Host, HostError, parse
from partial_fc.flags.facts import PORT, In
from partial_fc.verbs.doctor.probe import MARK

Status = Literal["ok", "warning", "fault"]
_Found = tuple[Status, str, str, str]  # status, subject, observed, remedy
_GIB = 1 << 30
_PROBE_S = 120.0  # loading the libraries, from a slow network folder

# ssh's message -> remedy (docs/launching.md)
_SSH = {
    "Permission denied": "let this user log in without a password: ssh-copy-id {host} (keys that others may read are "
    "ignored: chmod 400 ~/.ssh/id_rsa; docs/launching.md has more)",
    "Host key verification failed": "make the host known: ssh-keyscan {host} >> ~/.ssh/known_hosts",
    "Could not resolve": "write its address instead, or put its name into /etc/hosts",
    "Connection refused": "start sshd there, or give --ssh-port",
    "No such file": "install an ssh client",
}
_SSH_ELSE = "see whether it is on, its address right, and no firewall between; `ssh {host} hostname` must answer"


@dataclass(frozen=True)
class EnvOptions:
    """Looks at Horovod, MPI, NCCL, ssh, versions, memory, disk and names of this machine, or of all hosts of a run.
    Exit status 0: no faults; 1: faults; 2: invalid hosts."""

    hosts: Annotated[str | None, tyro.conf.arg(aliases=["-H"])] = None
    """Hosts as for horovodrun, a:8,b:8, or a host file; by default this machine."""
    models_root: Path = Path("runs")
    """The output folder of the run."""
    ssh_port: Annotated[int | None, In(PORT)] = None
    """The port of sshd, if it is not 22."""
    ssh_timeout: Annotated[float, In("(0, 86400]")] = 10.0
    """Seconds in which a host must answer."""


@dataclass(frozen=True)
class HostFinding:
    """The result of one check on one host. remedy: for a status that is not ok."""

    status: Status
    host: str
    subject: str
    observed: str
    remedy: str = ""

    def __str__(self) -> str:
        more = f"\n{'':10}{self.remedy}" if self.status != "ok" and self.remedy else ""
        return f"{self.status:10}{self.host}: {self.subject}: {self.observed}{more}"


def doctor_env(options: EnvOptions) -> int:
    """Prints a line per check and returns the exit status."""
    try:
        hosts = parse(options.hosts, options.ssh_port) if options.hosts else [Host("localhost")]
    except (ValueError, OSError) as error:
        print(f"partial-fc doctor env: {error}", file=sys.stderr)
        return 2
    counts = {"fault": 0, "warning": 0, "ok": 0}
    for finding in _all_findings(hosts, options):
        counts[finding.status] += 1
        print(finding, flush=True)
    print(f"\n{counts['fault']} fault(s), {counts['warning']} warning(s) on {len(hosts)} host(s)")
    return int(counts["fault"] > 0)


def _all_findings(hosts: list[Host], options: EnvOptions) -> Iterator[HostFinding]:
    answers = []
    with ThreadPoolExecutor(min(32, len(hosts))) as pool:
        for host, (finding, facts) in zip(hosts, pool.map(lambda host: _ask(host, options), hosts), strict=True):
            if finding:
                yield finding
            if facts:
                answers.append((host, facts))
    for host, facts in answers:
        yield from host_findings(host, facts, len(hosts))
    yield from common_findings(answers)


def _ask(host: Host, options: EnvOptions) -> tuple[HostFinding | None, dict[str, Any]]:
    """Returns a finding about ssh or Python, and the host's facts (probe.facts), {} if it does not answer."""
    finding = None
    if not host.is_here:
        try:
            host.check_ssh(options.ssh_timeout)
        except HostError as error:
            remedy = next((remedy for words, remedy in _SSH.items() if words in str(error)), _SSH_ELSE)
            return HostFinding("fault", host.name, "ssh", str(error), remedy.format(host=host.name)), {}
        finding = HostFinding("ok", host.name, "ssh", "works without a password")
    given = json.dumps({"checkout": str(ROOT), "models_root": str(options.models_root.absolute())})
    try:
        return finding, host.run_module("partial_fc.verbs.doctor.probe", [], MARK, _PROBE_S, given)
    except HostError as error:
        remedy = f"this checkout must also be at {ROOT} there, set up by `make setup`"
        return HostFinding("fault", host.name, "python", f"{sys.executable}: {error}", remedy), {}


def host_findings(host: Host, facts: dict[str, Any], num_hosts: int) -> Iterator[HostFinding]:
    """Yields the findings from one host's facts for a run on num_hosts."""
    for status, subject, observed, remedy in (
        _horovod(facts),
        _gpus(facts, host.slots),
        *_machine(facts),
        *([_name(facts["name"], facts["own_address"])] if num_hosts > 1 else []),
    ):
        yield HostFinding(status, host.name, subject, observed, remedy)


def _horovod(facts: dict[str, Any]) -> _Found:
    horovod, version = facts["horovod"], facts["packages"]["horovod"]
    if "error" in horovod:
        status: Status = "warning" if horovod["error"] == "not installed" else "fault"
        remedy = "run `make setup` (docs/launching.md); torchrun, srun and --gpus work without it"
        return status, "Horovod", f"{version} {horovod['error']}".strip(), remedy
    built = horovod["built"]
    observed = f"{version} for {' and '.join(horovod['frameworks'])}, built with {' and '.join(built) or 'nothing'}"
    if not {"gloo", "mpi"} & set(built):
        return "fault", "Horovod", observed, "build it again with MPI or Gloo: remove .venv and run `make setup`"
    remedy = "gradients would be copied through host memory: HOROVOD_GPU_OPERATIONS=NCCL make setup"
    return "warning" if facts["gpus"] and "nccl" not in built else "ok", "Horovod", observed, remedy


def _gpus(facts: dict[str, Any], slots: int) -> _Found:
    torch, gpus, version = facts["torch"], facts["gpus"], facts["packages"]["torch"]
    if "error" in torch:
        return "fault", "torch", torch["error"], "run `make setup` there"
    if gpus and not torch["gpus"]:
        observed = f"{version} finds none of the {len(gpus)} GPU(s) that nvidia-smi lists"
        remedy = "install torch for CUDA (TORCH_INDEX_URL, `make setup`); see CUDA_VISIBLE_DEVICES"
        return "fault", "GPUs", observed, remedy
    if not torch["gpus"]:
        observed = f"none; torch {version} computes on {facts['cores']} core(s), for {slots} process(es)"
        return "warning" if slots > facts["cores"] else "ok", "GPUs", observed, "each process needs a core"
    observed = f"{torch['gpus']}, torch {version}, CUDA {torch['cuda']}, NCCL {torch['nccl']}; {slots} process(es)"
    remedy = "give the host as many slots as it has GPUs"
    return "fault" if slots > torch["gpus"] else "ok", "GPUs", observed, remedy


def _machine(facts: dict[str, Any]) -> Iterator[_Found]:
    remedy = "run.sh and horovodrun --mpi need it; horovodrun --gloo does not"
    yield "ok" if facts["mpirun"] else "warning", "MPI", facts["mpirun"] or "no mpirun", remedy
    memory, shm, disk = facts["memory_bytes"], facts["shm_bytes"], facts["disk"]
    remedy = "a process with its libraries needs about 1 GiB; `partial-fc plan` computes the memory of a head"
    yield "ok" if memory >= 4 * _GIB else "warning", "memory", _free(memory), remedy
    remedy = "NCCL and Gloo use it: mount -o remount,size=8G /dev/shm, docker run --shm-size=8g"
    yield "ok" if shm >= _GIB else "warning", "/dev/shm", _free(shm), remedy
    observed = f"{disk['path']}, {_free(disk['free_bytes'])}"
    if disk["writable"]:
        remedy = "checkpoints hold centres and their optimizer state, --keep-checkpoints times"
        yield "ok" if disk["free_bytes"] >= 10 * _GIB else "warning", "models root", observed, remedy
    else:
        yield "fault", "models root", f"{observed}, not writable", "give another --models-root"
    soft, hard = facts["open_files"]
    observed = f"at most {soft}" if soft >= 0 else "no limit"
    remedy = f"each process keeps a connection to many others: ulimit -n {hard if hard > 0 else 65536}"
    yield "warning" if 0 <= soft < 4096 else "ok", "open files", observed, remedy


def _free(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB free"


def _name(name: str, address: str) -> _Found:
    if address and not address.startswith("127."):
        return "ok", "name", f"{name} is {address}", ""
    observed = f"its own name, {name}, is {f'the address {address}' if address else 'not known'} to itself"
    return "fault", "name", observed, f"Gloo would listen there: give {name} its real address in /etc/hosts"


def common_findings(answers: list[tuple[Host, dict[str, Any]]]) -> Iterator[HostFinding]:
    """Yields the facts that must be equal on all hosts and differ from the first host's."""
    remedies = {
        "checkout": "copy it, or pull the same commit",
        "MPI": "install the same Open MPI",
        "GPUs": "all ranks compute on the same kind of device",
    }
    same = []
    for host, facts in answers:
        shared = {"checkout": facts["checkout"], "MPI": facts["mpirun"], "GPUs": "some" if facts["gpus"] else ""}
        same.append((host.name, {**shared, "python": facts["python"], **facts["packages"]}))
    for name, theirs in same[1:]:
        for subject, expected in same[0][1].items():
            if theirs[subject] != expected:
                remedy = remedies.get(subject, "run `make setup` there: constraints.txt has the versions")
                observed = f"{theirs[subject] or 'none'}, not {expected or 'none'} as on {same[0][0]}"
                yield HostFinding("fault", name, subject, observed, remedy)

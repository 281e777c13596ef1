"""From what hosts say about themselves (probe.facts) to lines: ok, warning or fault, and what to do."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from partial_fc.doctor.hosts import Host

Status = Literal["ok", "warning", "fault"]
_GIB = 1 << 30

# Names an interface, in one of the forms of comm/interface.py.
_INTERFACE_VARIABLES = (
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "HOROVOD_GLOO_IFACE",
    "OMPI_MCA_btl_tcp_if_include",
)


@dataclass(frozen=True)
class HostFinding:
    """One thing looked at on one host."""

    status: Status
    host: str
    what: str
    found: str
    to_do: str = ""

    def __str__(self) -> str:
        more = f"\n{'':10}{self.to_do}" if self.to_do else ""
        return f"{self.status:10}{self.host}: {self.what}: {self.found}{more}"


def host_findings(host: Host, facts: dict[str, Any], num_hosts: int) -> Iterator[HostFinding]:
    """What one host's facts mean for a run on num_hosts."""
    for judged in (
        _horovod(facts),
        _gpus(facts, host.slots),
        _machine(facts, host.slots),
        _network(facts, num_hosts),
    ):
        for status, what, found, to_do in judged:
            yield HostFinding(status, host.name, what, found, to_do)


_Found = Iterator[tuple[Status, str, str, str]]


def _horovod(facts: dict[str, Any]) -> _Found:
    horovod, version = facts["horovod"], facts["packages"]["horovod"]
    if "error" in horovod:
        installed = horovod["error"] != "not installed"
        to_do = "run `make setup` (docs/launching.md); torchrun, srun and --gpus work without it"
        yield "fault" if installed else "warning", "Horovod", f"{version} {horovod['error']}".strip(), to_do
    else:
        frameworks, built = horovod["frameworks"], horovod["built"]
        found = f"{version} for {' and '.join(frameworks)}, built with {' and '.join(built) or 'nothing'}"
        if not {"gloo", "mpi"} & set(built):
            yield (
                "fault",
                "Horovod",
                found,
                "build it again with MPI or Gloo: remove .venv and run `make setup`",
            )
        elif facts["gpus"] and "nccl" not in built:
            to_do = "gradients would pass through the host's memory: HOROVOD_GPU_OPERATIONS=NCCL make setup"
            yield "warning", "Horovod", found, to_do
        else:
            yield "ok", "Horovod", found, ""
    if facts["mpirun"]:
        yield "ok", "MPI", facts["mpirun"], ""
    else:
        yield "warning", "MPI", "no mpirun", "run.sh and horovodrun --mpi need it; horovodrun --gloo does not"


def _gpus(facts: dict[str, Any], slots: int) -> _Found:
    torch, gpus = facts["torch"], facts["gpus"]
    if "error" in torch:
        yield "fault", "torch", torch["error"], "run `make setup` there"
        return
    version = facts["packages"]["torch"]
    if gpus and not torch["gpus"]:
        found = f"{version} finds none of the {len(gpus)} GPU(s) that nvidia-smi lists"
        yield (
            "fault",
            "GPUs",
            found,
            "install torch for CUDA (TORCH_INDEX_URL, `make setup`); see CUDA_VISIBLE_DEVICES",
        )
    elif not torch["gpus"]:
        yield "ok", "GPUs", f"none; torch {version} computes on {facts['cores']} core(s)", ""
    else:
        found = f"{torch['gpus']}, torch {version}, CUDA {torch['cuda']}, NCCL {torch['nccl']}"
        if slots > torch["gpus"]:
            yield "fault", "GPUs", f"{found}; {slots} processes", "give the host as many slots as it has GPUs"
        else:
            yield "ok", "GPUs", found, ""


def _machine(facts: dict[str, Any], slots: int) -> _Found:
    if not facts["gpus"] and slots > facts["cores"]:
        yield (
            "warning",
            "cores",
            f"{facts['cores']} for {slots} processes",
            "each needs a core at least: give fewer slots",
        )
    memory, shm = facts["memory_bytes"], facts["shm_bytes"]
    enough = memory >= 4 * _GIB
    to_do = "" if enough else "a process with its libraries takes about 1 GiB; `partial-fc plan` says what a head takes"
    yield "ok" if enough else "warning", "memory", f"{memory / _GIB:.1f} GiB free", to_do
    enough = shm >= _GIB
    to_do = "" if enough else "NCCL and Gloo use it: mount -o remount,size=8G /dev/shm, docker run --shm-size=8g"
    yield "ok" if enough else "warning", "/dev/shm", f"{shm / _GIB:.1f} GiB free", to_do
    disk = facts["disk"]
    found = f"{disk['path']}, {disk['free_bytes'] / _GIB:.1f} GiB free"
    if not disk["writable"]:
        yield "fault", "models root", f"{found}, not writable", "give another --models-root"
    elif disk["free_bytes"] < 10 * _GIB:
        yield (
            "warning",
            "models root",
            found,
            "checkpoints hold centres and their optimiser state, --keep-checkpoints times",
        )
    else:
        yield "ok", "models root", found, ""
    soft, hard = facts["open_files"]
    few = 0 <= soft < 4096
    to_do = f"each process keeps a connection to many others: ulimit -n {hard if hard > 0 else 65536}" if few else ""
    yield "warning" if few else "ok", "open files", f"at most {soft}" if soft >= 0 else "no limit", to_do


def _network(facts: dict[str, Any], num_hosts: int) -> _Found:
    interfaces: dict[str, dict[str, Any]] = facts["interfaces"]
    for variable in _INTERFACE_VARIABLES:
        said = facts["environment"].get(variable, "")
        named = [name for name in said.removeprefix("=").split(",") if name and not said.startswith("^")]
        # NCCL takes a bare name for the beginning of one.
        if named and not any(have.startswith(name) for name in named for have in interfaces):
            there = ", ".join(interfaces)
            yield (
                "fault",
                "interface",
                f"{variable}={said}, there are {there}",
                "unset it, or name one of these",
            )
    if num_hosts == 1:
        return
    own, name = facts["own_address"], facts["name"]
    if not own or own.startswith("127."):
        found = f"its own name, {name}, is {f'the address {own}' if own else 'not known'} to itself"
        yield "fault", "name", found, f"Gloo would listen there: give {name} its real address in /etc/hosts"
    else:
        yield "ok", "name", f"{name} is {own}", ""
    used = set()
    for peer, route in facts["routes"].items():
        if "error" in route:
            yield (
                "fault",
                "route",
                f"to {peer}: {route['error']}",
                "put it into /etc/hosts, or write its address",
            )
        elif route["interface"] in ("", "lo"):
            found = f"to {peer}: {route['address']} by {route['interface'] or 'no interface'}"
            yield (
                "fault",
                "route",
                found,
                f"{peer} must be the other host's address here, too: see /etc/hosts",
            )
        else:
            used.add(route["interface"])
    if used:
        yield _interface(interfaces, used)


def _interface(interfaces: dict[str, dict[str, Any]], used: set[str]) -> tuple[Status, str, str, str]:
    def shown(name: str) -> str:
        mbps = interfaces[name]["mbps"]
        return f"{name} ({interfaces[name]['address']}{f', {mbps / 1000:g} Gbit/s' if mbps > 0 else ''})"

    found = f"to the others by {', '.join(map(shown, sorted(used)))}"
    others = [shown(name) for name in interfaces if name not in used and name != "lo"]
    if len(used) == 1 and not others:
        return "ok", "interface", found, ""
    to_do = (
        f"name one, or a launcher may take another: --network-interfaces {min(used)}, NETWORK_INTERFACE={min(used)} "
        "bash run.sh, --network-interface for the trainer's own launch"
    )
    return "warning", "interface", found + (f"; also {', '.join(others)}" if others else ""), to_do


def common_findings(seen: list[tuple[Host, dict[str, Any]]]) -> Iterator[HostFinding]:
    """What must be the same on all of them; the first one's counts."""
    if len(seen) < 2:
        return
    first, facts = seen[0]
    for what, to_do, value in (
        ("checkout", "copy it, or pull the same commit", lambda f: f["checkout"] or "not there"),
        ("python", "run `make setup` there", lambda f: f["python"]),
        ("packages", "run `make setup` there: constraints.txt has the versions", _packages),
        ("MPI", "install the same Open MPI", lambda f: f["mpirun"]),
        ("GPUs", "all ranks compute on the same kind of device", lambda f: "some" if f["gpus"] else "none"),
    ):
        others = [(host, value(f)) for host, f in seen[1:] if value(f) != value(facts)]
        for host, theirs in others:
            ours = value(facts)
            yield HostFinding("fault", host.name, what, f"{_differing(theirs, ours)} as on {first.name}", to_do)
        if not others and what in ("checkout", "packages"):
            yield HostFinding("ok", "all", what, f"the same on {len(seen)} hosts: {value(facts)}")
    names = {route["interface"] for _, f in seen for route in f["routes"].values() if route.get("interface")}
    if len(names) > 1:
        to_do = "variables and flags that name an interface hold for all hosts: name networks, or give none"
        yield HostFinding("warning", "all", "interface", f"called {' and '.join(sorted(names))}", to_do)


def _packages(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in facts["packages"].items() if version)


def _differing(theirs: str, ours: str) -> str:
    """Of two lists only what is not in both."""
    left, right = theirs.split(", "), ours.split(", ")
    only = [[word for word in one if word not in other] for one, other in ((left, right), (right, left))]
    return f"{', '.join(only[0]) or 'nothing'}, not {', '.join(only[1]) or 'nothing'}"

"""The processes of a job before their start: roles, hosts, environment."""

import fnmatch
import functools
import os
import random
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from partial_fc.comm.launch.hosts import COUNT, HOST_FILE_BYTES, NAME, Host
from partial_fc.files import read_text

from . import shell
from .options import OURS, LaunchOptions

LAUNCHER = "PARTIAL_FC_LAUNCHER"  # names a torch rank's launcher, for messages (comm/launch/detect.py)

# Variables forwarded to other hosts, which have their own HOME, LANG and the like.
_FORWARDED = (
    *("DMLC_*", "PS_*", "MXNET_*", "OMP_*", "MKL_*", "KMP_*", "NCCL_*", "GLOO_*", "TORCH_*", "PYTORCH_*"),
    *("LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "PARTIAL_FC_TRACE"),
)
# launch.py forwards them too, for data on S3. They are never on a command line.
_CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_NOT_FORWARDED = OURS | {"DMLC_NODE_HOST", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"}
# Below Linux's ephemeral ports (32768 and up), above those of services.
_PORTS = range(12000, 32000)


@dataclass(frozen=True)
class Task:
    """One process. place: its host in the host file."""

    role: str
    number: int
    place: Host
    variables: dict[str, str]

    @property
    def host(self) -> Host | None:
        """Returns the host to reach over ssh; None: this one."""
        return None if _here(self.place) else self.place

    @property
    def name(self) -> str:
        """Returns "worker 1"; for the only scheduler, "scheduler"."""
        return self.role if self.role == "scheduler" else f"{self.role} {self.number}"

    def prepare(self, addresses: Sequence[str], folder: str) -> list[str]:
        """Returns shell lines before COMMAND. addresses: of all hosts. folder: working directory; "": the shell's."""
        lines = shell.exports(self.variables)
        if self.host is not None:
            lines.append(f"export PATH={shlex.quote(os.environ.get('PATH', os.defpath))}:$PATH")
        return [*lines, *(shell.change_to(folder) if folder else []), *own_interface(self.variables, addresses)]


def own_interface(variables: Mapping[str, str], addresses: Sequence[str]) -> list[str]:
    """Returns shell lines that select the network of the host's address in the host file. By default MXNet takes the
    first, Gloo that of the host's own name, 127.0.1.1 on Debian."""
    if "DMLC_ROLE" in variables:
        if "DMLC_NODE_HOST" in variables:
            return []
        # ps-lite prefers DMLC_NODE_HOST: with it DMLC_INTERFACE would have no effect.
        lines = ["unset DMLC_NODE_HOST"]
        if not variables.get("DMLC_INTERFACE") and variables["DMLC_ROLE"] != "scheduler":
            lines += shell.own_address(addresses, "export DMLC_NODE_HOST=$address")
        return lines
    if "GLOO_SOCKET_IFNAME" in variables:
        return []
    device = "$(ip -o -4 address show to $address/32 | awk '{ print $2; exit }')"
    return shell.own_address(addresses, f"export GLOO_SOCKET_IFNAME={device}")


@dataclass(frozen=True)
class Plan:
    """The processes to start. addresses: of its hosts, as they know each other."""

    tasks: list[Task]
    addresses: dict[Host, str]


def plan(options: LaunchOptions, command: Sequence[str], environ: Mapping[str, str] = os.environ) -> Plan:
    """Plans scheduler, servers and workers; without servers, the ranks of a torch job. Raises ValueError."""
    num_servers = options.servers(command)
    hosts = read_hosts(options.hostfile) if options.hostfile else [Host("127.0.0.1")]
    given = options.variables(environ)
    common = forwarded(environ) | {"PYTHONUNBUFFERED": "1"} | given[""]  # unbuffered output
    interface = common.get("DMLC_INTERFACE", "")
    own = _own_address(hosts, interface if num_servers else "")
    addresses = {host: _address(host, own) for host in hosts}
    servers, workers = place(hosts, num_servers, options.num_workers)
    if not num_servers:
        return Plan(_ranks(hosts, workers, addresses, common | given["worker"], interface), addresses)
    root = common.get("DMLC_PS_ROOT_URI", own)
    common |= {
        "DMLC_PS_ROOT_URI": root,
        "DMLC_PS_ROOT_PORT": common.get("DMLC_PS_ROOT_PORT") or str(_free_port(root)),
        "DMLC_NUM_SERVER": str(num_servers),
        "DMLC_NUM_WORKER": str(options.num_workers),
        "DMLC_JOB_CLUSTER": options.launcher,
    }
    tasks = [Task("scheduler", 0, Host(""), {**common, "DMLC_ROLE": "scheduler", "DMLC_TASK_ID": "0"})]
    for role, places in (("server", servers), ("worker", workers)):
        for number, host in enumerate(places):
            variables = {**common, "DMLC_ROLE": role, "DMLC_TASK_ID": str(number), **given[role]}
            if not interface and addresses[host].startswith("127."):
                # Loopback only: servers unpickle what they receive.
                variables.setdefault("DMLC_NODE_HOST", addresses[host])
            tasks.append(Task(role, number, host, variables))
    return Plan(tasks, addresses)


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables forwarded to other hosts."""
    patterns = (*_FORWARDED, *_CREDENTIALS)
    return {
        name: value
        for name, value in environ.items()
        if name not in _NOT_FORWARDED and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def is_secret(name: str) -> bool:
    return any(word in name.upper() for word in ("KEY", "SECRET", "TOKEN", "PASSWORD"))


def _ranks(
    hosts: list[Host], workers: list[Host], addresses: dict[Host, str], common: dict[str, str], interface: str
) -> list[Task]:
    """Returns the workers of a torch job: the ranks of a host are consecutive."""
    used = [host for host in dict.fromkeys(hosts) if host in workers]
    master = common.get("MASTER_ADDR", addresses[used[0]])
    port = common.get("MASTER_PORT") or str(_free_port(master) if _here(used[0]) else random.choice(_PORTS))
    common = {**common, "MASTER_ADDR": master, "MASTER_PORT": port, LAUNCHER: "partial-fc launch"}
    if interface:
        common = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}", **common}
    elif master.startswith("127."):
        common = {"GLOO_SOCKET_IFNAME": "lo", **common}
    tasks: list[Task] = []
    for host in used:
        num = workers.count(host)
        for local in range(num):
            who = {"RANK": len(tasks), "WORLD_SIZE": len(workers), "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": num}
            variables = common | {name: str(value) for name, value in who.items()}
            tasks.append(Task("worker", len(tasks), host, variables))
    return tasks


@functools.cache
def _here(host: Host) -> bool:
    return host.is_here and host.ssh_port is None


def _own_address(hosts: Sequence[Host], interface: str) -> str:
    """Returns this host's address for the others, on which the scheduler listens: that of the interface, else the
    source address of packets to the first other host, else the first host's. Raises ValueError."""
    from partial_fc.comm.launch import addresses  # the package takes long to import

    if interface:
        return addresses.address_of(interface, "DMLC_INTERFACE=")
    others = [host for host in hosts if not host.is_here]
    if not others:
        return address(hosts[0])
    destination = address(others[0])
    try:
        return addresses.towards(destination)
    except OSError as error:
        raise ValueError(f"this host does not reach {destination}: {error.strerror}; see `ip route`") from None


def _address(host: Host, own: str) -> str:
    """Returns the address as known to other hosts: the host file may call this one localhost."""
    found = address(host)
    return own if found.startswith("127.") else found


def _free_port(address: str) -> int:
    """Returns a free port of this host. Raises ValueError if the address is not its own."""
    try:
        with socket.create_server((address, 0)) as trial:
            return trial.getsockname()[1]
    except OSError as error:
        raise ValueError(
            f"{socket.gethostname()} cannot listen at {address}: {(error.strerror or '').partition(' (')[0]}; "
            "it is to be an address of this host (`ip address`), where the scheduler, or rank 0, runs"
        ) from None


_EXPECTED = "expected lines `host`, `host:port` (sshd's) or `host slots=N` (workers there, at most); # begins a comment"


def read_hosts(path: Path) -> list[Host]:
    """Reads its hosts, in order; a repeated host gets twice the processes. Raises ValueError that names the line."""
    hosts = []
    for number, line in enumerate(read_text(path, HOST_FILE_BYTES).splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, colon, port = words[0].partition(":")
        slots = words[1].removeprefix("slots=") if len(words) > 1 else "0"
        right = bool(NAME.fullmatch(name) and COUNT.fullmatch(slots)) and len(words) <= 2
        right = right and (not colon or COUNT.fullmatch(port) is not None)
        if len(words) == 2 and (not words[1].startswith("slots=") or not slots.strip("0")):
            right = False
        if not right or (colon and not 0 < int(port) < 65536):
            raise ValueError(f"{path}, line {number}: {line.strip()[:200]!r}; {_EXPECTED}")
        hosts.append(Host(name, int(slots), int(port) if colon else None))
    if not hosts:
        raise ValueError(f"{path}: names no host; {_EXPECTED}")
    return hosts


def place(hosts: Sequence[Host], num_servers: int, num_workers: int) -> tuple[list[Host], list[Host]]:
    """Returns (hosts of the servers, hosts of the workers): round robin over the hosts, servers first, as in launch.py;
    a host with slots=N gets at most N workers. Raises ValueError for fewer slots than workers."""
    servers = [hosts[number % len(hosts)] for number in range(num_servers)]
    workers: list[Host] = []
    left = [host.slots or num_workers for host in hosts]
    if sum(left) < num_workers:
        raise ValueError(
            f"-n {num_workers}, but the host file has slots for {sum(left)} workers: give more hosts or slots, or "
            "omit slots="
        )
    at = num_servers % len(hosts)
    while len(workers) < num_workers:
        if left[at]:
            left[at] -= 1
            workers.append(hosts[at])
        at = (at + 1) % len(hosts)
    return servers, workers


def address(host: Host) -> str:
    """Resolves its IPv4 address on this host. Raises ValueError."""
    try:
        return socket.gethostbyname(host.name)
    except OSError as error:
        raise ValueError(
            f"host {host.name} of the host file: {error.strerror}; write its address, or put its name into /etc/hosts"
        ) from None

"""The host file of a job, and the placement of the job's processes."""

import socket
from collections.abc import Sequence
from pathlib import Path

from partial_fc.files import read_text
from partial_fc.verbs.doctor.hosts import COUNT, HOST_FILE_BYTES, NAME, Host

_EXPECTED = "expected lines `host`, `host:port` (sshd's) or `host slots=N` (workers there, at most); # begins a comment"


def read(path: Path) -> list[Host]:
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


def own_address(hosts: Sequence[Host]) -> str:
    """Returns this host's address for the others: the source address of packets to the first other host, or the first
    host's address if there is none."""
    others = [host for host in hosts if not host.is_here]
    if not others:
        return address(hosts[0])
    return source_address(address(others[0]))


def source_address(destination: str) -> str:
    """Returns the source address of this host's packets to that one; sends nothing. Raises ValueError."""
    from partial_fc.comm.launch import addresses  # the package takes long to import

    try:
        return addresses.towards(destination)
    except OSError as error:
        raise ValueError(f"this host does not reach {destination}: {error.strerror}; see `ip route`") from None

"""Which hosts the listening sockets of this process answer: what others send, the kernel drops before there is a
connection, so it costs neither a descriptor nor a byte.

Gloo, MPI and torch's store listen for as long as they live and ask nobody who he is. Who trains knows all of its hosts
once they have met. A filter on a listening socket (SO_ATTACH_FILTER, socket(7)) holds for connections that come later;
those that are there already stay.
"""

import ctypes
import ipaddress
import logging
import os
import socket
import stat
import struct
from collections.abc import Iterable
from contextlib import suppress

import psutil

ADMIT = "PARTIAL_FC_ADMIT"  # "any" in the environment: no filters, for hosts behind address translation
_log = logging.getLogger("partial_fc")
_SO_ATTACH_FILTER = 26
# Classic BPF, from Linux's bpf_common.h and filter.h: what is done, then where a word of the packet lies.
_LOAD, _IF_EQUAL, _GO, _AND, _RETURN = 0x20, 0x15, 0x05, 0x54, 0x06
_PROTOCOL, _NETWORK = 0xFFFFF000, 0xFFF00000
_SOURCE_4, _SOURCE_6 = _NETWORK + 12, _NETWORK + 8
_ETHERTYPE_IPV6 = 0x86DD
_ALL, _NOTHING = 0xFFFFFFFF, 0
_MOST_ADDRESSES = 400  # a program has 4,096 instructions at most, an IPv6 address takes nine

Instruction = tuple[int, int, int, int]
"""What, how many instructions to skip if so, how many if not, with which number."""


def own_addresses() -> list[str]:
    """All of this host's addresses, as other hosts may see it come."""
    families = (socket.AF_INET, socket.AF_INET6)
    entries = [entry for found in psutil.net_if_addrs().values() for entry in found if entry.family in families]
    return [entry.address.partition("%")[0] for entry in entries]


def listening() -> dict[int, int]:
    """The TCP sockets of this process that listen: inode -> descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            status = os.stat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            one = socket.socket(fileno=int(name))
            try:
                is_tcp = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
                if is_tcp and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found[status.st_ino] = int(name)
            finally:
                one.detach()
    return found


def opened_since(before: dict[int, int]) -> list[int]:
    """Descriptors of the sockets that listen now and did not then."""
    return [descriptor for inode, descriptor in listening().items() if inode not in before]


def admit_only(descriptors: Iterable[int], addresses: Iterable[str]) -> bool:
    """From now on these listening sockets answer the hosts of these addresses, and this host over its loopback.

    False, and a warning, where the kernel has no such filters or there are too many hosts; False where there are no
    such sockets, or ADMIT says "any". Raises ValueError for another value of that."""
    found = list(descriptors)
    if not found or not _wanted():
        return False
    known = sorted({ipaddress.ip_address(address) for address in addresses}, key=lambda a: (a.version, a))
    if len(known) > _MOST_ADDRESSES:
        _log.warning(f"the run's hosts have {len(known)} addresses: its sockets answer any host (SECURITY.md)")
        return False
    try:
        for descriptor in found:
            _attach(descriptor, _program(known))
    except OSError as error:
        _log.warning(f"this system has no filters for sockets ({error}): they answer any host (SECURITY.md)")
        return False
    return True


def filters_error() -> str:
    """Why this system takes no filters for the sockets of this user, tried with one that lets all pass; "" if it does.

    Linux has them since 2.2. gVisor has none, and there are kernels that keep them for CAP_NET_ADMIN (EPERM)."""
    with socket.socket() as one:
        try:
            _attach(one.fileno(), [(_RETURN, 0, 0, _ALL)])
        except OSError as error:
            return str(error)
    return ""


def _wanted() -> bool:
    value = os.environ.get(ADMIT, "hosts")
    if value not in ("hosts", "any"):
        raise ValueError(f"{ADMIT}={value}; expected hosts (of the run alone) or any")
    return value == "hosts"


def _program(addresses: Iterable[ipaddress.IPv4Address | ipaddress.IPv6Address]) -> list[Instruction]:
    """Lets packets from these addresses pass, and from the loopback's."""
    four: list[Instruction] = [(_LOAD, 0, 0, _SOURCE_4)]
    six: list[Instruction] = []
    for address in [*addresses, ipaddress.IPv6Address("::1")]:
        if address.version == 4:
            four += [(_IF_EQUAL, 0, 1, int(address)), (_RETURN, 0, 0, _ALL)]
            continue
        for i, word in enumerate(struct.unpack("!4I", address.packed)):
            # Where it differs, on to the next address, behind what is left of this one.
            six += [(_LOAD, 0, 0, _SOURCE_6 + 4 * i), (_IF_EQUAL, 0, 7 - 2 * i, word)]
        six.append((_RETURN, 0, 0, _ALL))
    four += [(_AND, 0, 0, 0xFF000000), (_IF_EQUAL, 0, 1, 0x7F000000), (_RETURN, 0, 0, _ALL), (_RETURN, 0, 0, _NOTHING)]
    six.append((_RETURN, 0, 0, _NOTHING))
    return [(_LOAD, 0, 0, _PROTOCOL), (_IF_EQUAL, 0, 1, _ETHERTYPE_IPV6), (_GO, 0, 0, len(four)), *four, *six]


def _attach(descriptor: int, program: list[Instruction]) -> None:
    words = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    kept = ctypes.create_string_buffer(words, len(words))
    one = socket.socket(fileno=descriptor)
    try:
        one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(program), ctypes.addressof(kept)))
    finally:
        one.detach()

"""The addresses and network interfaces of this host, for its own processes and for other hosts."""

import fcntl
import os
import socket
import struct
from collections.abc import MutableMapping
from contextlib import suppress

# The variables that libraries read at their start; Horovod has one for Gloo, and leaves the rest to NCCL and MPI.
VARIABLES = ("HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include")

ANY = "0.0.0.0"
"""All addresses of this host: to listen at, and for connections within the host."""


def choose(interface: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Makes all backends started later in this process use this network interface.

    Raises ValueError as `address_of`, and if a variable already names another one: horovodrun and clusters set them.
    """
    address_of(interface)
    for name in VARIABLES:
        value = environ.get(name)
        if value and not _allows(value, interface):
            raise ValueError(
                f"--network-interface {interface}, but the environment of {socket.gethostname()} says {name}={value}; "
                "unset it, or leave the flag away. (horovodrun sets it: give it --network-interfaces instead)"
            )
    for name in VARIABLES:
        # NCCL takes a name without "=" as a prefix: eth1 would also match eth10.
        environ[name] = f"={interface}" if name == "NCCL_SOCKET_IFNAME" else interface


_SIOCGIFADDR = 0x8915  # netdevice(7): the request for an interface's first IPv4 address


def by_interface() -> dict[str, str]:
    """Returns the first IPv4 address of each interface of this host; "" if it has none."""
    found = {name: "" for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name in found:
            with suppress(OSError):
                # A name of 16 bytes, then a `struct sockaddr_in`.
                entry = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("40s", name.encode()))
                found[name] = socket.inet_ntoa(entry[20:24])
    return found


def address_of(interface: str, asked_by: str = "--network-interface ") -> str:
    """Returns the interface's address. asked_by: the flag or variable that names it. Raises ValueError, with the list
    of interfaces, if this host lacks it or it has no IPv4 address."""
    address = by_interface()
    if not address.get(interface):
        state = "has no IPv4 address" if interface in address else "does not exist"
        usable = ", ".join(f"{name} ({ip})" for name, ip in address.items() if ip)
        raise ValueError(f"{asked_by}{interface}: {state} on {socket.gethostname()}; there are {usable}")
    return address[interface]


def interface_of(address: str) -> str | None:
    """Returns the name of the interface with this first IPv4 address."""
    return next((name for name, own in by_interface().items() if own == address), None) if address else None


def loopback() -> str:
    """Returns the loopback interface."""
    return next((name for name, address in by_interface().items() if address.startswith("127.")), "lo")


def reachable(interface: str | None = None) -> list[str]:
    """Returns the addresses by which other hosts may reach this one, likely ones first. interface: the only one to use;
    likewise one named in the environment, or the one over which all ranks found rank 0."""
    if interface:
        return [address_of(interface)]
    address = by_interface()
    named = ",".join(os.environ.get(variable, "") for variable in VARIABLES).split(",")
    chosen = dict.fromkeys(address.get(name.removeprefix("=")) for name in named)
    found = [a for a in chosen if a and not a.startswith("127.")]
    if not found:
        with suppress(OSError):
            found = [socket.gethostbyname(os.environ.get("MASTER_ADDR", ""))]
    if len(found) == 1 and found[0] in address.values() and not found[0].startswith("127."):
        return found
    found += [a for a in (*address.values(), socket.gethostname()) if a and a not in found]
    return [a for a in found if not a.startswith(("127.", "0.")) and a != "localhost"] or ["127.0.0.1"]


def is_local(address: str) -> bool:
    """Returns whether a socket of this host can bind to the address."""
    try:
        family, kind, protocol, _, resolved = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.bind(resolved)
    except OSError:
        return False
    return True


def towards(destination: str) -> str:
    """Returns the source address of this host's packets to that IPv4 address; sends nothing. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        trial.connect((destination, 9))
        return trial.getsockname()[0]


def _allows(value: str, interface: str) -> bool:
    """Returns whether `interface` is listed: "eth0,eth1"; for NCCL also "=eth0" (exactly) and "^lo" (all but)."""
    if value.startswith("^"):
        return not any(interface.startswith(name) for name in value[1:].removeprefix("=").split(","))
    return interface in value.removeprefix("=").split(",")

"""The network interface over which the processes talk, where a host has several."""

import os
import socket
from collections.abc import MutableMapping

import psutil

# What each library reads when it starts; Horovod has one for its own Gloo, and leaves the rest to NCCL and MPI.
VARIABLES = ("HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include")


def choose(interface: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Makes every backend that starts later in this process use this network interface.

    Raises ValueError as `address_of`, and where a variable already says another one: horovodrun and clusters set them,
    and half of the processes must not follow one and half the other.
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
        # NCCL takes a bare name for the beginning of one: eth1 would also mean eth10.
        environ[name] = f"={interface}" if name == "NCCL_SOCKET_IFNAME" else interface


def addresses() -> dict[str, str]:
    """The first IPv4 address of each interface of this host; "" where it has none."""
    return {
        name: next((entry.address for entry in entries if entry.family == socket.AF_INET), "")
        for name, entries in psutil.net_if_addrs().items()
    }


def loopback() -> str:
    """The interface by which this host speaks to itself alone."""
    return next((name for name, address in addresses().items() if address.startswith("127.")), "lo")


def address_of(interface: str) -> str:
    """Raises ValueError where this host has no such interface, or one without an IPv4 address, at which the status
    board could listen."""
    address = addresses()
    if not address.get(interface):
        state = "has no IPv4 address" if interface in address else "does not exist"
        usable = ", ".join(f"{name} ({ip})" for name, ip in address.items() if ip)
        raise ValueError(f"--network-interface {interface}: {state} on {socket.gethostname()}; there are {usable}")
    return address[interface]


def _allows(value: str, interface: str) -> bool:
    """Whether `interface` is among those named: "eth0,eth1"; for NCCL also "=eth0" (exactly) and "^lo" (all but)."""
    if value.startswith("^"):
        return not any(interface.startswith(name) for name in value[1:].removeprefix("=").split(","))
    return interface in value.removeprefix("=").split(",")

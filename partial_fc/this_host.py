"""Tells this host from others."""

import hashlib
import os
import socket
from pathlib import Path


def identity() -> str:
    """32 hex digits: the same for all processes of a host until it is started anew, and others on another host, also on
    one of the same name. Machines that were resumed from one snapshot have one identity where name and network cards
    are the same, too."""
    facts = [socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
    facts += _text(Path("/etc/machine-id"))
    network = Path("/sys/class/net")
    # Those with a device: virtual ones come and go with containers.
    for name in sorted(os.listdir(network)) if network.is_dir() else ():
        if (network / name / "device").exists():
            facts += _text(network / name / "address")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


def _text(path: Path) -> list[str]:
    """What is in the file; nothing where a container, say, does not show it."""
    try:
        return [path.read_text().strip()]
    except OSError:
        return []

"""The identity of this host."""

import hashlib
import os
import socket
from pathlib import Path


def identity() -> str:
    """Returns 32 hex digits: the same for all processes of a host until it reboots, and different on other hosts, also
    on one of the same name. Machines resumed from one snapshot share it if name and network cards are the same, too."""
    facts = [socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
    facts += _text(Path("/etc/machine-id"))
    network = Path("/sys/class/net")
    # Those with a device: virtual ones come and go with containers.
    for name in sorted(os.listdir(network)) if network.is_dir() else ():
        if (network / name / "device").exists():
            facts += _text(network / name / "address")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


def _text(path: Path) -> list[str]:
    """Returns the file's text; [] if it is hidden, as in some containers."""
    try:
        return [path.read_text().strip()]
    except OSError:
        return []

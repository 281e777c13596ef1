"""The launch of processes: detection of the launcher, and the starts by our own --nodes and --gpus."""

import socket
from dataclasses import dataclass
from typing import Literal

ONE_A_HOST = "the program that set RANK"  # and no LOCAL_RANK: Kubernetes' operators, one process a host


@dataclass(frozen=True)
class Launch:
    """The rank assigned to this process. `local` counts a host's processes; master: torch.distributed's rank 0."""

    backend: Literal["horovod", "torch", "single"]
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = ""
    master_addr: str = ""
    master_port: int = 0

    @property
    def is_host(self) -> bool:
        """Returns whether the launcher has started no other process on this host: it may start one for each GPU."""
        return self.launcher in ("partial-fc launch", ONE_A_HOST) and self.local_size == 1

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} on {socket.gethostname()}"


def integer(name: str, text: str) -> int:
    """Returns the number in an environment variable."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a whole number") from None

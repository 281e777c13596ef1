"""The launch of processes: detection of the launcher, and the starts by our own --nodes and --gpus."""

import socket
from dataclasses import dataclass
from typing import Literal


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
        """Returns whether this process stands for its host, as a worker of MXNet's launch.py does: `partial-fc launch`
        has started no other there, and it may start one for each GPU."""
        return self.launcher == "partial-fc launch" and self.local_size == 1

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} on {socket.gethostname()}"


def integer(name: str, text: str) -> int:
    """Returns the number in an environment variable."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a whole number") from None

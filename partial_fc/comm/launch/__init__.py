"""How this process was started, and how our own --nodes and --gpus start others."""

import socket
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Launch:
    """The rank that the launcher gave this process. `local` counts the processes of one host; master: where
    torch.distributed's rank 0 listens."""

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
        """Whether this process stands for its host, as a worker of MXNet's launch.py does: `partial-fc launch` has
        started no other there, and it may start one for each GPU."""
        return self.launcher == "partial-fc launch" and self.local_size == 1

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} on {socket.gethostname()}"


def integer(name: str, text: str) -> int:
    """The number that a variable of the environment holds."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a whole number") from None

"""What a run does if its numbers are not finite or its replicas part: what was asked for, and what came of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

OnNan = Literal["stop", "skip", "rollback"]


@dataclass
class Guards:
    """Equal on all ranks."""

    on_nan: OnNan = "stop"
    max_skips: int = 10  # updates left out in a row
    max_rollbacks: int = 3
    desync_every: int = 500  # steps; 0: never
    # Brings the state of the last complete checkpoint back; returns its step and position in the data, none where there
    # is no checkpoint. A collective.
    restore: Callable[[], tuple[int, int] | None] | None = None
    # where it stands
    num_skips: int = 0  # in a row
    num_rollbacks: int = 0
    last_equal: int = 0  # the step of the last look at the replicas

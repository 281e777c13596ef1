"""Dashboards of a run's numbers, written by rank 0: TensorBoard's files, and Weights & Biases if asked for."""

import math
import queue
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partial_fc.accessories import spare
from partial_fc.comm import World, all_or_raise

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_WAITING = 1000  # rows for wandb, whose service may hang
_AGAIN_S = 600.0  # after a file could not be written
_END_S = 60.0  # for wandb to send what is left


class TensorBoard:
    """TensorBoard's files. After a failed write another is begun later; the values around that time are lost."""

    def __init__(self, folder: Path, world: World):
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._is_ours = world.rank == 0

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if self._is_ours:
            spare(f"TensorBoard's file below {self._folder}", self._add, step, values, again_s=_AGAIN_S)

    def close(self) -> None:
        if self._writer:
            spare(f"TensorBoard's file below {self._folder}", self._writer.close)

    def _add(self, step: int, values: Mapping[str, float]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only one rank needs it

        writer, self._writer = self._writer or SummaryWriter(str(self._folder)), None
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        self._writer = writer


class Wandb:
    """A run of a Weights & Biases project, by its own library. A resumed run continues the same one
    (models_root/wandb_id.txt). WANDB_MODE and its other variables apply."""

    def __init__(self, project: str, models_root: Path, configuration: Mapping[str, Any]):
        """Raises ValueError if the library cannot begin: no account, no network."""
        import wandb  # checked by RunFlags

        id_path = models_root / "wandb_id.txt"
        known = id_path.read_text(encoding="utf-8").strip() if id_path.exists() else None
        try:
            self._run = wandb.init(
                project=project,
                name=models_root.resolve().name,
                id=known,
                resume="allow",
                dir=str(models_root),
                config={name: str(v) if isinstance(v, Path) else v for name, v in configuration.items()},
            )
        except Exception as error:  # also of the network's libraries
            raise ValueError(
                f"--wandb {project}: wandb cannot begin: {str(error).rstrip('.')}. (`wandb login` once; "
                f"WANDB_MODE=offline writes to {models_root / 'wandb'} without a network, for `wandb sync` later)"
            ) from error
        id_path.write_text(f"{self._run.id}\n", encoding="utf-8")
        # A run may go back to an earlier step, which wandb's own count cannot.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._name = f"--wandb {project}"
        # Its service is a process, which may die or hang: a thread waits for it, no step does.
        self._rows: queue.Queue[dict[str, float] | None] = queue.Queue(_WAITING)
        send = partial(spare, self._name, self._send, again_s=math.inf)
        self._sender = threading.Thread(target=send, name="wandb", daemon=True)
        spare(self._name, self._sender.start, again_s=math.inf)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        spare(self._name, self._rows.put_nowait, {**values, "step": step})

    def close(self) -> None:
        """Waits for what is left to be sent, for a minute at most, and not at all for what is left out."""
        spare(self._name, self._end)

    def _end(self) -> None:
        self._rows.put_nowait(None)
        self._sender.join(_END_S)
        if self._sender.is_alive():
            raise TimeoutError(f"not ended within {_END_S:.0f} s; `wandb sync` sends what is left")

    def _send(self) -> None:
        while (row := self._rows.get()) is not None:
            self._run.log(row)
        self._run.finish()


def open_wandb(project: str | None, models_root: Path, configuration: Mapping[str, Any], world: World) -> Wandb | None:
    """Begins a run on rank 0 with --wandb. Raises ValueError, on all ranks, if it fails. A collective with --wandb."""
    if project is None:
        return None

    def begin() -> Wandb | None:
        return Wandb(project, models_root, configuration) if world.rank == 0 else None

    return all_or_raise(begin, world, "run/wandb")

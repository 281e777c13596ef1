"""The seams of the loop: what a recipe puts together, besides its evaluations (evaluate/evaluation.py) and its data.

There is no class to inherit a trainer from: the loop, the checkpoints and the guards know these verbs and nothing else.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from partial_fc.checkpoint import Checkpoint, Snapshot
from partial_fc.checkpoint.peer import PeerCheckpoint
from partial_fc.evaluate.evaluation import Forward
from partial_fc.models.inputs import InputContract
from partial_fc.optim.gradient_sync import StepBytes
from partial_fc.train.precision import LossScaler

Stored = Checkpoint | PeerCheckpoint  # what the ranks of an earlier world kept of one


@dataclass
class RunState:
    """Where a run stands. Equal on all ranks."""

    step: int = 0
    position: int = 0  # in the data: samples consumed by all ranks
    num_overflows: int = 0  # updates that were not made, for a loss scale that was too large
    left_out: list[tuple[int, int]] = field(default_factory=list)  # positions [from, to) that rollbacks went round
    best: dict[str, float] = field(default_factory=dict)  # the highest score of each evaluated set
    best_score: float = 0.0  # the highest mean of them
    lr: float = 0.0  # the learning rate of the last update of this process


class Backbone(Protocol):
    """The data-parallel half of a model, of whatever engine: what learns the same on every rank."""

    device: torch.device
    to_input: InputContract
    contract: dict[str, str]  # what model.safetensors says of it; a checkpoint is loaded where it says the same
    mode: str  # what it computes in, for result.json

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scale, in the modes that have one."""
        ...

    @property
    def may_overflow(self) -> bool:
        """Whether a finite gradient can become infinite on its way between the ranks."""
        ...

    # ---- one update

    def keep_statistics(self) -> None:
        """From now on `undo` also brings back the running statistics of before the update."""

    def zero(self, num_samples: int) -> None:
        """Before the first forward of an update over num_samples samples of all ranks."""

    def forward(self, input_B: Tensor) -> Tensor:
        """A batch as the loader gives it -> the output as a leaf in the head's dtype: the two backwards part there."""
        ...

    def backward(self, grad_B: Tensor) -> None:
        """grad_B: of the leaf that `forward` gave."""

    def hold(self) -> AbstractContextManager:
        """Around the backward of every micro-batch but the last: gradients stay on this rank."""
        ...

    def wait(self) -> None:
        """Returns when the gradient is the sum over the ranks."""

    def finite(self) -> Tensor:
        """Whether the summed gradient is finite: bool scalar, equal on all ranks where the sums are."""
        ...

    def square_sum(self) -> Tensor:
        """Sum of squares of the summed gradient: float64 scalar."""
        ...

    def scale(self, factor: float) -> None:
        """Multiplies the summed gradient."""

    def undo(self) -> None:
        """The update is not made: running statistics and what a gradient compression remembers are as before it."""

    def step(self, lr: float) -> None:
        """The optimizer's update."""

    def step_bytes(self) -> StepBytes:
        """What the exchange of gradients took so far, a step."""
        ...

    # ---- modes

    def train(self) -> None:
        """The mode for training."""

    def evaluating(self) -> AbstractContextManager[Forward]:
        """Inside, the model as it would be delivered; gives its forward: inputs on the host, as the loader gives them
        -> float output. A collective."""
        ...

    # ---- state

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """(weights and running statistics of all ranks together, the optimizer's state, what only this rank has), by
        name; the first two equal on all ranks; no copies, but for the statistics. A collective."""
        ...

    def replicated(self) -> dict[str, Tensor]:
        """By name, all that must be the same bits on every rank; those of weights begin with "weight "."""
        ...

    def load(self, found: Stored) -> list[str]:
        """Takes over what a checkpoint has; what it does not have starts anew. Returns what a user should know. A
        collective."""
        ...

    # ---- a second look at an update whose numbers are not finite; running statistics and gradients stay as they are

    def watch_outputs(self, input_B: Tensor, look: Callable[[str, str, Tensor], None]) -> None:
        """A forward without gradients that shows every module's output, in order: look(name, kind, output)."""

    def gradients(self, input_B: Tensor | None = None, grad_B: Tensor | None = None) -> dict[str, Tensor]:
        """By name, in backward's order: this rank's part of the gradient for one micro-batch; without one, the sums
        over the ranks."""
        ...


class Hooks:
    """What a recipe does beside the loop, for the files of other programs; each verb is called on all ranks. One that
    is not needed is inherited."""

    def begin(self, state: RunState) -> None:
        """Training begins, or goes on, from this state."""

    def after_checkpoint(self, snapshot: Snapshot) -> None:
        """A checkpoint is being written of this state of the rank."""

    def after_epoch(self, state: RunState, values: Mapping[str, float]) -> None:
        """An epoch has ended, or the run, and these are the values of its evaluations. The model still is as they have
        seen it, with the running statistics of all ranks together."""

"""The interfaces of the loop to what a recipe builds, besides evaluations (evaluate/evaluation.py) and data.

There is no trainer to inherit from: loop, checkpoints and guards use only these methods.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from partial_fc.checkpoint import Checkpoint, Snapshot
from partial_fc.evaluate.evaluation import Forward
from partial_fc.models.inputs import InputContract
from partial_fc.optim.gradient_sync import StepBytes
from partial_fc.train.precision import LossScaler


@dataclass
class RunState:
    """The state of a run. Equal on all ranks."""

    step: int = 0
    position: int = 0  # in the data: samples consumed by all ranks
    num_overflows: int = 0  # skipped updates, for a loss scale that was too large
    left_out: list[tuple[int, int]] = field(default_factory=list)  # positions [from, to) skipped by rollbacks
    best: dict[str, float] = field(default_factory=dict)  # the highest score of each evaluated set
    best_score: float = 0.0  # the highest mean score
    lr: float = 0.0  # the learning rate of this process's last update
    data: dict[str, int] | None = None  # what the position counts in, of the checkpoint (data.sample.identity)


class Backbone(Protocol):
    """The data-parallel half of a model, on any engine: the parameters that are equal on every rank."""

    device: torch.device
    to_input: InputContract
    contract: dict[str, str]  # for model.safetensors; a checkpoint loads if its contract is the same
    mode: str  # the precision, for result.json

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scale, in the modes that have one."""
        ...

    @property
    def may_overflow(self) -> bool:
        """Returns whether a finite gradient can become infinite in the exchange between ranks."""
        ...

    # ---- one update

    def keep_statistics(self) -> None:
        """Makes `undo` also restore the running statistics of before the update."""

    def zero(self, num_samples: int) -> None:
        """Prepares an update over num_samples samples of all ranks."""

    def name_samples(self, position_B: Tensor | None) -> None:
        """Says which samples the next passes are over: their positions in the data, for random layers of the network
        (models/sample_random.py); None: unknown."""

    def forward(self, input_B: Tensor) -> Tensor:
        """Returns the output for a loader's batch, as a leaf in the head's dtype, which separates the two backwards."""
        ...

    def backward(self, grad_B: Tensor) -> None:
        """grad_B: of the leaf from `forward`."""

    def hold(self) -> AbstractContextManager:
        """Returns the context for the backward of all micro-batches but the last: no gradient exchange (no_sync)."""
        ...

    def wait(self) -> None:
        """Returns when the gradient is the sum over the ranks."""

    def finite(self) -> Tensor:
        """Returns whether the summed gradient is finite: bool scalar, equal on all ranks if the sums are."""
        ...

    def square_sum(self) -> Tensor:
        """Returns the sum of squares of the summed gradient: float64 scalar."""
        ...

    def scale(self, factor: float) -> None:
        """Multiplies the summed gradient."""

    def undo(self) -> None:
        """Skips the update: restores running statistics."""

    def step(self, lr: float) -> None:
        """Runs the optimizer."""

    def step_bytes(self) -> StepBytes:
        """Returns the average bytes of the gradient exchange in a step."""
        ...

    # ---- modes

    def train(self) -> None:
        """Switches to training mode."""

    def freeze(self, frozen: bool) -> None:
        """Says whether the next updates leave all of it as it is: they then run it as evaluations do (batch norms by
        their running statistics, no dropout), without gradient."""

    def evaluating(self) -> AbstractContextManager[Forward]:
        """Yields the forward of the model as delivered: inputs on the host, as loaded -> float output. A collective."""
        ...

    # ---- state

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Returns (weights and running statistics of all ranks together, the optimizer's state, this rank's own state),
        by name; the first two equal on all ranks; no copies, except for the statistics. A collective."""
        ...

    def raw_weights(self) -> dict[str, Tensor]:
        """Returns the weights, where `state` delivers their average; {}: no average is kept. A collective."""
        ...

    def replicated(self) -> dict[str, Tensor]:
        """Returns the tensors that must be bit-identical on every rank, by name; weights begin with "weight "."""
        ...

    def load(self, found: Checkpoint) -> list[str]:
        """Loads a checkpoint; state that it lacks is initialised. Returns notes for the user. A collective."""
        ...

    # ---- a second look at an update with NaN or Inf; running statistics and gradients stay as they are

    def watch_outputs(self, input_B: Tensor, look: Callable[[str, str, Tensor], None]) -> None:
        """Runs a forward without gradients that reports every module's output, in order: look(name, kind, output)."""

    def gradients(self, input_B: Tensor | None = None, grad_B: Tensor | None = None) -> dict[str, Tensor]:
        """Returns this rank's gradient for a micro-batch, by name in backward's order; without one, the ranks' sums."""
        ...


class Hooks:
    """Hooks of a recipe, for files of other programs; called on all ranks; they do nothing by default."""

    def begin(self, state: RunState) -> None:
        """Called when training starts or resumes from this state."""

    def after_checkpoint(self, snapshot: Snapshot) -> None:
        """Called when a checkpoint of this rank's state is being written."""

    def after_epoch(self, state: RunState, values: Mapping[str, float]) -> None:
        """Called at the end of an epoch, or the run, with the values of its evaluations. The model still has the
        running statistics of all ranks together."""

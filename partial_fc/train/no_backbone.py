"""NoBackbone, the Backbone (seams.py) without parameters: the head's features are the loader's vectors."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from partial_fc.comm import World
from partial_fc.evaluate.evaluation import Forward
from partial_fc.models.inputs import InputContract
from partial_fc.optim.gradient_sync import StepBytes
from partial_fc.train.precision import Precision
from partial_fc.train.seams import Backbone, Stored


class NoBackbone(Backbone):
    """Passes a batch through its input contract to the head. There is nothing to exchange, but for one collective of 4
    bytes a step: whether the features' gradient, and so the centres', is finite."""

    scaler, may_overflow, note = None, False, None

    def __init__(self, world: World, precision: Precision, to_input: InputContract, contract: Mapping[str, str]):
        self.world, self.precision, self.to_input = world, precision, to_input
        self.device, self.mode = precision.device, precision.mode
        self.contract = {**contract, **to_input.facts()}
        self.module = nn.Identity()
        self._finite = torch.tensor(True)

    def _nothing(self, *_given: Any, **_named: Any) -> None:
        """There are no parameters, running statistics or modules."""

    keep_statistics = name_samples = scale = undo = step = train = freeze = watch_outputs = _nothing

    def zero(self, num_samples: int) -> None:
        self._finite = torch.tensor(True, device=self.device)

    def forward(self, input_B: Tensor) -> Tensor:
        data_B = self.to_input(input_B.to(self.device, non_blocking=True))
        return data_B.to(self.precision.parameter_dtype).requires_grad_()

    def backward(self, grad_B: Tensor) -> None:
        self._finite &= grad_B.isfinite().all()

    def hold(self) -> AbstractContextManager:
        return nullcontext()

    def wait(self) -> None:
        self._finite = self.world.all_reduce(1 - self._finite.float(), "max", name="backbone/finite") == 0

    def finite(self) -> Tensor:
        return self._finite

    def square_sum(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def step_bytes(self) -> StepBytes:
        return StepBytes(0, 0.0)

    @contextmanager
    def evaluating(self) -> Iterator[Forward]:
        yield lambda input_B: self.forward(input_B).detach()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        return {}, {}, {}

    def not_delivered(self) -> dict[str, dict[str, Tensor]]:
        return {}

    def replicated(self) -> dict[str, Tensor]:
        return {}

    def load(self, found: Stored) -> list[str]:
        return []

    def gradients(self, input_B: Tensor | None = None, grad_B: Tensor | None = None) -> dict[str, Tensor]:
        return {}

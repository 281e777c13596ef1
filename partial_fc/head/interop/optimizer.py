"""A torch.optim.Optimizer that updates a head, for schedulers, GradScaler, Lightning and accelerate."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from partial_fc.head.interop.module import HeadModule

# So small that no norm and no limit notices the probe's gradient, also after a GradScaler's 2^24; a power of 2, so that
# its ratios stay exact.
PROBE = 2.0**-60


def _evaluated(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class HeadOptimizer(torch.optim.Optimizer):
    """An optimizer whose `step` updates the centres with the learning rate of its only parameter group.

    That group has one scalar, `probe`. Its gradient after a backward is PROBE times the gradient of the loss, which is
    the loss' scale. Whoever multiplies it (GradScaler.unscale_, clip_grad_norm_) multiplies the centres' gradient
    alike. What moves the centres (momentum, weight decay) is the head's own `optimizer`, and its state is saved with
    the head.
    """

    def __init__(self, head: HeadModule, lr: float):
        self.head = head
        self.probe = nn.Parameter(torch.zeros((), device=head.store.device))
        self._received = torch.zeros_like(self.probe)  # what the probe's gradient is, unless somebody has scaled it
        super().__init__([self.probe], {"lr": lr})
        head.pending.on_backward = self._receive

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the centres. Skips the step on all ranks if the pending gradient has NaN or Inf on any. A collective
        of 4 bytes."""
        loss, head = _evaluated(closure), self.head
        if self.probe.grad is not None and not head.pending:
            raise ValueError(
                f"{head.world}: a gradient without a backward (torch's get_state_dict makes such): give get_state_dict "
                "the other optimizers; the state of a head's optimizer is part of the head's"
            )
        good = head.finite().to(head.store.device, torch.int32)
        if head.world.all_reduce(-good, "max", name=f"{head.scope}/finite").item():
            if self.probe.grad is not None and not torch.equal(self.probe.grad, self._received):
                head.scale_gradient((self.probe.grad / self._received).item())
            head.step(self.param_groups[0]["lr"])
        else:
            head.discard()
        self.probe.grad = None
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discards the pending gradient."""
        self.probe.grad = None
        if self.head.pending:
            self.head.discard()

    def _receive(self, grad_loss: Tensor) -> None:
        """Is told of each backward pass."""
        grad = grad_loss.detach().to(self.probe) * PROBE
        self._received = grad if self.probe.grad is None else self._received + grad
        self.probe.grad = self._received.clone()


class JointOptimizer(torch.optim.Optimizer):
    """Several optimizers behind the interface of one: Lightning's automatic optimisation takes no more.

        JointOptimizer(torch.optim.AdamW(backbone.parameters()), head.as_optimizer(lr=0.1))

    Its parameter groups are those of the optimizers, so a scheduler moves all learning rates alike.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer):
        self.optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluates `closure` once, then steps every optimizer."""
        loss = _evaluated(closure)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError for the state of another number of optimizers."""
        states = state_dict["optimizers"]
        if len(states) != len(self.optimizers):
            raise ValueError(f"the state is of {len(states)} optimizers; expected {len(self.optimizers)}")
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]

"""The head behind the interface of torch.optim.Optimizer: schedulers, GradScaler, Lightning and accelerate drive it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from partial_fc.head.partial_fc import PartialFC


class HeadOptimizer(torch.optim.Optimizer):
    """`step` moves the centres with the learning rate of the only parameter group.

    That group has one scalar, `probe`, whose gradient after a backward is the sum of the gradients of the loss, which
    is the loss' scale: where somebody divides it (GradScaler.unscale_), the centres' gradient is divided alike. What
    moves the centres (momentum, weight decay) is the head's own `optimizer`, and its state is saved with the head.
    """

    def __init__(self, head: "PartialFC", lr: float):
        self.head = head
        self.probe = nn.Parameter(torch.zeros((), device=head.store.device))
        self._received = torch.zeros_like(self.probe)  # what the probe's gradient is, unless somebody has scaled it
        super().__init__([self.probe], {"lr": lr})
        head.pending.on_backward = self._receive

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Moves the centres; where the pending gradient has NaN or Inf on any rank the step is left out on all. A
        collective of 4 bytes."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        head = self.head
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
        """Forgets the pending gradient, as for any optimizer."""
        self.probe.grad = None
        if self.head.pending:
            self.head.discard()

    def _receive(self, grad_loss: Tensor) -> None:
        """Is told of each backward pass."""
        grad = grad_loss.detach().to(self.probe)
        self._received = grad if self.probe.grad is None else self._received + grad
        self.probe.grad = self._received.clone()

"""Muon, an optimizer for matrices; and torch's optimizers without the wrappers for torch.compile."""

import math
from inspect import unwrap
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

# Five rounds of the polynomial 3.4445 x - 4.775 x^3 + 2.0315 x^5 bring singular values from 0.004 to 1 to about 1.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ROUNDS = 5
_MOMENTUM = 0.95
_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)


def eager(optimizer: type[_Optimizer]) -> type[_Optimizer]:
    """Removes the wrappers for torch.compile: their first call imports torch._dynamo, in 2 s and 200 MB."""
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    plain: dict[str, Any] = {name: unwrap(getattr(optimizer, name)) for name in names}
    plain["step"] = torch.no_grad()(unwrap(optimizer.step))
    return type(optimizer.__name__, (optimizer,), plain)


_AdamW = eager(torch.optim.AdamW)


class Muon(_AdamW):  # type: ignore[misc, valid-type]
    """Muon for convolutions and matrices of 4 inputs or more, AdamW for the other parameters.

        m = 0.95 m + 0.05 g
        u = orthogonal(0.95 m + 0.05 g)               u u^T = 1, about; a convolution is a matrix (out, in * positions)
        w = w - lr * (weight_decay * w + 0.2 * sqrt(longer side) * u)

    The factor 0.2 * sqrt(longer side) makes steps as long as AdamW's, so that both share learning rate and weight
    decay. (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon; Liu et al., 2025,
    https://arxiv.org/abs/2502.16982.) As torch.optim.Muon with adjust_lr_fn="match_rms_adamw" (in the dtype of w).
    Replicas stay equal if processes multiply alike: same kind of processor, same number of threads.
    """

    param_groups: list[dict]

    def __init__(self, groups: list[dict], weight_decay: float):
        split = []
        for group in groups:
            for matrices in (False, True):
                # Matrices: not vectors, depthwise convolutions and layers on an image's colours.
                members = [p for p in group["params"] if (p.dim() > 1 and p.shape[1] > 3) == matrices]
                split += [{**group, "params": members, "matrices": matrices}] if members else []
        super().__init__(split or groups, lr=0.0, weight_decay=weight_decay)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Updates the parameters that have a gradient; leaves gradients unchanged."""
        groups = self.param_groups
        for group in groups:
            for p in group["params"] if group["matrices"] else ():
                if p.grad is not None:
                    self._step_matrix(p, group["lr"], group["weight_decay"])
        try:
            self.param_groups = [group for group in groups if not group["matrices"]]
            super().step()
        finally:
            self.param_groups = groups

    def _step_matrix(self, p: nn.Parameter, lr: float, weight_decay: float) -> None:
        state = self.state[p]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        assert p.grad is not None
        state["momentum"].lerp_(p.grad, 1 - _MOMENTUM)
        direction = orthogonal(p.grad.lerp(state["momentum"], _MOMENTUM).flatten(1))
        p.mul_(1 - lr * weight_decay)
        p.add_(direction.view(p.shape), alpha=-lr * 0.2 * math.sqrt(max(direction.shape)))


def orthogonal(x: Tensor) -> Tensor:
    """Returns roughly the nearest orthogonal matrix of x (rows, columns): its singular values become 0.7 to 1.2.

    Iterates on x x^T, as wide as x's shorter side: two products with x in all, instead of two a round. Squares of
    singular values below 3e-4 of the norm underflow in fp32; those directions stay small.
    """
    x = x / (x.norm() + 1e-7)
    if x.shape[0] > x.shape[1]:
        return orthogonal(x.T).T
    gram = x @ x.T
    total = torch.eye(len(gram), dtype=x.dtype, device=x.device)
    for _ in range(_ROUNDS):
        # x becomes factor @ x; all of these are polynomials of the first gram and commute.
        factor = torch.addmm(gram, gram, gram, beta=_B, alpha=_C)
        factor.diagonal().add_(_A)
        total = factor @ total
        gram = factor @ gram @ factor
    return total @ x

"""The backbone's optimizer: torch's, Muon, or an SGD whose momentum holds the rate, with state by parameter name."""

import re
from collections.abc import Collection, Iterable
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from partial_fc.optim.muon import Muon, eager

Kind = Literal["sgd", "adamw", "muon"]


class Named(Protocol):
    """A module, or the weights of one (train/precision.py)."""

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...


def build(
    kind: Kind,
    module: Named,
    momentum: float,
    weight_decay: float,
    *,
    nesterov: bool = False,
    lr_in_momentum: bool = False,
    decay_biases: bool = True,
    decay_norms: bool = True,
    no_decay: Collection[str] = (),
    layer_decay: float = 1.0,
    clip_value: float = 0.0,
) -> torch.optim.Optimizer:
    """Builds an optimizer of all parameters that require a gradient. The learning rate is set before each step
    (`set_lr`).

    nesterov, lr_in_momentum: of sgd; the second: see `RateInMomentum`
    decay_biases, decay_norms: whether weight decay moves biases, and weights of batch norms
    no_decay: further parameters without decay, by name or its last part
    layer_decay: see `layer_scales`
    clip_value: with lr_in_momentum, clamps the gradient's numbers; 0: does not
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    free = {
        name
        for name, p in named
        if not (decay_biases if name.rpartition(".")[2] == "bias" else decay_norms or p.dim() > 1)  # a norm's: vectors
        or not {name, name.rpartition(".")[2]}.isdisjoint(no_decay)
    }
    scales = layer_scales([name for name, _ in named], layer_decay) if layer_decay != 1.0 else {}
    members: dict[tuple[bool, float], list[nn.Parameter]] = {(False, 1.0): []}
    for name, p in named:
        members.setdefault((name in free, scales.get(name, 1.0)), []).append(p)
    groups: list[dict] = [
        {"params": params, "lr_scale": scale, **({"weight_decay": 0.0} if is_free else {})}
        for (is_free, scale), params in sorted(members.items(), key=lambda item: item[0])
        if params or not is_free
    ]
    if kind == "sgd" and lr_in_momentum:
        return _RateInMomentum(groups, momentum, weight_decay, nesterov, clip_value)
    if kind == "sgd":
        return _SGD(groups, lr=0.0, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov, foreach=True)
    if kind == "muon":
        return Muon(groups, weight_decay)
    # The fused kernel takes a fifth of the plain one's time on CPUs. It reads tensors as flat memory: gradients and
    # moments must have the parameter's strides (optim/gradient_sync.py, `load_named_state`).
    fused = all(p.dtype == torch.float32 for _, p in named)
    return _AdamW(groups, lr=0.0, weight_decay=weight_decay, fused=fused)


def layer_scales(names: Collection[str], decay: float) -> dict[str, float]:
    """Returns each parameter's share of the learning rate in a transformer of N blocks: decay^(N - n) in block n = 0 to
    N - 1, decay^(N + 1) in what comes before the blocks, 1 in what comes after.

    (Bao et al., 2021, "BEiT", https://arxiv.org/abs/2106.08254.) Raises ValueError for a network without blocks.N.
    """
    block = {name: int(match[1]) for name in names if (match := _BLOCK.match(name))}
    if not block:
        raise ValueError(
            f"--layer-decay {decay:g}: this network has no parameters blocks.0... to blocks.N..., the layers of a "
            "transformer; leave it out"
        )
    depth = max(block.values()) + 1
    return {
        name: decay ** (depth - block[name] if name in block else depth + 1 if _STEM.match(name) else 0)
        for name in names
    }


_BLOCK = re.compile(r"blocks\.(\d+)\.")
_STEM = re.compile(r"patch_embed|pos_embed|norm_pre|\w+_token")


class RateInMomentum(torch.optim.Optimizer):
    """SGD whose momentum m holds steps, not gradients: each gradient keeps the learning rate of its own update.

        g = gradient (each number within clip_value, unless that is 0) + weight_decay * w
        m' = momentum * m + lr * g
        w -= m'
        w -= (1 + momentum) * m' - momentum * m     with nesterov

    torch.optim.SGD multiplies the whole momentum by the current rate instead. The two are equal at a constant rate;
    when it falls to a tenth, torch's steps shrink at once, these within 1 / (1 - momentum) updates.
    """

    def __init__(
        self, groups: list[dict], momentum: float, weight_decay: float, nesterov: bool, clip_value: float = 0.0
    ):
        defaults = {"lr": 0.0, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(groups, {**defaults, "clip_value": clip_value})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates the parameters that have a gradient; leaves gradients unchanged."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            lr, momentum = group["lr"], group["momentum"]
            step = list(torch._foreach_mul([p.grad for p in parameters], lr))
            if group["clip_value"]:
                torch._foreach_clamp_min_(step, -lr * group["clip_value"])
                torch._foreach_clamp_max_(step, lr * group["clip_value"])
            if group["weight_decay"]:
                torch._foreach_add_(step, parameters, alpha=lr * group["weight_decay"])
            if momentum:
                for p in parameters:
                    if not self.state[p]:
                        self.state[p]["momentum"] = torch.zeros_like(p)
                held = [self.state[p]["momentum"] for p in parameters]
                torch._foreach_mul_(held, momentum)
                torch._foreach_add_(held, step)
                # (1 + momentum) m' - momentum m, since m' - momentum m is this step's own part.
                step = list(torch._foreach_add(step, held, alpha=momentum)) if group["nesterov"] else held
            torch._foreach_sub_(parameters, step)


_SGD, _AdamW, _RateInMomentum = eager(torch.optim.SGD), eager(torch.optim.AdamW), eager(RateInMomentum)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def named_state(optimizer: torch.optim.Optimizer, module: Named) -> dict[str, Tensor]:
    """Returns '<parameter>/<state>' -> tensor, for a checkpoint."""
    return {
        f"{name}/{key}": value
        for name, p in module.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor)
    }


def load_named_state(optimizer: torch.optim.Optimizer, module: Named, state: dict[str, Tensor]) -> None:
    """Loads the result of `named_state`, each moment in its parameter's memory layout; missing states start anew.
    Raises ValueError for an unknown parameter, and for a moment of another shape."""
    optimizer.state.clear()
    parameters = dict(module.named_parameters())
    for full_name, value in state.items():
        name, _, key = full_name.rpartition("/")
        if name not in parameters:
            raise ValueError(f"optimizer state {full_name!r} belongs to no parameter of this network")
        p = parameters[name]
        if key == "step":  # AdamW's count, a float: on the host, but for the fused kernel
            optimizer.state[p][key] = value.to(p.device if optimizer.defaults.get("fused") else "cpu")
            continue
        if value.shape != p.shape:
            expected, got = tuple(p.shape), tuple(value.shape)
            raise ValueError(f"optimizer state {full_name!r}: expected shape {expected}, got {got}")
        optimizer.state[p][key] = in_layout_of(p, value)


def in_layout_of(p: Tensor, value: Tensor) -> Tensor:
    """Returns a copy of the value, of p's shape, on p's device and in its memory layout."""
    return torch.empty_like(p, dtype=value.dtype, requires_grad=False).copy_(value)

"""Low-rank adapters (LoRA, Hu et al., 2021, https://arxiv.org/abs/2106.09685), by peft: W becomes W + B A.

A layer X of the network is then X.base_layer, which is frozen, and X.lora_A and X.lora_B, which start as random numbers
and zeros: the network starts as it was.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from partial_fc.errors import package

_BASE, _A, _B = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"


def adapt(module: nn.Module, rank: int, image_size: int) -> str:
    """Puts adapters, random by torch's global generator, on a network of such images, in place; returns a sentence.

    Adapted are torch's linear layers, and convolutions without groups or dilation, that the network calls before the
    last layer. That one and what is called after it train in full, all else is frozen; running statistics of batch
    norms go on.
    Raises ValueError if peft is not installed, or for a network without such layers.
    """
    peft = package("peft", "--lora", "lora")
    torch.backends.mha.set_fastpath_enabled(False)  # torch's transformer layers would use weights without adapters
    called = _called(module, image_size)
    layers = [name for name, part in called.items() if isinstance(part, nn.Linear | nn.Conv2d)]
    inner = [name for name in layers[:-1] if _fits(called[name])]
    if not inner:
        raise ValueError(
            f"--lora {rank}: {type(module).__name__} calls no linear layer or convolution before its last layer: it "
            "has nothing to adapt"
        )
    last, order = layers[-1], list(called)
    in_full = [p for name in order[order.index(last) :] for p in called[name].parameters(recurse=False)]
    in_full = [p for p in in_full if p.requires_grad]
    # A regular expression has to match a whole name; a list of names would match ends.
    config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules="|".join(map(re.escape, inner)))
    peft.inject_adapter_in_model(config, module)
    for p in in_full:
        p.requires_grad_(True)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    total = sum(p.numel() for p in module.parameters())
    return f"adapters on {len(inner)} layers; {trained:,} of {total:,} parameters train, {last} in full"


def merged(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a state of the network without adapters that computes the same, W + B A in place of W."""
    plain = {}
    for name, t in state.items():
        layer, _, kind = name.partition(_BASE)
        adapted = layer + _A in state
        if adapted and kind == "weight":
            t = t + (state[layer + _B].flatten(1) @ state[layer + _A].flatten(1)).view_as(t)
        if not name.endswith((_A, _B)):
            plain[f"{layer}.{kind}" if adapted else name] = t
    return plain


def without_merged(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a state that also has what `merged` made of it, without that."""
    again = {name.replace(_BASE, ".") for name in state if name.partition(_BASE)[0] + _A in state}
    return {name: t for name, t in state.items() if name not in again}


def _fits(layer: nn.Module) -> bool:
    """Returns whether W + B A in place of a layer's weight is what peft's adapter computes: not for subclasses that do
    more than torch's layer, such as those that standardise the weight or pad the image."""
    if isinstance(layer, nn.Conv2d):
        kind = type(layer)
        fits = (kind.forward, kind._conv_forward) == (nn.Conv2d.forward, nn.Conv2d._conv_forward)
        fits = fits and (layer.groups, layer.dilation, layer.padding_mode) == (1, (1, 1), "zeros")
    else:
        fits = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
    return fits and "weight" in layer._parameters


@torch.no_grad()
def _called(module: nn.Module, image_size: int) -> dict[str, nn.Module]:
    """Returns the modules with parameters of their own, in the order in which a forward pass calls them. (A layer whose
    weights are used without a call, as those inside torch's MultiheadAttention, would ignore an adapter.)"""
    names = {part: name for name, part in module.named_modules() if part._parameters}
    called: dict[str, nn.Module] = {}

    def note(part: nn.Module, *_: object) -> None:
        called.setdefault(names[part], part)

    handles = [part.register_forward_pre_hook(note) for part in names]
    try:
        with torch.random.fork_rng(devices=[]):
            module.eval()(torch.zeros(2, 3, image_size, image_size))
    finally:
        module.train()
        for handle in handles:
            handle.remove()
    return called

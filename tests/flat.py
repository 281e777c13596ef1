"""Heads from flat options, as tables of tests have them, and a step of one."""

from typing import Any

import torch

from partial_fc.head import Compute, LossOptions, PartialFC, Sampling, Storage

_GROUPS = {
    "device": (Compute, ("device", "impl", "precision")),
    "sampling": (Sampling, ("quota", "hard_negatives", "catch_up")),
    "loss": (
        LossOptions,
        ("sub_centres", "interclass_filtering_threshold", "ignore_index", "rule", "backbone_gradients"),
    ),
}


def flat_head(num_classes: int, embedding_size: int, *arguments: Any, **options: Any) -> PartialFC:
    """Returns PartialFC(num_classes, embedding_size, *arguments, ...) with the options where they belong. dtype: that
    is computed in, torch.float64 of what is stored so."""
    if options.pop("dtype", torch.float32) == torch.float64:
        options.setdefault("storage", Storage(torch.float64))
    grouped = {}
    for group, (kind, names) in _GROUPS.items():
        given = {name: options.pop(name) for name in names if name in options}
        if group == "sampling" and given:
            given["rate"] = arguments[1] if len(arguments) > 1 else options.pop("sample_rate", 1.0)
            arguments = (*arguments[:1], 1.0, *arguments[2:]) if len(arguments) > 1 else arguments
        if given:
            grouped[group] = kind(**given)
    return PartialFC(num_classes, embedding_size, *arguments, **options, **grouped)


def learn(head: Any, *given: Any, lr: float = 0.1) -> torch.Tensor:
    """A step on features, labels, and what else the head is called with. Returns the loss."""
    loss = head(*given)
    loss.backward()
    head.step(lr)
    return loss.detach()

"""Files of Gluon's trainer.save_states, written by MXNet itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from recipes.kinetics import gluoncv_files as gluoncv

LR = 0.5


def write_states(
    mx: Any,
    model: nn.Module,
    path: Path,
    gradient: Callable[[int], float],
    dtype: str = "float32",
    only: tuple[str, ...] = ("",),
) -> list[str]:
    """The state of NAG after one step at rate LR, as GluonCV's trainer leaves it; gradient: of every number of the
    parameter at a place; only: what the names of its parameters end with. Returns GluonCV's names of these, by
    place."""
    named = {
        f"slowfast0_{gluoncv._gluons_name(name)}": (name, t)
        for name, t in gluoncv.arrays(model).items()
        if name.endswith(only)
    }
    parameters = mx.gluon.ParameterDict()
    for gluons_name, (name, t) in named.items():
        running = "running" in name
        p = parameters.get(
            gluons_name, shape=tuple(t.shape), dtype=dtype, grad_req="null" if running else "write", init="zeros"
        )
        p.initialize()
        p.set_data(mx.nd.array(t.numpy(), dtype=dtype))
    options = {"learning_rate": LR, "momentum": 0.9, "wd": 0.0, "multi_precision": dtype == "float16"}
    options["lr_scheduler"] = mx.lr_scheduler.CosineScheduler(10**6, base_lr=LR)
    trainer = mx.gluon.Trainer(parameters, "nag", options, update_on_kvstore=False)
    order = sorted(named)
    with mx.autograd.record():
        sums = [
            (parameters[gluons_name].data() * gradient(place)).sum()
            for place, gluons_name in enumerate(order)
            if parameters[gluons_name].grad_req != "null"
        ]
    mx.autograd.backward(sums)
    trainer.step(1)
    trainer.save_states(str(path))
    return [named[gluons_name][0] for gluons_name in order]

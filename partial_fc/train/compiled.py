"""torch.compile of a backbone, for training alone: evaluation and all that is written use the module itself."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from partial_fc.comm import World, all_gather_json
from partial_fc.train.batch_norm import GlobalBatchNorm


def compile_module(module: nn.Module, run: Callable[[nn.Module], Tensor], world: World) -> tuple[nn.Module, str]:
    """Returns what training calls instead of the module, and why that is the module itself; "": it is compiled.

    run: calls what it is given with a batch like those of training. Forward and backward are compiled before the first
    step, so that all ranks compile, or none does. A collective.
    """
    if any(isinstance(layer, GlobalBatchNorm) for layer in module.modules()):
        return module, "batch norms of --sync-bn exchange statistics inside the network"
    why = ""
    try:
        # Shapes of a run are constant; a last batch of another size is compiled once more.
        compiled = cast(nn.Module, torch.compile(module, dynamic=False))
        output_B = run(compiled)
        parameters = [p for p in module.parameters() if p.requires_grad]
        torch.autograd.grad(output_B.float().sum(), parameters, allow_unused=True)
    except (RuntimeError, OSError) as error:  # of the compiler, the Python version, memory; its cache, a full disk
        why = " ".join(str(error).split())[:300] or type(error).__name__
    reasons = [reason for reason in all_gather_json(why, world, "start/compile") if reason]
    return (module, reasons[0]) if reasons else (compiled, "")

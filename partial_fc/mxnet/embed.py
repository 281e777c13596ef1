"""Embeddings by MXNet itself, of a network in its own files: what a conversion is compared with."""

from pathlib import Path

import torch
from torch import Tensor

from partial_fc.foreign.mxnet_symbol import EMBEDDING
from partial_fc.mxnet import mx


def embed(symbol: Path, params: Path, image_B3HW: Tensor) -> Tensor:
    """Embeddings of uint8 images on the CPU, float64. Raises ValueError where MXNet cannot load or run the files."""
    try:
        output = mx.sym.load(str(symbol)).get_internals()[f"{EMBEDDING}_output"]
        arrays = mx.nd.load(str(params))
        module = mx.mod.Module(output, data_names=["data"], label_names=None, context=mx.cpu())
        module.bind([("data", tuple(image_B3HW.shape))], for_training=False)
        arg, aux = ({name[4:]: a for name, a in arrays.items() if name.startswith(kind)} for kind in ("arg:", "aux:"))
        module.set_params(arg, aux)
        module.forward(mx.io.DataBatch([mx.nd.array(image_B3HW.numpy())]), is_train=False)
        return torch.from_numpy(module.get_outputs()[0].asnumpy()).double()
    except (mx.base.MXNetError, RuntimeError) as error:
        raise ValueError(f"MXNet cannot run {symbol} with {params}: {str(error).strip().splitlines()[0]}") from error

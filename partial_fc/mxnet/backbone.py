"""MXNet's iresnet: as a torch module that computes in MXNet, and as files for MXNet alone."""

from pathlib import Path

import torch
from torch import Tensor

from partial_fc.foreign.mxnet_symbol import EMBEDDING, mxnet_names, symbol_json
from partial_fc.models.iresnet import IResNet
from partial_fc.mxnet import mx
from partial_fc.mxnet.graph import Graph


class MxnetIResNet(IResNet):
    """An IResNet whose parameters, names, first values and buffers are torch's; forward and backward are MXNet's."""

    graph: Graph

    def forward(self, image_B3HW: Tensor) -> Tensor:
        return self.graph(self, image_B3HW)


def compute_in_mxnet(net: IResNet) -> MxnetIResNet:
    """Converts the network in place. Raises ValueError for one with dropout, which upstream's graph lacks."""
    if net.dropout.p:
        raise ValueError(f"dropout {net.dropout.p:g} in a network for MXNet; expected 0")
    symbol = mx.sym.load_json(symbol_json(net, as_torch=True))
    names = {name: theirs.partition(":")[2] for name, theirs in mxnet_names(net).items()}
    graph = Graph(symbol, net, names, variances_of_torch=True)
    net.__class__ = MxnetIResNet
    assert isinstance(net, MxnetIResNet)
    net.graph = graph
    return net


def embed(symbol: Path, params: Path, image_B3HW: Tensor) -> Tensor:
    """Embeds uint8 images on the CPU from a network's files, float64: the reference of a conversion. Raises ValueError
    if MXNet cannot load or run them."""
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

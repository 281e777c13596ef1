"""An IResNet that computes in MXNet and is a torch module to everybody else."""

from torch import Tensor

from partial_fc.foreign.mxnet_names import mxnet_names
from partial_fc.foreign.mxnet_symbol import symbol_json
from partial_fc.models.iresnet import IResNet
from partial_fc.mxnet import mx
from partial_fc.mxnet.graph import Graph


class MxnetIResNet(IResNet):
    """Parameters, their names and first values, and buffers are torch's; forward and backward are MXNet's."""

    graph: Graph

    def forward(self, image_B3HW: Tensor) -> Tensor:
        return self.graph(self, image_B3HW)


def compute_in_mxnet(net: IResNet) -> MxnetIResNet:
    """Makes the network one that does, in place. Raises ValueError for one with dropout: upstream's graph has none."""
    if net.dropout.p:
        raise ValueError(f"dropout {net.dropout.p:g} in a network for MXNet; expected 0")
    symbol = mx.sym.load_json(symbol_json(net, as_torch=True))
    names = {name: theirs.partition(":")[2] for name, theirs in mxnet_names(net.state_dict()).items()}
    graph = Graph(symbol, net, names, variances_of_torch=True)
    net.__class__ = MxnetIResNet
    assert isinstance(net, MxnetIResNet)
    net.graph = graph
    return net

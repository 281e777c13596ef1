"""Forward and backward of a symbol in MXNet, with weights that a torch module owns.

    module's tensors --copied--> MXNet's arrays      before every forward
    image, feature, gradients                        cross by DLPack, without a copy
    MXNet's gradients --added--> p.grad              by torch, as after any backward
    moving averages --copied--> module's buffers     after every backward, in which MXNet updates them

The optimizer, gradient exchange, guards and checkpoints see a torch module and nothing of MXNet. The weights must be
copies: an evaluation forward leaves MXNet's in oneDNN's memory layout.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import dlpack

from partial_fc.models.iresnet import IResNet

from .library import mx
from .symbol_file import mxnet_names, symbol_json


class Graph:
    """A symbol with its own arrays for one module's tensors.

    symbol: from a variable `data` to one output. names: of the module's parameters and buffers -> all of the symbol's
    arguments and auxiliary states. Running variances divide by n - 1, as torch's (MXNet's: by n), with MXNet's default
    momentum.
    """

    def __init__(self, symbol: "mx.sym.Symbol", module: nn.Module, names: Mapping[str, str]):
        self.symbol = symbol
        block = mx.gluon.SymbolBlock(symbol, [mx.sym.Variable("data", dtype="float32")])
        theirs = {name.removeprefix(block.prefix): p for name, p in block.collect_params().items()}
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        assert theirs.keys() == set(names.values()), theirs.keys() ^ set(names.values())
        for name, its_name in names.items():
            p, tensor = theirs[its_name], parameters.get(name, buffers.get(name))
            assert tensor is not None, name
            # Also for untrained arguments: FullyConnected computes the bias's gradient only together with the weight's.
            p.grad_req = "null" if name in buffers else "write"
            p.shape = tuple(tensor.shape)
            p.initialize(mx.init.Zero(), ctx=mx.cpu(), force_reinit=True)
        block.hybridize()
        self._block = block
        self._arrays = {name: theirs[its_name].data() for name, its_name in names.items()}
        trained = [name for name in names if name in parameters and parameters[name].requires_grad]
        self._gradients = {name: theirs[names[name]].grad() for name in trained}
        self._moving = [name for name in names if name in buffers]
        ends = {name: its_name.removesuffix("_moving_var") for name, its_name in names.items()}
        self._variances = {name: f"{layer}_output" for name, layer in ends.items() if layer != names[name]}
        self._counts: dict[torch.Size, dict[str, int]] = {}

    def __call__(self, module: nn.Module, image_B: Tensor) -> Tensor:
        """Runs the module's forward with its current tensors and mode."""
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name, array in self._arrays.items():
            to_mxnet(tensors[name]).copyto(array)
        parameters = [tensors[name] for name in self._gradients]
        return _Forward.apply(self, tensors, (module.training, torch.is_grad_enabled()), image_B, *parameters)

    def forward(self, image_B: Tensor, training: bool, recording: bool) -> "mx.nd.NDArray":
        scope = mx.autograd.record if recording else mx.autograd.pause
        with scope(train_mode=training):
            return self._block(to_mxnet(image_B))

    def backward(self, output_B: "mx.nd.NDArray", grad_B: Tensor, training: bool) -> list[Tensor]:
        """Returns the gradients of the module's trained parameters, in its order. They are MXNet's memory, which the
        next backward overwrites: add them, do not keep them."""
        output_B.backward(to_mxnet(grad_B), train_mode=training)
        return [to_torch(gradient) for gradient in self._gradients.values()]

    @torch.no_grad()
    def take_moving_averages(self, tensors: Mapping[str, Tensor], image_shape: torch.Size) -> None:
        """Copies MXNet's moving averages into the module's buffers, after a backward. torch also counts the batches."""
        for name in self._moving:
            now, before = to_torch(self._arrays[name]), tensors[name]
            if name in self._variances:
                now = now + (now - MOMENTUM * before) / (self._count(name, image_shape) - 1)
            before.copy_(now)
        for name, tensor in tensors.items():
            if name.endswith("num_batches_tracked"):
                tensor.add_(1)

    def _count(self, variance: str, image_shape: torch.Size) -> int:
        """Returns the number of values in a channel's batch variance. Raises ValueError for one, as torch does."""
        if image_shape not in self._counts:
            internals = self.symbol.get_internals()
            shapes = dict(zip(internals.list_outputs(), internals.infer_shape(data=tuple(image_shape))[1], strict=True))
            self._counts[image_shape] = {
                name: math.prod(shapes[output]) // shapes[output][1] for name, output in self._variances.items()
            }
        count = self._counts[image_shape][variance]
        if count == 1:
            raise ValueError(
                f"expected more than 1 value per channel in training, got {tuple(image_shape)}: {variance}"
            )
        return count


class _Forward(torch.autograd.Function):
    """forward: image_B and parameters (copied to MXNet) -> output_B; backward: the parameters' gradients only."""

    @staticmethod
    def forward(
        ctx: Any, graph: Graph, tensors: dict[str, Tensor], mode: tuple[bool, bool], image_B: Tensor, *_: Tensor
    ) -> Tensor:
        ctx.graph, ctx.tensors, ctx.training = graph, tensors, mode[0]
        ctx.image_shape = image_B.shape
        ctx.output_B = graph.forward(image_B, *mode)
        return to_torch(ctx.output_B)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.graph.backward(ctx.output_B, grads[0], ctx.training)
        if ctx.training:
            ctx.graph.take_moving_averages(ctx.tensors, ctx.image_shape)
        return None, None, None, None, *gradients


MOMENTUM = 0.9  # MXNet's BatchNorm default; torch's 0.1


def to_mxnet(tensor: Tensor) -> "mx.nd.NDArray":
    """Shares the memory, if the tensor is contiguous."""
    # A 1x1 convolution kernel also counts as contiguous with channels-last strides, which MXNet refuses.
    return mx.nd.from_dlpack(dlpack.to_dlpack(tensor.detach().flatten().view(tensor.shape)))


def to_torch(array: "mx.nd.NDArray") -> Tensor:
    """Shares the memory, after pending operations on it."""
    return dlpack.from_dlpack(array.to_dlpack_for_read())


class MxnetIResNet(IResNet):
    """An IResNet whose parameters, names, first values and buffers are torch's; forward and backward are MXNet's."""

    graph: Graph

    def forward(self, image_B3HW: Tensor) -> Tensor:
        return self.graph(self, image_B3HW)


def compute_in_mxnet(net: IResNet) -> MxnetIResNet:
    """Converts the network in place. Raises ValueError for one with dropout, which upstream's graph lacks."""
    if net.dropout.p:
        raise ValueError(f"dropout {net.dropout.p:g} in a network for MXNet; expected 0")
    symbol = mx.sym.load_json(symbol_json(net))
    names = {name: theirs.partition(":")[2] for name, theirs in mxnet_names(net).items()}
    graph = Graph(symbol, net, names)
    net.__class__ = MxnetIResNet
    assert isinstance(net, MxnetIResNet)
    net.graph = graph
    return net

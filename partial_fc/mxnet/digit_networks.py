"""The two networks of MXNet's train_mnist.py, with the names of its parameters, so that its files fit.

mlp: 128, 64, classes, with ReLU; 109,386 parameters at 28 x 28 pixels and 10 classes. lenet: twice a convolution 5 x 5
(20, 50), tanh and a pooling of 2, then 500, tanh, classes; 431,080. Sizes and names are those of example/
image-classification/symbols in MXNet 1.9.1; lenet's layers have no names there, but the numbers that MXNet gives them.
"""

from partial_fc.mxnet import mx

SMALLEST_SIDE = {"lenet": 16, "mlp": 1}


def build(network: str, num_classes: int) -> mx.sym.Symbol:
    """The network with its softmax; its inputs are "data", (B, 1, H, W), and "softmax_label", (B,)."""
    data = mx.sym.Variable("data")
    logits = {"lenet": _lenet, "mlp": _mlp}[network](data, num_classes)
    return mx.sym.SoftmaxOutput(logits, name="softmax")


def _mlp(data: mx.sym.Symbol, num_classes: int) -> mx.sym.Symbol:
    x = mx.sym.Flatten(data, name="flatten0")
    for number, width in enumerate((128, 64), start=1):
        x = mx.sym.FullyConnected(x, num_hidden=width, name=f"fc{number}")
        x = mx.sym.Activation(x, act_type="relu", name=f"relu{number}")
    return mx.sym.FullyConnected(x, num_hidden=num_classes, name="fc3")


def _lenet(data: mx.sym.Symbol, num_classes: int) -> mx.sym.Symbol:
    x = data
    for number, width in enumerate((20, 50)):
        x = mx.sym.Convolution(x, kernel=(5, 5), num_filter=width, name=f"convolution{number}")
        x = mx.sym.Activation(x, act_type="tanh", name=f"activation{number}")
        x = mx.sym.Pooling(x, pool_type="max", kernel=(2, 2), stride=(2, 2), name=f"pooling{number}")
    x = mx.sym.Flatten(x, name="flatten0")
    x = mx.sym.FullyConnected(x, num_hidden=500, name="fullyconnected0")
    x = mx.sym.Activation(x, act_type="tanh", name="activation2")
    return mx.sym.FullyConnected(x, num_hidden=num_classes, name="fullyconnected1")

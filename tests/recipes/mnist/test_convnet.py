"""The tutorial's network."""

import pytest
import torch
from torch import nn

from recipes.mnist.convnet import ConvNet


@pytest.mark.parametrize("training", [True, False])
def test_equals_the_tutorials_sequence(training):
    """Written as the tutorial's text describes it, with torch's functions."""
    torch.manual_seed(0)
    net = ConvNet().train(training)
    image_B1HW = torch.rand(7, 1, 28, 28)
    expected = image_B1HW
    for layer in (net.layer1, net.layer2):
        convolution, norm = layer[0], layer[1]
        expected = nn.functional.conv2d(expected, convolution.weight, convolution.bias, padding=2)
        own = (norm.running_mean.clone(), norm.running_var.clone())
        expected = nn.functional.batch_norm(expected, *own, norm.weight, norm.bias, training)
        expected = nn.functional.max_pool2d(nn.functional.relu(expected), 2)
    expected = nn.functional.linear(expected.flatten(1), net.fc.weight, net.fc.bias)
    torch.testing.assert_close(net(image_B1HW), expected, rtol=0, atol=0)
    channels_last = net(image_B1HW.to(memory_format=torch.channels_last))
    torch.testing.assert_close(channels_last, expected, rtol=1e-5, atol=1e-5)

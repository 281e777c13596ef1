"""Apex's amp_checkpoint.pt, written and read."""

import copy
from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch import nn

from partial_fc.foreign.state_dicts import check_fits
from recipes.mnist import apex
from recipes.mnist.convnet import ConvNet

ADVICE = r"expected \{'loss_scaler0': \{'loss_scale': x, 'unskipped': n\}\}, two numbers of the one loss"


FusedAdamW = partial(torch.optim.AdamW, fused=True)


def trained(momentum: float = 0.9, kind=torch.optim.SGD) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network and its optimizer after one update."""
    torch.manual_seed(0)
    net = ConvNet()
    optimizer = kind(net.parameters(), lr=0.1, **({"momentum": momentum} if kind is torch.optim.SGD else {}))
    net(torch.rand(4, 1, 28, 28)).square().mean().backward()
    optimizer.step()
    return net, optimizer


def by_apex(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """What Apex's documentation saves, of a model in DistributedDataParallel."""
    return {
        "model": OrderedDict((f"module.{name}", t) for name, t in net.state_dict().items()),
        "optimizer": optimizer.state_dict(),
        "amp": OrderedDict(loss_scaler0={"loss_scale": 32768.0, "unskipped": 17}),
    }


def saved(tmp_path, content) -> apex.ApexCheckpoint:
    torch.save(content, tmp_path / "amp_checkpoint.pt")
    return apex.read(tmp_path / "amp_checkpoint.pt")


def continued(net, optimizer) -> dict[str, torch.Tensor]:
    """The weights after one more update, which momentum is part of."""
    optimizer.zero_grad()
    net(torch.ones(4, 1, 28, 28)).square().mean().backward()
    optimizer.step()
    return net.state_dict()


assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, FusedAdamW])
@pytest.mark.parametrize("writer", ["ours", "apex"])
def test_what_was_written_goes_on_bit_by_bit(tmp_path, writer, kind):
    net, optimizer = trained(kind=kind)
    if writer == "ours":
        path = tmp_path / "new folder" / "amp_checkpoint.pt"
        apex.write(path, net.state_dict(), optimizer, 32768.0, 17)
        found = apex.read(path)
    else:
        content = copy.deepcopy(by_apex(net, optimizer))
        for state in content["optimizer"]["state"].values():  # as of a network in channels-last
            state |= {k: t.to(memory_format=torch.channels_last) for k, t in state.items() if t.dim() == 4}
        found = saved(tmp_path, content)
    assert (found.loss_scale, found.unskipped) == (32768.0, 17)

    other = ConvNet()
    own = kind(other.parameters(), lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    other.load_state_dict(found.model)
    apex.load_optimizer(found, own)
    assert_equal(other.state_dict(), net.state_dict())
    assert_equal(continued(other, own), continued(net, optimizer))


def test_layout_is_apexs(tmp_path):
    net, optimizer = trained()
    apex.write(tmp_path / "amp_checkpoint.pt", net.state_dict(), optimizer)
    content = torch.load(tmp_path / "amp_checkpoint.pt", weights_only=True)
    assert list(content) == ["model", "optimizer", "amp"]
    assert content["amp"] == {"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}}
    assert_equal(content["model"], net.state_dict())
    own = torch.optim.SGD(ConvNet().parameters(), lr=1.0, momentum=0.9)
    own.load_state_dict(content["optimizer"])  # torch takes it as its own
    assert own.param_groups[0]["lr"] == 0.1
    assert [path.name for path in tmp_path.iterdir()] == ["amp_checkpoint.pt"]


def test_half_weights_are_widened_when_loaded_and_refused_when_written(tmp_path):
    net, optimizer = trained()
    content = by_apex(net, optimizer)
    content["model"] = {name: t.half() if t.is_floating_point() else t for name, t in content["model"].items()}
    found = saved(tmp_path, content)
    other = ConvNet()
    check_fits(found.model, other.state_dict(), found.path, "ConvNet")
    other.load_state_dict(found.model)
    assert other.fc.weight.dtype == torch.float32
    assert torch.equal(other.fc.weight, net.fc.weight.half().float())
    with pytest.raises(ValueError, match=r"is torch.float16; Apex's files hold fp32"):
        apex.write(tmp_path / "half.pt", net.half().state_dict(), optimizer)


def test_momentum_that_is_not_there_yet(tmp_path):
    """Without momentum torch's SGD keeps nothing; older versions wrote None."""
    net, optimizer = trained(momentum=0)
    content = by_apex(net, optimizer)
    content["optimizer"]["state"] = {number: {"momentum_buffer": None} for number in range(10)}
    _, own = trained(momentum=0)
    apex.load_optimizer(saved(tmp_path, content), own)
    assert not any(own.state[p] for group in own.param_groups for p in group["params"])


def changed(content: dict, *path_and_value) -> dict:
    *path, last, value = path_and_value
    content = copy.deepcopy(content)
    at = content
    for key in path:
        at = at[key]
    at[last] = value
    return content


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("amp", {"scale": 65536.0, "growth_tracker": 3}), f"torch's GradScaler, not Apex's; {ADVICE}"),
        (("amp", {}), rf"its amp is \{{\}}; {ADVICE}"),
        (("amp", "loss_scaler1", {"loss_scale": 1.0, "unskipped": 0}), ADVICE),
        (("amp", "loss_scaler0", {"loss_scale": 1.0}), ADVICE),
        (("amp", "loss_scaler0", {"loss_scale": "dynamic", "unskipped": 0}), ADVICE),
        (("amp", "loss_scaler0", "unskipped", float("inf")), ADVICE),
        (("amp", "loss_scaler0", "unskipped", torch.ones(2)), ADVICE),
        (("amp", "loss_scaler0", "loss_scale", 0.0), "loss scale 0.0, unskipped 17; expected above 0"),
        (("amp", "loss_scaler0", "loss_scale", float("nan")), "loss scale nan"),
        (("optimizer", [1, 2]), "its optimizer is no torch state dict"),
        (("model", {}), "its model is no state dict"),
        (("model", "module.fc.bias", 3), "its model is no state dict"),
    ],
)
def test_other_layouts_are_named(tmp_path, change, message):
    with pytest.raises(ValueError, match=message) as error:
        saved(tmp_path, changed(by_apex(*trained()), *change))
    assert "amp_checkpoint.pt" in str(error.value)


def test_a_state_dict_alone(tmp_path):
    with pytest.raises(ValueError, match=r"model, optimizer, amp; got the keys \['fc.bias'"):
        saved(tmp_path, ConvNet().state_dict())
    with pytest.raises(ValueError, match="got Tensor"):
        saved(tmp_path, torch.zeros(3))


def test_another_model(tmp_path):
    net, optimizer = trained()
    content = by_apex(net, optimizer)
    found = saved(tmp_path, content)
    other = ConvNet(num_classes=4)
    with pytest.raises(ValueError, match=r"fc.weight is \(10, 1568\), expected \(4, 1568\)"):
        check_fits(found.model, other.state_dict(), found.path, "ConvNet")
    with pytest.raises(ValueError, match=r"momentum_buffer of parameter 8 has shape \(10, 1568\)"):
        apex.load_optimizer(found, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(ValueError, match=r"has 10 parameters, this one 2"):
        apex.load_optimizer(found, torch.optim.SGD(net.fc.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"keeps \['exp_avg', 'exp_avg_sq', 'step'\]"):
        apex.load_optimizer(found, trained(kind=torch.optim.AdamW)[1])
    del content["model"]["module.fc.bias"]
    content["model"]["module.head.bias"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"this ConvNet: 1 missing: fc.bias; 1 unexpected: head.bias"):
        check_fits(saved(tmp_path, content).model, net.state_dict(), tmp_path, "ConvNet")

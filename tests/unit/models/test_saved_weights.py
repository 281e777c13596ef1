"""Weights that other programs saved: from wrapped networks, of another size, and as whole models."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import partial_fc
from partial_fc import models
from partial_fc.foreign.state_dicts import load_state, read_weights, without_prefix
from recipes.face.backbone import ModelFlags, build


class Holder(nn.Module):
    """A network and its head, as Lightning modules and many training scripts hold them."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"backbone": network})
        self.head = nn.Linear(16, 5)


@pytest.fixture
def one_process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("wrapped", "file"),
    [
        ("ddp", "state dict"), ("compile", "lightning"), ("compile in ddp", "by hand"), ("holder", "safetensors"),
        ("compiled layer", "state dict"), ("network called net", "by hand"),
    ],
)  # fmt: skip
def test_weights_of_a_wrapped_network_load_everywhere(one_process_group, tmp_path, wrapped, file):
    torch.manual_seed(0)
    source = models.build("tiny", embedding_size=16, image_size=16).eval()
    wrap = {
        "ddp": nn.parallel.DistributedDataParallel,
        "compile": torch.compile,
        "compile in ddp": lambda network: nn.parallel.DistributedDataParallel(torch.compile(network)),
        "holder": Holder,
        "compiled layer": compiled_layer,
        "network called net": lambda network: nn.ModuleDict({"net": network}),
    }[wrapped]
    before = {name: t.clone() for name, t in source.state_dict().items()}
    state = wrap(source).state_dict()
    assert state.keys() != before.keys()
    path = tmp_path / ("model.safetensors" if file == "safetensors" else "last.ckpt")
    if file == "safetensors":
        save_file(state, path)
    else:
        torch.save({"state dict": state, "lightning": {"state_dict": state, "epoch": 3},
                    "by hand": {"model": state, "optimizer": {"step": 1}}}[file], path)  # fmt: skip
    target = models.build("tiny", embedding_size=16, image_size=16)
    load_state(target, read_weights(path)[0], path)
    assert all(torch.equal(before[name], t) for name, t in target.state_dict().items())
    assert all(torch.equal(before[name], t) for name, t in partial_fc.load(path).network.state_dict().items())


def compiled_layer(network):
    network.layer1 = torch.compile(network.layer1)
    return network


def test_names_of_two_networks_stay_apart():
    """Where dropping a prefix would make two tensors one, or take a part of a network for the whole, nothing is."""
    t = torch.zeros(1)
    for names in (("_orig_mod.fc", "fc"), ("module.fc", "conv1", "bn1"), ("backbone.fc", "model.fc")):
        assert tuple(without_prefix(dict.fromkeys(names, t))) == names
    assert without_prefix({}) == {}


def network(path: Path, **more) -> nn.Module:
    """What recipe face builds with --pretrained `path`."""
    return build(ModelFlags(network="tiny", pretrained=path, **more), 16, torch.device("cpu"))


def test_pretrained_partial_takes_what_fits_and_lists_the_rest(tmp_path):
    torch.manual_seed(0)
    weights = models.build("tiny", embedding_size=16, image_size=16).state_dict()
    missing = weights.pop("bn1.weight")
    weights["mask"] = torch.zeros(3)
    path = tmp_path / "model.pt"
    torch.save(weights, path)
    with pytest.raises(ValueError, match=r"--pretrained .*; --pretrained-partial takes what fits$"):
        network(path, embedding_size=24)
    built = network(path, embedding_size=24, pretrained_partial=True)
    own = built.module.state_dict()
    taken = [name for name in own if name in weights and weights[name].shape == own[name].shape]
    assert all(torch.equal(own[name], weights[name]) for name in taken)
    (note,) = built.notes
    assert note.startswith(f"--pretrained-partial: {len(taken)} of the network's {len(own)} tensors from {path}; ")
    assert "1 missing: bn1.weight; 1 unexpected: mask; " in note
    assert "fc.weight is (16, " in note
    assert own["bn1.weight"].shape == missing.shape
    assert len(note) < 1000
    torch.save({"other.weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=r"none of its tensors fits this network: .*1 unexpected: other\.weight"):
        network(path, embedding_size=24, pretrained_partial=True)

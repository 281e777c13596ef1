"""The backbone's optimizers against written-out references."""

import copy
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from partial_fc import checkpoint
from partial_fc.comm import SingleWorld
from partial_fc.models import vit
from partial_fc.models.inputs import FACE
from partial_fc.optim.backbone import build, load_named_state, named_state, set_lr
from partial_fc.train.backbone import TorchBackbone
from partial_fc.train.precision import Precision
from recipes.imagenet import resnet
from tests.unit.optim.test_muon import stepped

RATES = (0.1, 0.1, 0.01, 0.01)
CARRIED = {"lr_in_momentum": True}


class Toy(nn.Module):
    """Loss curvature / 2 * |w|^2, in double precision."""

    def __init__(self, w, curvature=1.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64))
        self.curvature = curvature

    def forward(self):
        return self.curvature / 2 * self.w.square().sum()


def trained(toy, rates, optimizer):
    for lr in rates:
        set_lr(optimizer, lr)
        optimizer.zero_grad()
        toy().backward()
        optimizer.step()
    return toy.w.detach().numpy()


def reference(w, curvature, rates, momentum, decay, nesterov):
    """As Caffe2's momentum_sgd_op.h has it, and MXNet's sgd_mom_update."""
    w, m = np.array(w), 0.0
    for lr in rates:
        g = curvature * w + decay * w
        new = momentum * m + lr * g
        w = w - ((1 + momentum) * new - momentum * m if nesterov else new)
        m = new
    return w


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("rates", [RATES, (0.0, 0.05, 0.1, 0.02, 0.0, 0.3), (0.1,) * 6])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_equals_the_written_out_momentum(nesterov, rates, decay):
    start = [1.0, -2.0, 0.3]
    toy = Toy(start, 0.8)
    end = trained(toy, rates, build("sgd", toy, 0.9, decay, nesterov=nesterov, lr_in_momentum=True))
    np.testing.assert_allclose(end, reference(start, 0.8, rates, 0.9, decay, nesterov), rtol=0, atol=1e-15)


def test_biases_do_not_decay_but_batch_norms_weights_do():
    """Caffe2's WEIGHT tag: convolutions, the last layer, and the scale of batch norms."""
    model = resnet.build("resnet18", 10)
    for options in ({}, CARRIED):
        optimizer = build("sgd", model, 0.9, 1e-4, decay_biases=False, **options)
        decayed = {id(p) for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
        names = {name for name, p in model.named_parameters() if id(p) in decayed}
        assert {g["weight_decay"] for g in optimizer.param_groups} == {1e-4, 0.0}
        assert names == {name for name, _ in model.named_parameters() if not name.endswith("bias")}
        assert {"bn1.weight", "layer2.0.downsample.1.weight", "fc.weight", "conv1.weight"} <= names
        assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(model.parameters()))


def test_gluons_no_wd_leaves_out_all_vectors():
    model = resnet.build("resnet18", 10)
    optimizer = build("sgd", model, 0.9, 1e-4, decay_biases=False, decay_norms=False, **CARRIED)
    decayed = [p for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]]
    assert {p.dim() for p in decayed} == {2, 4}
    assert len(decayed) == sum(p.dim() > 1 for p in model.parameters())


def test_clipped_numbers_of_a_gradient():
    """MXNet's clip_gradient: before the decay, each number by itself."""
    toy = Toy([3.0, -0.5, 0.01])
    end = trained(toy, [0.1], build("sgd", toy, 0.0, 0.2, clip_value=0.4, **CARRIED))
    start = np.array([3.0, -0.5, 0.01])
    np.testing.assert_allclose(end, start - 0.1 * (np.clip(start, -0.4, 0.4) + 0.2 * start))


def backbone_in(mode):
    torch.manual_seed(0)
    world, precision = SingleWorld(), Precision(mode, torch.device("cpu"))
    if precision.scaler:
        precision.scaler.scale = 64.0  # nothing overflows
    convolution = nn.Conv2d(3, 6, 3, stride=2)
    module = nn.Sequential(convolution, nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(54, 3))
    module = module.to(dtype=precision.parameter_dtype)
    options = {"nesterov": True, "lr_in_momentum": True, "decay_biases": False}
    make = partial(build, "sgd", momentum=0.9, weight_decay=1e-2, **options)
    backbone = TorchBackbone(module, world, precision, make, FACE, {})
    backbone.keep_statistics()
    backbone.train()
    return backbone


def gradients(backbone, seed):
    generator = torch.Generator().manual_seed(seed)
    image = torch.randint(0, 256, (4, 3, 8, 8), generator=generator).to(torch.uint8)
    backbone.zero(4)
    logit = backbone.forward(image)
    nn.functional.cross_entropy(logit, torch.arange(4) % 3).backward()
    backbone.backward(logit.grad)
    backbone.wait()
    assert backbone.finite()


@pytest.mark.parametrize("mode", ["fp64", "fp16-o2"])
def test_the_loops_backbone_skips_clips_stores_and_goes_on(mode):
    first, second = backbone_in(mode), backbone_in(mode)
    for seed, lr in enumerate((0.0, 0.1, 0.1)):
        gradients(first, seed)
        first.scale(0.5 / first.precision.loss_scale)
        first.step(lr)
    weights, state, _ = map(checkpoint.copied, first.state())
    assert {name.rpartition("/")[2] for name in state} == {"momentum"}
    assert len(state) == len(list(first.module.parameters()))

    gradients(first, 3)
    first.undo()
    after, state_after, _ = first.state()
    assert all(torch.equal(a, after[name]) for name, a in weights.items() if "tracked" not in name)
    assert all(torch.equal(a, state_after[name]) for name, a in state.items())

    stored = SimpleNamespace(backbone=lambda: weights, optimizer=lambda: state, buffers=lambda world: {}, folder="x")
    stored.manifest = {"loss_scaler": first.scaler and first.scaler.state()}
    second.load(stored)
    for backbone in (first, second):
        gradients(backbone, 4)
        backbone.scale(1 / backbone.precision.loss_scale)
        backbone.step(0.01)
    for (name, a), (_, b) in zip(first.weights.named_parameters(), second.weights.named_parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.isfinite().all()


@pytest.mark.parametrize(("dtype", "fused"), [(torch.float32, True), (torch.float64, False)])
@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_a_channels_last_network_goes_on_to_the_same_bits_from_stored_moments(device, dtype, fused):
    """Stored moments are contiguous; the fused AdamW reads them as flat memory."""
    torch.manual_seed(0)
    start = nn.Conv2d(3, 6, 3).to(device, dtype, memory_format=torch.channels_last)
    gradients = [{name: torch.randn_like(p) for name, p in start.named_parameters()} for _ in range(3)]
    optimizer = build("adamw", start, 0.9, 0.01)
    assert {group["fused"] for group in optimizer.param_groups} == {fused}
    stepped(optimizer, start, gradients[:2], 0.1)
    stored = {name: t.cpu().clone(memory_format=torch.contiguous_format)
              for name, t in named_state(optimizer, start).items()}  # fmt: skip
    resumed = copy.deepcopy(start)
    again = build("adamw", resumed, 0.9, 0.01)
    load_named_state(again, resumed, stored)
    stepped(optimizer, start, gradients[2:], 0.1)
    stepped(again, resumed, gradients[2:], 0.1)
    assert all(torch.equal(p, q) for p, q in zip(start.parameters(), resumed.parameters(), strict=True))
    assert again.state[resumed.weight]["exp_avg"].stride() == resumed.weight.stride()
    with pytest.raises(ValueError, match=r"'weight/exp_avg': expected shape \(6, 3, 3, 3\), got \(1,\)"):
        load_named_state(again, resumed, {"weight/exp_avg": torch.ones(1)})


# ---- groups of a transformer's parameters


def test_a_transformer_decays_its_matrices_alone():
    model = vit.VisionTransformer(vit.Size(64, 2), 8, 32)
    optimizer = build("adamw", model, 0.9, 0.1, decay_biases=False, decay_norms=False, no_decay=model.no_weight_decay())
    name_of = {p: name for name, p in model.named_parameters()}
    decayed, free = ({name_of[p] for p in group["params"]} for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert {"pos_embed", "mask_token", "norm.weight", "blocks.0.norm1.bias", "feature.1.weight"} <= free
    assert all(name.endswith(".weight") for name in decayed)
    assert {"patch_embed.proj.weight", "blocks.1.attn.qkv.weight", "feature.0.weight"} <= decayed


def test_layer_decay_falls_from_the_output_to_the_patches():
    model = vit.VisionTransformer(vit.Size(64, 3), 8, 32)
    optimizer = build("adamw", model, 0.9, 0.1, layer_decay=0.5)
    set_lr(optimizer, 1.6)
    rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    found = {name: rate[id(p)] for name, p in model.named_parameters()}
    assert [found[f"blocks.{n}.mlp.fc1.weight"] for n in range(3)] == pytest.approx([0.2, 0.4, 0.8])
    assert found["patch_embed.proj.weight"] == found["pos_embed"] == pytest.approx(0.1)
    assert found["norm.weight"] == found["feature.2.weight"] == 1.6
    with pytest.raises(ValueError, match=r"--layer-decay 0.5: this network has no parameters blocks.0"):
        build("adamw", nn.Linear(2, 2), 0.9, 0.1, layer_decay=0.5)

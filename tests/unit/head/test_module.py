"""The head in other people's modules, loops and checkpoints."""

import copy
import json
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from partial_fc.comm import SingleWorld
from partial_fc.head import AdaFace, CosFace, HardNegatives, JointOptimizer, PartialFC, RowSGD
from tests.flat import flat_head, learn
from tests.unit.thread_world import in_world

C, D = 41, 8


class Model(nn.Module):
    """What everybody writes."""

    def __init__(self, norm: bool = False, **options):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(5, D), nn.BatchNorm1d(D)) if norm else nn.Linear(5, D)
        self.head = flat_head(C, D, **{"margin": CosFace(scale=8.0), **options})

    def forward(self, x, label):
        return self.head(self.net(x), label)


def batch(step: int, num_rows: int = 6):
    random = torch.Generator().manual_seed(step)
    return torch.randn(num_rows, 5, generator=random), torch.randint(0, C, (num_rows,), generator=random)


def train(model: Model, steps: range) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        model.head.step(0.1)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "options",
    [{}, {"sub_centres": 2}, {"sample_rate": 0.2, "margin": AdaFace(), "hard_negatives": HardNegatives(C, k=2)}],
)
def test_a_model_saved_the_naive_way_goes_on_where_it_stopped(tmp_path, options):
    """Rows, their optimizer, the margin's memory, hard negatives, and the step that decides the negatives."""
    # (The seed decides which classes are sampled.)
    model, other = Model(**copy.deepcopy(options)), Model(**copy.deepcopy(options))
    train(model, range(5))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert "head.classes_0_41.centres" in model.state_dict()
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert train(other, range(5, 9)) == train(model, range(5, 9))


def test_the_state_is_tensors_and_older_ones_with_a_dict_load(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, other, older = Model(), Model(), Model()
    train(model, range(3))
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    state = safetensors.load_file(tmp_path / "model.safetensors")
    other.load_state_dict(state)
    state["head._extra_state"] = json.loads(bytes(state["head._extra_state"].tolist()))
    older.load_state_dict(state)
    assert train(other, range(3, 5)) == train(older, range(3, 5)) == train(model, range(3, 5))


def test_a_joint_optimizer_steps_and_saves_all():
    model = Model()
    parts = torch.optim.SGD(model.net.parameters(), lr=0.1, momentum=0.9), model.head.as_optimizer(lr=0.2)
    joint = JointOptimizer(*parts)
    schedule = torch.optim.lr_scheduler.StepLR(joint, 1, gamma=0.5)
    before = model.head.centres.clone(), model.net.weight.clone()
    feat, label = torch.randn(6, 5), torch.arange(6)

    def closure():
        joint.zero_grad()
        loss = model(feat, label)
        loss.backward()
        return loss

    assert joint.step(closure) > 0
    schedule.step()
    assert [group["lr"] for part in parts for group in part.param_groups] == [0.05, 0.1]
    assert not torch.equal(before[0], model.head.centres)
    assert not torch.equal(before[1], model.net.weight)
    state = joint.state_dict()
    again = JointOptimizer(torch.optim.SGD(model.net.parameters(), lr=1.0), model.head.as_optimizer(lr=1.0))
    again.load_state_dict(state)
    assert [group["lr"] for group in again.param_groups] == [0.05, 0.1]
    assert again.optimizers[0].state
    with pytest.raises(ValueError, match="of 2 optimizers; expected 1"):
        JointOptimizer(parts[0]).load_state_dict(state)


def test_centres_are_no_parameters_and_a_state_without_them_is_missing_them():
    model = Model()
    assert [name for name, _ in model.named_parameters()] == ["net.weight", "net.bias"]
    assert [name for name, _ in model.named_buffers()] == ["head.centre_rows"]
    with pytest.raises(RuntimeError, match=r"Missing key.*head\.classes_0_41\.centres"):
        model.load_state_dict({"net.weight": model.net.weight, "net.bias": model.net.bias})
    with pytest.raises(RuntimeError, match=r"\['weight'\].*another layer"):
        model.head.load_state_dict(nn.Linear(D, C, bias=False).state_dict(), strict=False)


def test_the_state_of_rank_0_alone_is_refused_by_range():
    (state, _) = in_world(2, lambda world: Model(world=world).state_dict())

    def load(world):
        with pytest.raises(RuntimeError, match=r"classes \[0, 21\), this rank \[21, 41\)"):
            Model(world=world).load_state_dict(state, strict=False)

    in_world(2, lambda world: load(world) if world.rank else None)
    with pytest.raises(RuntimeError, match=r"classes \[0, 21\), this rank \[0, 41\).*torch.distributed.checkpoint"):
        Model().load_state_dict(state)


def test_copies_are_heads_of_their_own():
    model = Model(sample_rate=0.3, hard_negatives=HardNegatives(C, k=2))
    train(model, range(4))
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    expected = train(model, range(4, 8))
    for twin in twins:
        assert train(twin, range(4, 8)) == expected
    assert not copy.deepcopy(model.eval()).head.training


def test_a_sharded_head_cannot_be_pickled():
    def on_rank(world):
        with pytest.raises(TypeError, match="state_dict"):
            pickle.dumps(Model(world=world))

    in_world(2, on_rank)


def test_moves_and_modes():
    model = Model()
    x, label = batch(0)
    trained = model(x, label)
    assert model.eval()(x, label).requires_grad is False
    assert not model.head.pending
    assert model.to("cpu").half().head.centres.dtype == torch.float32
    assert trained.requires_grad
    with pytest.raises(ValueError, match="device='meta'"):
        model.to("meta")


def test_torch_distributed_checkpoint_loads_on_any_number_of_ranks(tmp_path):
    """One process saves and loads here; tests/parallel has several. The names of classes 0 to 40 are the same."""
    head, other = (PartialFC(C, D, CosFace(scale=8.0), seed=seed, optimizer=RowSGD(0.9, 0.0)) for seed in (1, 2))
    for each, steps in ((head, 3), (other, 1)):
        for step in range(steps):
            feat = torch.randn(4, D, generator=torch.Generator().manual_seed(step)).requires_grad_()
            learn(each, feat, torch.arange(4))
    dcp.save({"head": head.sharded()}, checkpoint_id=tmp_path / "step")
    dcp.load({"head": other.sharded()}, checkpoint_id=tmp_path / "step")
    assert other.num_steps == 3
    for name, t in head.rows.tables().items():
        assert torch.equal(other.rows.tables()[name], t), name
    with pytest.raises(BaseException, match="Size mismatch"):
        dcp.load({"head": PartialFC(C + 1, D, CosFace()).sharded()}, checkpoint_id=tmp_path / "step")


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_classes", [3, 40, 42, 97])
def test_resized_rows_are_those_of_before_and_new_ones_those_of_a_fresh_head(world_size, num_classes):
    def on_rank(world):
        head = flat_head(C, D, CosFace(scale=8.0), sample_rate=0.5, world=world, sub_centres=2)
        feat = torch.randn(6, D, generator=torch.Generator().manual_seed(world.rank)).requires_grad_()
        learn(head, feat, torch.arange(6) * 6)
        before = {name: world.all_gather(t, name="x") for name, t in head.rows.tables().items()}
        head.resize(num_classes)
        after = {name: world.all_gather(t, name="x") for name, t in head.rows.tables().items()}
        centres = world.all_gather(head.centres, name="x")
        learn(head, feat, torch.arange(6) % num_classes)
        return before, after, centres, head.num_steps, len(head.shard)

    before, after, centres, num_steps, _ = in_world(world_size, on_rank)[0]
    kept = min(C, num_classes)
    for name, t in after.items():
        assert len(t) == num_classes
        assert torch.equal(t[:kept], before[name][:kept]), name
    fresh = flat_head(num_classes, D, CosFace(), sub_centres=2).centres
    assert torch.equal(centres[kept:], fresh[kept:])
    assert num_steps == 2


# ---- learning through torch's interfaces


def test_the_optimizer_does_what_step_does_and_schedulers_move_its_rate():
    one, other = Model(), Model()
    optimizer = other.head.as_optimizer(lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for step in range(5):
        rate = optimizer.param_groups[0]["lr"]
        losses = []
        for model in (one, other):
            loss = model(*batch(step))
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == losses[1]
        one.head.step(rate)
        optimizer.step()
        scheduler.step()
    assert rate == 0.025
    assert torch.equal(one.head.centres, other.head.centres)


def test_a_grad_scaler_unscales_the_centres_gradient_and_leaves_out_what_is_not_finite():
    one, other = Model(dtype=torch.float64).double(), Model(dtype=torch.float64).double()
    optimizer = other.head.as_optimizer(lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, label = batch(0)
    one(x.double(), label).backward()
    one.head.step(0.1)
    scaler.scale(other(x.double(), label)).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(one.head.centres, other.head.centres, rtol=1e-9, atol=0)
    before = other.head.centres.clone()
    (other(x.double(), label) * torch.inf).backward()
    optimizer.step()
    assert torch.equal(other.head.centres, before)
    assert not other.head.pending


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_clipping_counts_the_backbone_alone_and_scales_the_centres_alike(clip):
    """Over all parameters of the optimizers, as Lightning's gradient_clip_val does."""
    one, other = Model(), Model()
    optimizers = torch.optim.SGD(one.net.parameters(), lr=0.1), torch.optim.SGD(other.net.parameters(), lr=0.1)
    joint = JointOptimizer(optimizers[1], other.head.as_optimizer(lr=0.2))
    for model in (one, other):
        model(*batch(0)).backward()
    gradient = one.net.weight.grad.clone()
    most = 0.5 * gradient.norm().item() if clip is nn.utils.clip_grad_norm_ else 0.5 * gradient.abs().max().item()
    clip(one.net.parameters(), most)
    clip([p for group in joint.param_groups for p in group["params"]], most)
    assert not torch.equal(one.net.weight.grad, gradient)
    if clip is nn.utils.clip_grad_norm_:
        one.head.scale_gradient((one.net.weight.grad.norm() / gradient.norm()).item())
    one.head.step(0.2)
    optimizers[0].step()
    joint.step()
    assert torch.equal(one.net.weight, other.net.weight)
    torch.testing.assert_close(one.head.centres, other.head.centres, rtol=0, atol=1e-6)


def test_a_forgotten_step_warns_once():
    model = Model(sample_rate=0.3)
    model(*batch(0)).backward()
    with pytest.warns(UserWarning, match=r"head\.step\(\).*prepare"):
        model(*batch(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(*batch(2))


def test_a_head_without_a_world_among_several_processes_warns(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.warns(UserWarning, match=r"world=.*2 processes"):
        PartialFC(C, D, "cosface")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PartialFC(C, D, "cosface", world=SingleWorld())


def test_ignored_rows_count_for_nothing():
    one, other = Model(), Model()
    x, label = batch(0)
    mixed = torch.stack([label, torch.full_like(label, -100)], dim=1)  # (6, 2): each second one is padding
    loss = one(x, label)
    assert other(torch.stack([x, x + 1], dim=1), mixed).item() == loss.item()
    with pytest.raises(ValueError, match="-100"):
        Model(ignore_index=None)(x, mixed[:, 1])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PartialFC(C, D, "arc"), "margin is 'arc'.*arcface"),
        (lambda: PartialFC(C, D, "cosface", world="nccl"), "world is str.*ProcessGroup"),
        (lambda: PartialFC(C, D, "cosface")(torch.zeros(2, D), [1, 2]), "got list.*torch.tensor"),
        (lambda: PartialFC(C, D, "cosface", device="cuda"), "device is cuda.*no GPU"),
        (lambda: PartialFC(1e6, D, "cosface"), "num_classes is 1000000.0.*integer"),
        (lambda: PartialFC(C, 0, "cosface"), "embedding_size is 0"),
        (lambda: flat_head(C, D, "cosface", impl="cuda"), "impl is 'cuda'; expected one of auto, plain, cpu, triton"),
        (lambda: PartialFC(C, D, "cosface", optimizer=torch.optim.SGD), "optimizer is .*SGD.*RowSGD"),
        (lambda: PartialFC(C, D, "cosface").resize(2.0), "num_classes is 2.0"),
        (lambda: PartialFC(C, D, "cosface").centres_of([1]), "classes are list.*torch.tensor"),
        (lambda: PartialFC(C, D, "cosface").rank_of(1), "classes are int.*torch.tensor"),
        (lambda: PartialFC(C, D, "cosface").topk([[0.0] * D]), "features are list"),
    ],
)
def test_what_people_try_first_is_answered(make, words):
    if torch.cuda.is_available() and "cuda" in words:
        pytest.skip("there is a GPU")
    with pytest.raises((ValueError, TypeError), match=words):
        make()


def test_integers_may_be_those_of_numpy_and_torch():
    head = flat_head(np.int64(C), torch.tensor(D), "cosface", seed=np.int64(3), sub_centres=np.int32(2))
    other = flat_head(C, D, "cosface", seed=4, sub_centres=2)
    other.load_state_dict(head.state_dict())
    assert torch.equal(other.centres, head.centres)
    head.resize(np.int32(C + 1))
    assert head.num_classes == C + 1

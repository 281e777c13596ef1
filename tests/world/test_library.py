"""The head inside other people's modules, averages, checkpoints and launchers."""

import copy
import functools
import importlib.util
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from partial_fc.comm import SingleWorld, World
from partial_fc.head import AdaFace, HardNegatives, Heads, OwnOut, PartialFC, RowSGD, Sampling, Storage
from partial_fc.head.interop import inputs, module
from tests.flat import flat_head, learn
from tests.unit.head import test_module
from tests.unit.head.test_module import C, D, batch
from tests.unit.thread_world import in_world
from tests.world.rows import Row, table

DECAY = 0.75


class Model(test_module.Model):
    def __init__(self, **options: Any):
        # Small rates and a strong decay: most rows lag behind in each step.
        made = {"sample_rate": 0.2, "optimizer": RowSGD(0.9, 0.05), "impl": "plain"} | options
        super().__init__(norm=True, margin="cosface", **made)


def step(model: Model, number: int) -> None:
    model(*batch(number)).backward()
    model.head.step(0.1)


def training(model: Model, update: Any, steps: int = 8) -> torch.Tensor:
    """Trains, calls `update` after each step, and returns the average of the centres that a dense table would have."""
    average = model.head.centres.clone()
    for number in range(steps):
        step(model, number)
        average = DECAY * average + (1 - DECAY) * model.head.centres
        update(model)
    return average


def by_torch(model: Model, **options: Any) -> tuple[Model, Any]:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), **options)
    average.n_averaged += 1  # else the first update copies
    return average.module, average.update_parameters


def by_torch_swa(model: Model) -> tuple[Model, Any]:
    average = AveragedModel(model, avg_fn=lambda a, m, _: DECAY * a + (1 - DECAY) * m, use_buffers=True)
    average.n_averaged += 1
    return average.module, average.update_parameters


@functools.cache
def timm_averages() -> Any:
    """timm/utils/model_ema.py alone: timm imports torchvision and takes seconds."""
    folder = importlib.util.find_spec("timm").submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location("model_ema", Path(folder) / "utils/model_ema.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def by_timm(model: Model, **options: Any) -> tuple[Model, Any]:
    average = timm_averages().ModelEmaV3(model, decay=DECAY, **options)
    return average.module, average.update


def by_buffers(model: Model) -> tuple[Model, Any]:
    twin = copy.deepcopy(model)

    def update(model: Model) -> None:
        for mine, its in zip(twin.buffers(), model.buffers(), strict=True):
            if mine.is_floating_point():
                mine.mul_(DECAY).add_(its, alpha=1 - DECAY)

    return twin, update


def by_state(model: Model) -> tuple[Model, Any]:
    twin = copy.deepcopy(model)

    def update(model: Model) -> None:
        state = model.state_dict()
        for name, mine in twin.state_dict().items():
            if mine.dtype.is_floating_point:
                mine *= DECAY
                mine += (1 - DECAY) * state[name].detach()

    return twin, update


@pytest.mark.parametrize("catch_up", ["exact", "none"])
@table(
    [
        Row("AveragedModel, use_buffers", "metric-learning 469", lambda m: by_torch(m, use_buffers=True), "average"),
        Row("AveragedModel, avg_fn", "torch.optim.swa_utils, torch before 2.1", by_torch_swa, "average"),
        Row("ModelEmaV3", "timm.utils", by_timm, "average"),
        Row("ModelEmaV3 of single tensors", "timm.utils", lambda m: by_timm(m, foreach=False), "average"),
        Row("buffers by hand", "mean teachers", by_buffers, "average"),
        Row("floating entries of the state by hand", "ultralytics' ModelEMA", by_state, "average"),
        Row("AveragedModel", "torch's default copies buffers", lambda m: by_torch(m, use_buffers=False), "newest"),
        Row("ModelEmaV3, exclude_buffers", "timm.utils", lambda m: by_timm(m, exclude_buffers=True), "newest"),
    ]
)
def test_an_average_of_a_model_averages_its_centres(row, catch_up):
    model = Model(catch_up=catch_up)
    step(model, 100)
    twin, update = row.given(model)
    average = training(model, update)
    right = average if row.right == "average" else model.head.centres
    torch.testing.assert_close(twin.head.centres, right, rtol=1e-4, atol=1e-6)
    _, nearest = twin.head.topk(right[:5], k=1)  # reads, and creates no row
    assert nearest[:, 0].tolist() == [0, 1, 2, 3, 4]
    torch.testing.assert_close(twin.head.centres, right, rtol=1e-4, atol=1e-6)
    again = Model(catch_up=catch_up)
    again.load_state_dict(twin.state_dict())
    torch.testing.assert_close(again.head.centres, right, rtol=1e-4, atol=1e-6)


def swap(model: Model) -> None:
    """As Lightning's WeightAveraging does around a validation."""
    twin = copy.deepcopy(model)
    step(model, 1)
    before = model.head.centres.clone(), twin.head.centres.clone()
    for a, b in zip(twin.buffers(), model.buffers(), strict=True):
        kept = a.data.clone()
        a.data.copy_(b.data)
        b.data.copy_(kept)
    assert torch.equal(model.head.centres, before[1])
    assert torch.equal(twin.head.centres, before[0])


def loads_a_deep_copied_state(model: Model) -> None:
    state = copy.deepcopy(model.state_dict())
    assert type(state["head._extra_state"]) is torch.Tensor
    other = Model(hard_negatives=HardNegatives(C, k=2))
    other.load_state_dict(state)
    step(model, 1), step(other, 1)
    assert torch.equal(model.head.centres, other.head.centres)


def old_averager(model: Model) -> None:
    twin = copy.deepcopy(model)
    for mine, its in zip(twin.state_dict().values(), model.state_dict().values(), strict=True):
        mine.copy_(DECAY * mine + (1 - DECAY) * its)


def soup(model: Model) -> None:
    states = [{name: t.clone() for name, t in model.state_dict().items()} for _ in range(2)]
    model.load_state_dict({name: (t + states[1][name]) / 2 for name, t in states[0].items()})


def functional_call(model: Model) -> None:
    same = dict(model.named_parameters()) | dict(model.named_buffers())
    assert torch.func.functional_call(model, same, batch(2)).isfinite()
    others = {name: t.clone() for name, t in same.items()}
    torch.func.functional_call(model, others, batch(2))


def moves_data(model: Model) -> None:
    for buffer in model.buffers():
        buffer.data = buffer.data.half()


def no_backward(model: Model) -> None:
    dcp_state.get_state_dict(model, model.head.as_optimizer(lr=0.1))


def batch_norm_statistics(model: Model) -> None:
    average = AveragedModel(model, use_buffers=True)
    average.update_parameters(model)
    before = average.module.head.centres.clone()
    update_bn([batch(3)[0]], average.module.net)
    assert torch.equal(average.module.head.centres, before)


def of_the_net_alone(model: Model) -> None:
    before = model.head.centres.clone()
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector + 1, model.parameters())
    assert torch.equal(model.head.centres, before)
    assert sum(p.numel() for p in model.parameters()) == len(vector) == 5 * D + D + 2 * D


def dcp_names(model: Model) -> None:
    state = dcp_state.get_model_state_dict(model)
    assert torch.equal(state["head.classes_0_41.centres"], model.head.rows.tables()["centres"])
    other = Model(seed=5, hard_negatives=HardNegatives(C, k=2))
    options = dcp_state.StateDictOptions(full_state_dict=True)
    dcp_state.set_model_state_dict(other, dcp_state.get_model_state_dict(model, options=options), options=options)
    assert torch.equal(other.head.centres, model.head.centres)


def full_of_two_ranks(_: Model) -> None:
    def on_rank(world: World) -> None:
        model = Model(world=world)
        assert len(dcp_state.get_model_state_dict(model)) == 11  # 7 of the net
        dcp_state.get_model_state_dict(model, options=dcp_state.StateDictOptions(full_state_dict=True))

    in_world(2, on_rank)


def compared(model: Model) -> None:
    twin = copy.deepcopy(model)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))
    step(twin, 1)
    assert not all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))
    (buffer,) = model.head.buffers()
    assert (buffer.shape, buffer.numel(), buffer.dtype) == ((C, D), C * D, torch.float32)


@table(
    [
        Row("swapped with its average", "Lightning 20545: EMAWeightAveraging", swap, None),
        Row("a deep copied state", "early stopping", loads_a_deep_copied_state, None),
        Row("averaged with its bytes", "timm's ModelEmaV2, own loops", old_averager, "_extra_state.*copy the others"),
        Row("a soup of clones", "model soups", soup, "copy that entry"),
        Row("functional_call", "torch.func, higher", functional_call, "centre_rows.*in place"),
        Row("buffers cast by .data", "FSDP's buffer_dtype", moves_data, "data of a head's centres"),
        Row("update_bn", "torch.optim.swa_utils", batch_norm_statistics, None),
        Row("parameters_to_vector", "torch.nn.utils", of_the_net_alone, None),
        Row("get_model_state_dict", "Lightning 21124, pytorch 122946", dcp_names, None),
        Row("a full state of two ranks", "torch.distributed.checkpoint", full_of_two_ranks, "head.sharded"),
        Row("get_state_dict with its optimizer", "torch.distributed.checkpoint", no_backward, "other optimizers"),
        Row("compared", "tests of other people", compared, None),
    ]
)
def test_code_that_walks_modules_finds_the_centres_or_is_refused(row):
    model = Model(hard_negatives=HardNegatives(C, k=2))
    step(model, 0)
    if row.right is None:
        row.given(model)
        return
    before = model.head.centres.clone(), model.head.num_steps
    with pytest.raises((ValueError, RuntimeError), match=row.right):
        row.given(model)
    assert torch.equal(model.head.centres, before[0])
    assert model.head.num_steps == before[1]


# ---- features without gradient


def frozen(head: PartialFC, way: str) -> torch.Tensor:
    """Trains on features that require no gradient, and returns how far the centres moved."""
    before, optimizer = head.centres.clone(), head.as_optimizer(lr=0.1)
    loss = head(torch.randn(6, D), torch.arange(6))
    if loss.requires_grad:
        loss.backward()
    optimizer.step() if way == "optimizer" else head.step(0.1)
    return (head.centres - before).norm()


@table(
    [
        Row("a linear probe", "insightface 2439, metric-learning 92", ("optimizer", torch.enable_grad, True), True),
        Row("with step", "own loops", ("step", torch.enable_grad, True), True),
        Row("no_grad", "validation", ("step", torch.no_grad, True), False),
        Row("eval()", "validation", ("step", torch.enable_grad, False), False),
    ]
)
def test_centres_learn_from_features_without_gradient_as_a_linear_layer_does(row):
    way, mode, is_training = row.given
    head = PartialFC(C, D, "softmax", optimizer=RowSGD(0.0, 0.0)).train(is_training)
    with mode():
        moved = frozen(head, way)
    assert bool(moved > 0) == row.right


def test_a_step_without_a_backward_says_that_nothing_moves():
    head = PartialFC(C, D, "softmax")
    head(torch.randn(6, D), torch.arange(6))
    with pytest.warns(UserWarning, match=r"without loss\.backward"):
        head.step(0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learn(head, torch.randn(6, D), torch.arange(6))
        with torch.no_grad():
            head(torch.randn(6, D), torch.arange(6))
        head.step(0.1)


def test_ranks_agree_on_training_whatever_their_features_say():
    def on_rank(world: World) -> torch.Tensor:
        head = PartialFC(C, D, "softmax", world=world)
        feature = torch.ones(2, D).cumsum(0).requires_grad_(world.rank == 0)  # rank 1 has a frozen branch
        head(feature, torch.tensor([1, 2])).backward()
        with (
            pytest.raises(ValueError, match=r"ranks \[0\] train and ranks \[1\] do not"),
            torch.set_grad_enabled(world.rank == 0),
        ):
            head(feature, torch.tensor([1, 2]))
        return head.pending[0].logit_grad.factor_G

    assert all(bool((factor_G > 0).all()) for factor_G in in_world(2, on_rank))


# ---- a head that was made before the process group


def joined(monkeypatch: pytest.MonkeyPatch, world_size: int, on_rank: Any) -> list[Any]:
    """Calls on_rank(world, start) where a call of start() stands for init_process_group."""
    monkeypatch.setattr(module, "from_process_group", lambda group: group)
    here = threading.local()

    def with_world(world: World) -> Any:
        here.world, here.started = world, False

        def start() -> None:
            here.started = True

        return on_rank(world, start)

    count = lambda: here.world.size if getattr(here, "started", False) else 1  # noqa: E731
    monkeypatch.setattr(module, "num_processes", count)
    monkeypatch.setattr("partial_fc.head.partial_fc.num_processes", count)
    monkeypatch.setattr(inputs, "num_processes", count)
    monkeypatch.setattr(torch.distributed, "new_group", lambda: here.world)
    return in_world(world_size, with_world)


def trained(model: Any, world: World, steps: range) -> list[float]:
    """Two ranks' halves of the same batches."""
    losses = []
    for number in steps:
        x, label = (t[world.rank :: world.size] for t in batch(number))
        losses.append(learn(model.head, x @ torch.ones(5, D), label).item())
    return losses


@pytest.mark.filterwarnings("ignore:PartialFC without world")
@table(
    [
        Row("made before", "HF Trainer: model, then TrainingArguments", {}, "joins"),
        Row("with hard negatives", "README's advice", {"hard_negatives": True}, "joins"),
        Row("and evaluated before", "HF Trainer's eval_on_start", {"evaluate": True}, "joins"),
        Row("and loaded before", "resumed from one process", {"load": True}, "joins"),
        Row("and copied before", "HF EMA callbacks", {"copy": True}, "joins"),
        Row("has learnt alone", "a notebook's cell", {"step": True}, "has made steps alone"),
        Row("wants to be alone", "a sweep under torchrun", {"world": SingleWorld()}, "alone"),
    ]
)
def test_a_head_that_was_made_before_the_process_group_is_sharded_at_its_first_training_step(row, monkeypatch):
    def on_rank(world: World, start: Any) -> Any:
        options = {"world": row.given["world"]} if "world" in row.given else {}
        if row.given.get("hard_negatives"):
            options["hard_negatives"] = HardNegatives(C, k=2)
        model = Model(**options)
        optimizer = model.head.as_optimizer(lr=0.1)
        if row.given.get("load"):
            other = Model()
            trained(other, SingleWorld(), range(3))
            model.load_state_dict(other.state_dict())
        if row.given.get("step"):
            trained(model, SingleWorld(), range(1))
        start()
        if row.given.get("copy"):
            model = copy.deepcopy(model)
        if row.given.get("evaluate"):
            with torch.no_grad():
                assert model.head(batch(0)[0] @ torch.ones(5, D), batch(0)[1]).isfinite()
            assert model.head.world.size == 1
        if row.right == "has made steps alone":
            with pytest.raises(ValueError, match=f"{row.right}.*new_group"):
                trained(model, world, range(1))
            return None
        first = model.head.num_steps
        losses = trained(model, world, range(first, first + 4))
        assert optimizer.head is model.head or row.given.get("copy")
        return losses, model.head.world.size, len(model.head.shard), model.head._gradient_factor

    found = joined(monkeypatch, 2, on_rank)
    if row.right == "joins":
        options = {"hard_negatives": HardNegatives(C, k=2)} if row.given.get("hard_negatives") else {}
        one = Model(**options)
        losses = trained(one, SingleWorld(), range(3)) if row.given.get("load") else []
        losses = trained(one, SingleWorld(), range(len(losses), len(losses) + 4))
        assert [each[1:] for each in found] == [(2, 21, 2), (2, 20, 2)]
        for each in found:
            assert each[0][:2] == pytest.approx(losses[:2], rel=1e-5)
            assert each[0] == found[0][0]
    elif row.right == "alone":
        assert [each[1:] for each in found] == [(1, C, 1), (1, C, 1)]
        assert found[0][0] != found[1][0]


@pytest.mark.filterwarnings("ignore:PartialFC without world")
def test_several_heads_made_before_the_process_group_are_sharded_together(monkeypatch):
    def on_rank(world: World, start: Any) -> Any:
        heads = Heads(a=PartialFC(30, D, name="a"), b=PartialFC(20, D, name="b"))
        start()
        label = torch.tensor([1, 2, 3] if world.rank else [1, 31, 49])  # rank 1 has no row of b
        return learn(heads, torch.ones(3, D).cumsum(0), label).item(), heads.world.size

    found = joined(monkeypatch, 2, on_rank)
    assert found[0] == found[1]
    assert found[0][1] == 2


# ---- arguments


@table(
    [
        Row("precision of a trainer", "HF, Lightning", {"precision": "fp16"}, "precision is 'fp16'; expected.*bf16"),
        Row("storage by name", "--centre-dtype", {"storage": "bf16"}, r"storage is 'bf16'.*Storage\(torch.bfloat16"),
        Row("rule by name", "--rule mean", {"rule": "mean"}, r"rule is 'mean'.*MeanSoftmax\(\)"),
        Row("a rule's class", "", {"rule": OwnOut}, r"rule is .*OwnOut.*OwnOut\(\)"),
        Row("ignore_index of words", "", {"ignore_index": "x"}, "ignore_index is 'x'; expected an integer"),
        Row("rate of a YAML file", "", {"sample_rate": "0.1"}, "sample_rate is '0.1'; expected a share"),
        Row("rate in per cent", "", {"sample_rate": 10}, "sample_rate is 10; expected a share"),
        Row("rate 0", "", {"sample_rate": 0}, "sample_rate is 0; expected a share"),
        Row("threshold in degrees", "", {"interclass_filtering_threshold": 40}, "threshold is 40; expected a cosine"),
        Row("threshold of words", "", {"interclass_filtering_threshold": "0.4"}, "is '0.4'; expected a cosine"),
        Row("sampling by rate", "", {"sampling": 0.1}, r"sampling is 0\.1; expected Sampling\(0\.1"),
        Row("two rates", "", {"sampling": Sampling(0.1), "sample_rate": 0.2}, r"give Sampling\(rate, ...\) alone"),
        Row("loss by name", "cosface", {"loss": "cosface"}, "loss is 'cosface'; expected LossOptions"),
        Row("hard negatives by number", "--hard-negatives 5", {"hard_negatives": 5}, "is 5.*HardNegatives"),
        Row("others' lists", "", {"hard_negatives": HardNegatives(7, k=2), "sample_rate": 0.5}, "of 7 classes"),
        Row("optimizer by name", "--head-optimizer", {"optimizer": "adamw"}, "optimizer is 'adamw'.*RowAdamW"),
        Row("device of words", "", {"device": "gpu"}, "device is 'gpu'; expected.*'cuda'"),
        Row("no device", "", {"device": None}, "device is None; expected"),
        Row("a name with a space", "", {"name": "my head"}, "name is 'my head'; expected a letter"),
        Row("a number for a name", "", {"name": 3}, "name is 3; expected a letter"),
        Row("sub-centres of words", "", {"sub_centres": "3"}, "sub_centres is '3'; expected an integer"),
        Row("seed of None", "", {"seed": None}, "seed is None; expected an integer"),
        Row("margin by number", "", {"margin": 0.4}, "margin is 0.4; expected a Margin.*curricularface"),
        Row("catch-up True", "", {"catch_up": True}, "catch_up is True; expected none or exact"),
        Row("quota of words", "", {"quota": "all"}, "quota is 'all'; expected"),
        Row("gradients of words", "", {"backbone_gradients": "mean"}, "'mean'; expected sum or average"),
    ]
)
def test_arguments_of_a_wrong_kind_are_named_with_what_is_expected(row):
    with pytest.raises((ValueError, TypeError), match=row.right):
        flat_head(C, D, **row.given)


@table(
    [
        Row("nothing", "the shortest program", {}, "m3=0.4"),
        Row("a rate", "", {"sample_rate": 0.1}, "sample rate 0.1, RowSGD("),
        Row("a size", "", {}, f"PartialFC({C} classes, {D} wide, "),
        Row("a place", "", {}, f"; rank 0 of 1 (single): classes [0, {C})"),
        Row("adaface", "--loss", {"margin": "adaface"}, "AdaFace"),
        Row("curricularface", "--loss", {"margin": "curricularface"}, "CurricularFace"),
        Row("numpy's and Python's numbers", "", {"sample_rate": 1}, "sample rate 1"),
        Row("a storage", "", {"storage": Storage(torch.bfloat16)}, "bfloat16"),
    ]
)
def test_arguments_that_are_plainly_meant_are_taken(row):
    head = flat_head(C, D, **row.given)
    assert row.right in repr(head)
    learn(head, torch.randn(4, D), torch.arange(4))


# ---- neighbours


def test_a_sharded_checkpoint_of_a_head_with_hard_negatives_loads():
    """README's advice for sampling. Lists belong to a rank and start empty."""

    def made() -> PartialFC:
        return flat_head(C, D, AdaFace(), 0.2, hard_negatives=HardNegatives(C, k=2, every=1))

    head, other = made(), made()
    for each, number in ((head, 1), (other, 2)):
        learn(each, torch.randn(6, D, generator=torch.Generator().manual_seed(number)), torch.arange(6))
    other.sharded().load_state_dict(head.sharded().state_dict())
    assert torch.equal(other.centres, head.centres)
    assert other.margin_state == head.margin_state
    assert bool((other.hard_negatives.state()["owner"] == -1).all())
    assert bool((head.hard_negatives.state()["owner"] >= 0).any())


@pytest.mark.parametrize("sample_rate", [0.2, 1.0])
def test_new_classes_start_as_in_a_fresh_head_however_long_it_has_trained(sample_rate):
    head = flat_head(C, D, "cosface", sample_rate, optimizer=RowSGD(0.9, 0.5), sub_centres=2)
    for number in range(6):
        learn(head, torch.randn(4, D, generator=torch.Generator().manual_seed(number)), torch.arange(4))
    before = head.centres.clone()
    head.resize(C + 3)
    assert torch.equal(head.centres[C:], flat_head(C + 3, D, sub_centres=2).centres[C:])
    torch.testing.assert_close(head.centres[:C], before, rtol=0, atol=0)
    head.resize(C + 1)
    assert torch.equal(head.centres[C:], flat_head(C + 1, D, sub_centres=2).centres[C:])


@table(
    [
        Row("one label", "segmentation's -100", torch.tensor([31, 32, -100]), [True, True, False]),
        Row("several", "padded lists", torch.tensor([[31, -100], [32, 33], [-100, -100]]), [True, True, False]),
    ]
)
def test_rows_without_labels_alone_in_the_first_of_several_heads_take_no_part(row):
    heads = Heads(a=PartialFC(30, D, name="a"), b=PartialFC(20, D, name="b"))
    feature = torch.ones(3, D).cumsum(0)
    loss = heads(feature, row.given)
    alone = heads.parts["b"](feature[:2], torch.where(row.given < 0, row.given, row.given - 30)[:2])
    assert loss.item() == alone.item()
    assert (heads.row_losses(heads.last_step, 3) > 0).tolist() == row.right
    with pytest.raises(ValueError, match="no rank brought a row with a label"):
        heads(feature, torch.full_like(row.given, -100))
    with pytest.raises(ValueError, match=r"label -7.*\[0, 30\)"):
        heads(feature, torch.full_like(row.given, -7))

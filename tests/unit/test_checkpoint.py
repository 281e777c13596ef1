"""Checkpoints: whole or not there, readable by any number of ranks, older ones removed."""

import json

import pytest
import torch
from torch import nn

from partial_fc import checkpoint
from partial_fc.comm import SingleWorld
from partial_fc.head import CosFace, PartialFC
from partial_fc.optim import backbone as backbone_optimizer

D = 6


class OneOf(SingleWorld):
    """One rank of several, alone: enough for what needs no other rank (files, class ranges)."""

    def __init__(self, rank: int, size: int):
        super().__init__()
        self.rank, self.size = rank, size


def head_of(rank: int, size: int, num_classes: int = 11, seed: int = 0) -> PartialFC:
    return PartialFC(num_classes, D, CosFace(), world=OneOf(rank, size), seed=seed)


def save(root, step, heads, keep=2, **facts):
    """Every rank's part; rank 0 last, since in one process nothing waits at the barrier before the marker."""
    for head in reversed(heads):
        folder = checkpoint.save(root, step, {"w": torch.ones(2)}, {}, head, facts, head.world, keep)
    return folder


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 1), (3, 1), (1, 3), (3, 2), (2, 5), (8, 3)])
def test_any_number_of_ranks_loads_any_other(tmp_path, saved_by, loaded_by):
    heads = [head_of(rank, saved_by) for rank in range(saved_by)]
    for head in heads:
        assert len(head.centres) == len(head.shard)  # makes the rows' start values
        head.row_state()["momentum"].normal_()
        head.num_steps = 7
    found = checkpoint.Checkpoint(save(tmp_path, 3, heads))
    others = [head_of(rank, loaded_by, seed=99) for rank in range(loaded_by)]
    for other in others:
        found.load_head(other)
        assert other.num_steps == 7
    for name in ("centres", "momentum"):
        whole, again = (torch.cat([h.row_state()[name] for h in hs]) for hs in (heads, others))
        assert torch.equal(whole, again)


def test_only_a_complete_folder_counts(tmp_path):
    assert checkpoint.newest(tmp_path) is None
    first = save(tmp_path, 5, [head_of(0, 1)])
    second = save(tmp_path, 10, [head_of(0, 1)])
    assert checkpoint.newest(tmp_path) == second
    (second / "COMPLETE").unlink()
    assert checkpoint.newest(tmp_path) == first
    with pytest.raises(ValueError, match="no complete checkpoint"):
        checkpoint.Checkpoint(second)


def test_older_ones_are_removed_and_incomplete_ones_left_alone(tmp_path):
    (tmp_path / "step-00000001").mkdir()
    for step in (10, 20, 9, 30):
        save(tmp_path, step, [head_of(0, 1)], keep=2)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == [
        "step-00000001",
        "step-00000020",
        "step-00000030",
    ]


def test_a_missing_head_file_is_named(tmp_path):
    folder = save(tmp_path, 1, [head_of(rank, 3) for rank in range(3)])
    (folder / "head-00001-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no head file holds class 4; expected all of \[0, 11\)"):
        checkpoint.Checkpoint(folder).load_head(head_of(0, 1))
    checkpoint.Checkpoint(folder).load_head(head_of(0, 3))  # whoever does not need it does not miss it


def test_another_number_of_classes_is_refused(tmp_path):
    folder = save(tmp_path, 1, [head_of(0, 1)])
    with pytest.raises(ValueError, match="num_classes 11; this run has 12"):
        checkpoint.Checkpoint(folder).load_head(head_of(0, 1, num_classes=12))


def test_another_format_is_refused(tmp_path):
    folder = save(tmp_path, 1, [head_of(0, 1)])
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        checkpoint.Checkpoint(folder)


def test_facts_come_back_and_nan_is_null(tmp_path):
    folder = save(tmp_path, 4, [head_of(0, 1)], position=123, best={"lfw": 0.5, "none": float("nan")})
    found = checkpoint.Checkpoint(folder)
    assert (found.step, found.manifest["position"]) == (4, 123)
    assert found.manifest["best"] == {"lfw": 0.5, "none": None}
    assert torch.equal(found.backbone()["w"], torch.ones(2))


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_optimizer_state_comes_back_by_name(kind):
    def three_steps(model, optimizer, num_steps):
        for _ in range(num_steps):
            backbone_optimizer.set_lr(optimizer, 0.1)
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()

    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = backbone_optimizer.build(kind, first, 0.9, 0.01)
    three_steps(first, optimizer, 3)
    second = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    second.load_state_dict(first.state_dict())
    again = backbone_optimizer.build(kind, second, 0.9, 0.01)
    state = {name: t.clone() for name, t in backbone_optimizer.named_state(optimizer, first).items()}
    backbone_optimizer.load_named_state(again, second, state)
    three_steps(first, optimizer, 2)
    three_steps(second, again, 2)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="belongs to no parameter"):
        backbone_optimizer.load_named_state(again, second, {"9.weight/momentum_buffer": torch.ones(1)})


def test_model_file_says_what_it_expects(tmp_path):
    from safetensors import safe_open

    checkpoint.save_model(tmp_path / "model.safetensors", {"w": torch.ones(2)}, {"image_size": "40"})
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"image_size": "40"}

"""Where recipe `face` begins, and that its ranks agree."""

import logging
from contextlib import closing

import pytest
import torch
from recipes.face_run import State, buddy_every, restore, resume
from torch import nn

from partial_fc import checkpoint
from partial_fc.checkpoint.folders import folder_name, mark
from partial_fc.checkpoint.peer.commits import Memory
from partial_fc.comm import SingleWorld
from partial_fc.data import Synthetic
from partial_fc.head import CosFace, PartialFC
from partial_fc.optim import backbone as backbone_optimizer
from partial_fc.optim.gradient_sync import GradientSync
from partial_fc.train.precision import Precision
from recipes import face_run, machine
from recipes.face import Config
from tests.unit.thread_world import in_world

C, D = 5, 4
_log = logging.getLogger("test")


def state_of(world) -> State:
    precision = Precision("fp32", torch.device("cpu"))
    model = nn.Linear(D, D)
    weights, _ = precision.prepare(model)
    head = PartialFC(C, D, CosFace(), world=world)
    return State(
        weights,
        backbone_optimizer.build("sgd", weights, 0.9, 0.0),
        head,
        GradientSync(model, world),
        precision,
    )


def write(root, *steps: int) -> None:
    """Checkpoints of these steps, with that number as every weight."""
    for step in steps:
        state = state_of(SingleWorld())
        weights = {name: torch.full_like(t, step) for name, t in state.weights.state_dict().items()}
        manifest = {"position": step, "best": {}, "configuration": {}}
        checkpoint.take(step, weights, {}, {}, state.head, manifest, world=state.head.world).write(
            root / folder_name(step), leads=True
        )
        mark(root / folder_name(step), step, [0])


@pytest.mark.parametrize(
    ("asked", "own", "expected"),
    [
        ("given/step-00000050", (), 50),  # lost before anything of this run was whole
        ("given/step-00000050", (70,), 70),
        ("given/step-00000050", (20,), 50),  # there was an older run in the folder
        ("gone/step-00000050", (70,), 70),  # a host that has just come need not have it
        ("gone/any-name", (20,), 20),
        ("never", (70,), 70),
        ("never", (), 0),
        ("auto", (20, 70), 70),
    ],
)
def test_a_world_after_the_first_without_commits(tmp_path, monkeypatch, asked, own, expected):
    """Two ranks, of which one has only come now."""
    monkeypatch.setattr(face_run.elastic, "active", lambda: True)
    write(tmp_path / "given", 50)
    write(tmp_path / "run/checkpoints", *own)
    asked = asked if asked in ("auto", "never") else str(tmp_path / asked)
    config = Config(dataset="synthetic", num_classes=C, models_root=tmp_path / "run", resume=asked, embedding_size=D)

    def begin(world):
        state = state_of(world)
        start = resume(config, state, Memory(age=1 - world.rank), Synthetic(C, 8, 10), _log)
        with closing(checkpoint.Saver(config.checkpoints, world, keep=3)) as saver:
            back = restore(config, state, saver, _log)
        numbers = {float(t) for weight in state.weights.state_dict().values() for t in weight.flatten()}
        return start.step, back, numbers

    for step, back, numbers in in_world(2, begin):
        assert step == expected
        assert back == ((step, step) if step else None), "a rollback goes there, too"
        assert numbers == {float(step)} or not step


def test_a_run_is_finished_where_rank_0_says_so(tmp_path):
    """It writes the result, and the others may have folders of their own."""
    roots = [tmp_path / str(rank) for rank in range(3)]
    for root in roots:
        root.mkdir()

    def ask(world):
        return machine.is_finished(roots[world.rank], world)

    (roots[2] / "result.json").touch()
    assert in_world(3, ask) == [False] * 3
    (roots[0] / "result.json").touch()
    assert in_world(3, ask) == [True] * 3


def test_commits_only_where_ranks_come_and_go(monkeypatch):
    configs = [Config(dataset="synthetic", num_classes=C, buddy_every=every) for every in (None, 7, 0)]
    assert [buddy_every(config) for config in configs] == [0, 0, 0]
    monkeypatch.setattr(face_run.elastic, "active", lambda: True)
    assert [buddy_every(config) for config in configs] == [100, 7, 0]

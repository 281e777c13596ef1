"""Where recipe `face` begins, and that its ranks agree."""

import itertools
import logging
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from partial_fc import checkpoint
from partial_fc.checkpoint.folders import folder_name, mark
from partial_fc.comm import SingleWorld
from partial_fc.data import Synthetic
from partial_fc.head import CosFace, PartialFC
from partial_fc.models.inputs import FACE
from partial_fc.optim import backbone as torch_optim
from partial_fc.optim.schedule import Schedule
from partial_fc.train.backbone import TorchBackbone
from partial_fc.train.begin.run_folder import Folders
from partial_fc.train.context import Context
from partial_fc.train.end import is_finished
from partial_fc.train.job import RunState
from partial_fc.train.precision import Precision
from partial_fc.train.resume import Start, restore, resume
from recipes.face import main as face
from tests.unit.thread_world import in_world

C, D = 5, 4
CONTRACT = {"network": "tiny", "embedding_size": str(D), "image_size": "24"}


def parts_of(world, **contract: str) -> tuple[TorchBackbone, PartialFC]:
    optimizer = partial(torch_optim.build, "sgd", momentum=0.9, weight_decay=0.0)
    precision = Precision("fp32", torch.device("cpu"))
    backbone = TorchBackbone(nn.Linear(D, D), world, precision, optimizer, FACE, CONTRACT | contract)
    return backbone, PartialFC(C, D, CosFace(), world=world)


def config_of(root: Path, **flags: object) -> face.Config:
    words = {"dataset": "synthetic", "num-classes": C, "models-root": root, **flags}
    return face.parse([f"--{name}={value}" for name, value in words.items()])[0]


def run_of(world, config: face.Config, recipe: str = "face") -> Context:
    return Context(recipe, config, world, torch.device("cpu"), logging.getLogger("test"), Folders("run"), versions={})


def write(root: Path, *steps: int, **facts: object) -> None:
    """Checkpoints of these steps, with that number as every weight."""
    for step in steps:
        backbone, head = parts_of(SingleWorld())
        weights = {name: torch.full_like(t, step) for name, t in backbone.weights.state_dict().items()}
        manifest = {"position": step, "best": {}, "configuration": {}, **facts}
        taken = checkpoint.capture(step, weights, {}, {}, head, manifest, world=head.world)
        taken.write(root / folder_name(step), leads=True)
        mark(root / folder_name(step), step, [0])


@pytest.mark.parametrize(
    ("asked", "own", "expected"),
    [
        ("given/step-00000050", (), 50),  # lost before anything of this run was whole
        ("given/step-00000050", (70,), 70),
        ("given/step-00000050", (20,), 50),  # there was an older run in the folder
        ("gone/step-00000050", (70,), 70),
        ("gone/any-name", (20,), 20),
        ("never", (70,), 70),
        ("never", (), 0),
        ("auto", (20, 70), 70),
    ],
)
def test_a_restart_resumes_from_the_run_s_own_checkpoints(tmp_path, monkeypatch, asked, own, expected):
    """Two ranks, of which one has done no step yet."""
    write(tmp_path / "given", 50)
    write(tmp_path / "run/checkpoints", *own)
    config = config_of(tmp_path / "run", resume=asked if asked in ("auto", "never") else tmp_path / asked)

    def begin(world):
        backbone, head = parts_of(world)
        run = run_of(world, config)
        start = resume(run, backbone, head, Synthetic(C, 8, 10))
        with closing(checkpoint.Saver(config.run.checkpoints, world, keep=3)) as saver:
            back = restore(run, backbone, head, saver)
        numbers = {float(t) for weight in backbone.weights.state_dict().values() for t in weight.flatten()}
        return start.state.step if start else 0, back, numbers

    done = itertools.cycle((80, 0))
    monkeypatch.setattr("partial_fc.train.resume.furthest_step", lambda: next(done))
    for step, back, numbers in in_world(2, begin):
        assert step == expected
        assert back == ((step, step) if step else None), "a rollback goes there, too"
        assert numbers == {float(step)} or not step


@pytest.mark.parametrize(
    ("name", "now"), [("network", "r50"), ("embedding_size", "8"), ("image_size", "32"), ("recipe", "mnist")]
)
def test_a_checkpoint_of_another_model_is_refused_before_a_tensor_is_read(tmp_path, monkeypatch, name, now):
    """... on all ranks."""
    write(tmp_path / "checkpoints", 7, recipe="face", contract=CONTRACT, configuration=CONTRACT)
    for reader in ("backbone", "optimizer", "buffers", "load_head"):
        monkeypatch.setattr(checkpoint.Checkpoint, reader, lambda *_: pytest.fail("a tensor was read"))

    config = config_of(tmp_path)

    def refused(world):
        changed = {} if name == "recipe" else {name: now}
        recipe = now if name == "recipe" else "face"
        with pytest.raises(ValueError) as error:
            resume(run_of(world, config, recipe=recipe), *parts_of(world, **changed), Synthetic(C, 8, 10))
        return str(error.value)

    for message in in_world(2, refused):
        words = ("recipe face", "recipe mnist") if name == "recipe" else (f"--{name.replace('_', '-')}", now)
        for word in ("step-00000007", "--models-root", *words):
            assert word in message


def test_a_run_is_finished_where_rank_0_says_so(tmp_path):
    """It writes the result, and the others may have folders of their own."""
    roots = [tmp_path / str(rank) for rank in range(3)]
    for root in roots:
        root.mkdir()
    configs, schedule = list(map(config_of, roots)), Schedule(kind="constant", base_lr=0.1, total_steps=5)

    def ask(world, step: int = 5):
        return is_finished(run_of(world, configs[world.rank]), Start(RunState(step=step)), schedule)

    (roots[2] / "result.json").touch()
    assert in_world(3, ask) == [False] * 3
    (roots[0] / "result.json").touch()
    assert in_world(3, ask) == [True] * 3
    assert in_world(3, partial(ask, step=4)) == [False] * 3

"""Features that nobody tried together. Random combinations of them train two steps, are saved, resume on another number
of ranks and are evaluated, with the losses of a run that was not interrupted; or they are refused before the first step
by a message that names what does not go together.

A draw is a function of its number: `draw(17)` is the same everywhere. One that is refused goes on without one of the
flags that the message names. A feature that is silently ignored is found, too: a run without it has other losses, or a
note that names its flag.
"""

import copy
import dataclasses
import pickle
import random
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from partial_fc.comm import SingleWorld, World
from partial_fc.flags.facts import flag
from partial_fc.head import (
    MLC,
    MLCD,
    AdaFace,
    ArcFace,
    CosFace,
    CurricularFace,
    HardNegatives,
    Heads,
    OwnOut,
    PartialFC,
    SoftTarget,
    Storage,
)
from partial_fc.head.rows import RowAdagrad, RowAdamW, RowSGD
from partial_fc.recipe import start
from recipes.face import main as face
from tests.flat import flat_head, learn
from tests.running import SMALL, Given, endings, here, result, several
from tests.unit.thread_world import in_world
from tests.world import made

CLASSES, OTHER, SIZE, WIDTH = 24, 11, 16, 10  # classes of sets a and b; pixels; numbers
STEPS, GLOBAL_BATCH = 4, 12
HALF = f"checkpoints/step-{STEPS // 2:08d}"
COMMON = (
    "--embedding-size 8 --scale 16 --margins None --loss cosface --optimizer sgd --lr 0.05 --lr-scheduler constant "
    f"--warmup-steps 0 --seed 5 --check-data off --frequent 1 --checkpoint-every {STEPS // 2}"
)
# Values of each flag. A head among several may have these for itself:
OF_HEAD: dict[str, tuple[Any, ...]] = {
    "sample_rate": (0.3,),
    "quota": ("insightface",),
    "hard_negatives": (2,),
    "head_catch_up": ("none",),
    "sub_centres": (3,),
    "interclass_filtering_threshold": (0.05,),
    "loss": ("arcface", "adaface", "curricularface", "softmax"),
    "head_optimizer": ("nesterov", "adamw", "adagrad"),
    "head_lr": (0.2,),
    "head_weight_decay": (0.1,),
    "centre_dtype": ("bf16",),
    "labels": (3,),
    "labels_drawn": (2,),
    "rule": ("mlcd", "own-out", "soft-target", "mlc"),
    "start_centres": ("imprint",),
}
OF_RUN: dict[str, tuple[Any, ...]] = {
    "head_clip": (0.05,),
    "clip": (0.1,),
    "optimizer": ("adamw", "muon"),
    "accumulate": (2,),
    "ema": (0.5,),
    "lora": (2,),
    "teacher": (None,),
    "sample_weights": (None,),
    "balance": ("sqrt",),
    "shared_classes": (True,),
    "precision": ("fp32", "bf16"),
    "val_targets": (None,),
    "gradient_compression": ("bf16",),
}
# Without these the losses of four steps of one process are the same.
SILENT = {"ema", "val_targets", "precision", "accumulate", "centre_dtype"}


@dataclass
class Draw:
    """One combination. kind: of the data. sets: how they are given. values: of each flag, by set ("": of all)."""

    number: int
    kind: str
    sets: str
    network: str
    values: dict[str, dict[str, Any]] = field(default_factory=dict)

    def config(self, data: Path, root: Path, ranks: int, steps: int, without: str = "") -> face.Config:
        """The same run for any number of ranks. Raises ValueError if it is refused."""
        values = {name: by_set for name, by_set in self.values.items() if name != without}
        micro = ranks * values.get("accumulate", {}).get("", 1)
        given: dict[str, Any] = {"models_root": root, "max_steps": steps, "batch_size": GLOBAL_BATCH // micro}
        heads = [
            f"{name}.{key}={_word(value)}" for key, by_set in values.items() for name, value in by_set.items() if name
        ]
        if self.sets == "named" and self.number % 3:
            heads += [f"a.batch_size={8 // micro}", f"b.batch_size={4 // micro}"]
        given |= {key: by_set[""] for key, by_set in values.items() if "" in by_set}
        given |= {"heads": tuple(heads)} if heads else {}
        files = {
            "val_targets": self._targets(data),
            "sample_weights": data / f"{self.sets}.npy",
            "teacher": data / f"teacher-{self.kind}",
        }
        given |= {name: files[name] for name in files if name in values}
        if not {"precision", "centre_dtype"} & values.keys():
            given["precision"] = "fp64"
        return _changed(_base(data, self.kind, self.sets, self.network), given)

    def _targets(self, data: Path) -> tuple[str, ...]:
        if self.kind == "images":
            return (f"{data}/pairs.bin",)
        if self.sets == "named":
            return f"{data}/a.npz", f"b={data}/b.npz"
        is_whole = self.sets != "one" and "shared_classes" not in self.values
        return (f"{data}/{'whole' if is_whole else 'a'}.npz",)

    @property
    def near(self) -> float:
        """How near losses come that rounding alone makes different."""
        if {"centre_dtype", "gradient_compression"} & self.values.keys() or {"": "bf16"} in self.values.values():
            return 0.05
        return 3e-3 if "precision" in self.values else 1e-9

    def __str__(self) -> str:
        return f"draw({self.number}): {self.kind}, {self.sets}, --network {self.network}, {self.values}"


def draw(number: int) -> Draw:
    if number < 0:  # as they were found
        found: dict[str, dict[str, Any]] = {"labels": {"a": 3}} if number == -1 else {"val_targets": {"": None}}
        return Draw(number, "vectors", "named", "linear", found)
    choose = random.Random(number)
    kind = choose.choice(("vectors", "vectors", "images"))
    network = choose.choice(("linear", "mlp:9", "none") if kind == "vectors" else ("tiny",))
    found = Draw(number, kind, choose.choice(("one", "two", "named", "named", "weighted")), network)
    for name, values in (OF_HEAD | OF_RUN).items():
        if choose.random() < 0.25:
            of = choose.choice(("", "b", "a")) if name in OF_HEAD and found.sets == "named" else ""
            found.values[name] = {of: choose.choice(values)}
    return found


def _word(value: Any) -> str:
    return "true" if value is True else shlex.quote(str(value))


@cache
def _base(data: Path, kind: str, sets: str, network: str) -> face.Config:
    ending = {"vectors": "npz", "images": "rec"}[kind]
    a, b = (data / f"{name}.{ending}" for name in "ab")
    rec = {"one": [a], "two": [a, b], "named": [f"a={a}", f"b={b}"], "weighted": [data / f"{kind}.sets"]}[sets]
    words = [*SMALL, *COMMON.split(), "--rec", *map(str, rec), "--network", network, "--val-targets"]
    words += ["--image-size", str(SIZE), "--sync-bn"] if kind == "images" else []
    words += ["--embedding-size", str(WIDTH)] if network == "none" else []
    return face.parse(words)[0]


def _changed(config: face.Config, given: dict[str, Any]) -> face.Config:
    """Checks it as from the command line."""
    groups = {}
    for one in dataclasses.fields(config):
        group = getattr(config, one.name)
        groups[one.name] = dataclasses.replace(group, **{k: value for k, value in given.items() if k in vars(group)})
    return dataclasses.replace(config, **groups)


def main(words: Sequence[str]) -> int:
    """As recipe `face`, of a configuration in a file: parsing a command line takes as long as training four steps."""
    config: face.Config = pickle.loads(Path(words[0]).read_bytes())
    return start("face", face.train_here, config, called=("data", "network"))


def stored(config: face.Config, root: Path) -> str:
    root.mkdir(parents=True, exist_ok=True)
    (root / "given.pickle").write_bytes(pickle.dumps(config))
    return str(root / "given.pickle")


def attempt(one: Draw, data: Path, root: Path, steps: int = STEPS, without: str = "") -> str:
    """Trains in this process. Returns "", or why the run was refused; then it has made no step."""
    try:
        assert here(__name__, [stored(one.config(data, root, 1, steps, without), root)]) == 0
        message = ""
    except ValueError as error:
        message = str(error)
    assert not (message and losses_of(root)), f"{one}\nended after its first step: {message}"
    return message


def losses_of(root: Path) -> dict[int, float]:
    """By step."""
    rows = (root / "loss.csv").read_text().splitlines()[1:] if (root / "loss.csv").exists() else []
    return {int(step): float(loss) for step, loss, _ in (row.split(",") for row in rows)}


def named_in(message: str, one: Draw) -> list[str]:
    """The features of the draw that a refusal names."""
    words = {"labels": "labels? an image", "labels_drawn": "labels? an image"}
    return [name for name in one.values if re.search(rf"{flag(name)}(?![\w-])|{words.get(name, '$^')}", message)]


def accepted(one: Draw, data: Path, root: Path) -> None:
    """Trains it whole, without the features that are refused. Raises AssertionError for a refusal that does not name
    two things that do not go together."""
    choose, message = random.Random(one.number), ""
    for _ in range(len(one.values) + 1):
        message = attempt(one, data, root)
        if not message:
            return
        names = named_in(message, one)
        named = {*re.findall(r"(?<![\w-])--[a-z][\w-]*|\bsets?\b|\bheads?\b|labels? an image|\bsampling\b", message)}
        assert names, f"{one}\nis refused without the name of one of its flags: {message}"
        assert len(named) > 1, f"{one}\nis refused by a message with one name: {message}"
        del one.values[choose.choice(names)]
        shutil.rmtree(root, ignore_errors=True)
    raise AssertionError(f"{one}\nis refused to the last: {message}")


def trained(numbers: range, data: Path, root: Path) -> list[Draw]:
    """Trains the draws of these numbers: whole, on two ranks, and from the second step of that on one. Lists of hard
    negatives are of each process: with them the whole run goes on from its second step, on one rank and on two."""
    draws = [draw(number) for number in numbers]
    given = []
    for one in draws:
        mine = root / str(one.number)
        accepted(one, data, mine / "whole")
        if "hard_negatives" in one.values:
            for name in "two", "parts":
                shutil.copytree(mine / "whole" / HALF, mine / name / HALF)
        given.append(Given(__name__, [stored(one.config(data, mine / "two", 2, STEPS), mine / "two")]))
    for one, ended in zip(draws, endings(several(given, 2), 0), strict=True):
        assert ended == "0", f"{one}\non two ranks: {ended}"
    for one in draws:
        mine = root / str(one.number)
        if "hard_negatives" not in one.values:
            shutil.copytree(mine / "two" / HALF, mine / "parts" / HALF)
        assert not attempt(one, data, mine / "parts"), one
    return draws


def compare(one: Draw, data: Path, root: Path) -> None:
    """Compares the run that was interrupted with the whole one, and this with one that lacks a feature."""
    whole = losses_of(root / "whole")
    last = {step: loss for step, loss in whole.items() if step > STEPS // 2}
    two = losses_of(root / "two")
    if "hard_negatives" in one.values:
        assert two.keys() == last.keys(), str(one)
    elif one.near > 3e-3:
        # What is rounded to 16 bits between ranks is not on one, and each step makes more of it: another sub-centre is
        # the nearest. So the steps before, and those of the run that goes on.
        assert two.keys() == whole.keys(), str(one)
        assert {step: two[step] for step in (1, 2)} == pytest.approx(
            {step: whole[step] for step in (1, 2)}, rel=one.near
        )
        last = {step: two[step] for step in last}
    else:
        assert two == pytest.approx(whole, rel=one.near), str(one)
    assert losses_of(root / "parts") == pytest.approx(last, rel=one.near), str(one)
    # Lengths of embeddings grow with every rounding of a gradient in 16 bits.
    evaluated, again = (
        {name: value for name, value in result(root / run)["evaluations"].items() if not name.endswith("xnorm")}
        for run in ("whole", "parts")
    )
    assert bool(evaluated) == ("val_targets" in one.values), str(one)
    assert again == pytest.approx(evaluated, abs=0.3 if one.near > 1e-9 else 1e-6), str(one)
    silent = {*SILENT, *(["head_optimizer"] if one.values.get("head_optimizer") == one.values.get("optimizer") else [])}
    names = [name for name in one.values if name not in silent]
    log = (root / "whole/logs/rank-0000.log").read_text()
    told = [line for line in log.splitlines() if "note: " in line]
    choose = random.Random(one.number)
    order = sorted(choose.sample(names, len(names)), key=lambda name: name != "labels")
    for name in order if one.number % 3 == 0 or "labels" in names else ():
        if any(flag(name) in line for line in told):
            continue
        if message := attempt(one, data, root / "without", without=name):
            assert named_in(message, one), f"{one}\nwithout {flag(name)}: {message}"
            continue  # another one goes with it
        assert losses_of(root / "without") != whole, f"{one}\n{flag(name)} has no effect, and no note says so"
        return


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("data"))


def make(folder: Path) -> Path:
    """Vectors and images of three labels, weights of both, files to evaluate by, and a teacher of each kind."""
    random_ = np.random.default_rng(0)
    rows, labels = {}, {}
    for name, classes in (("a", CLASSES), ("b", OTHER)):
        first = np.repeat(np.arange(classes), 2 + np.arange(classes) % 4)
        labels[name] = np.stack([first, (first + 1) % classes, (first * 2 + 5) % classes], axis=1)
        rows[name] = random_.normal(size=(classes, WIDTH))[first] + 0.5 * random_.normal(size=(len(first), WIDTH))
        if name == "b":  # some have one label
            labels[name][::2, 1:] = -1
        np.savez(folder / f"{name}.npz", embeddings=rows[name].astype(np.float32), labels=labels[name])
        own = [[float(label) for label in row if label >= 0] for row in labels[name].tolist()]
        images = (made.image(cls, number, (SIZE, SIZE)) for number, cls in enumerate(first.tolist()))
        made.write_rec(folder, zip(range(len(own)), own, images, strict=True), name)
    both = np.concatenate([labels["a"], np.where(labels["b"] < 0, -1, labels["b"] + CLASSES)])
    np.savez(folder / "whole.npz", embeddings=np.concatenate([*rows.values()]).astype(np.float32), labels=both)
    for kind, ending in (("vectors", "npz"), ("images", "rec")):
        (folder / f"{kind}.sets").write_text(f"a a.{ending} 1.5\nb b.{ending} 0.5\n")
    weight_N = random_.uniform(0.5, 1.5, len(both))
    for sets in ("two", "named", "weighted"):
        np.save(folder / f"{sets}.npy", weight_N)
    np.save(folder / "one.npy", weight_N[: len(rows["a"])])
    pictures = [made.image(cls, number, (SIZE, SIZE)) for cls in range(20) for number in (0, cls % 2, 2, 2 - cls % 2)]
    (folder / "pairs.bin").write_bytes(pickle.dumps((pictures, [True, False] * 20), protocol=2))
    for kind, network in (("vectors", "linear"), ("images", "tiny")):
        assert not attempt(Draw(0, kind, "one", network), folder, folder / f"teacher-{kind}", 1)
    return folder


# Ten in a launch: one that hangs is ended by its time.
TENS = [
    pytest.param(range(first, first + 10), marks=pytest.mark.long if first >= 8 else ()) for first in range(-2, 328, 10)
]


@pytest.mark.parametrize("numbers", TENS, ids=str)
def test_combinations_train_resume_on_other_ranks_and_are_evaluated_or_are_refused(numbers, data, tmp_path):
    for one in trained(numbers, data, tmp_path):
        compare(one, data, tmp_path / str(one.number))


# ---- the same of the library: heads in a loop of one's own

C, D = 41, 6
OPTIONS: dict[str, tuple[Any, ...]] = {
    "sample_rate": (0.2,),
    "margin": (ArcFace(8.0), AdaFace(8.0), CurricularFace(8.0)),
    "optimizer": (RowAdamW(weight_decay=0.1), RowAdagrad(weight_decay=0.1), RowSGD(0.9, 0.01, nesterov=True)),
    "hard_negatives": (2,),
    "catch_up": ("none",),
    "sub_centres": (3,),
    "interclass_filtering_threshold": (0.05,),
    "quota": ("insightface",),
    "rule": (OwnOut(), SoftTarget(), MLC(), MLCD()),
    "storage": (Storage(torch.bfloat16, torch.float32),),
}


def layer(world: World, options: dict[str, Any], name: str = "", classes: int = C) -> PartialFC:
    given = {
        "margin": CosFace(8.0),
        "optimizer": RowSGD(0.9, 0.01),
        "dtype": torch.float64,
        "ignore_index": -100,
    } | options
    if "storage" in options:
        given["dtype"] = torch.float32
    if "hard_negatives" in options:
        given["hard_negatives"] = HardNegatives(classes, options["hard_negatives"], 1)
    return flat_head(classes, D, **given, world=world, name=name, impl="plain")


def steps(head: PartialFC | Heads, world: World, numbers: range, labels: int) -> list[float]:
    """Trains steps of these numbers. Returns their losses."""
    found = []
    for number in numbers:
        made_by = torch.Generator().manual_seed(number)
        feat_GD = torch.randn(12, D, generator=made_by, dtype=torch.float64)
        label_GK = torch.randint(0, head.num_classes, (12, labels), generator=made_by)
        if isinstance(head, Heads):  # further labels are of the first one's head
            start = (label_GK[:, :1] >= C) * C
            label_GK = start + label_GK % torch.where(start > 0, head.num_classes - C, C)
        label_G = label_GK if labels > 1 else label_GK[:, 0]
        mine = slice(world.rank, None, world.size)
        found.append(learn(head, feat_GD[mine].requires_grad_(), label_G[mine]).item())
    return found


def saved(head: PartialFC) -> dict[str, Any]:
    """What torch.distributed.checkpoint writes of a rank: copies."""
    return {name: one if name == "common" else one.rows.clone() for name, one in head.sharded().state_dict().items()}


def loaded(head: PartialFC, of_ranks: list[dict[str, Any]]) -> None:
    """As torch.distributed.checkpoint loads it: rows into the tables themselves, then the state."""
    state = head.sharded().state_dict()
    for name, one in state.items():
        if name == "common":
            state[name] = of_ranks[0][name]
        else:
            whole = torch.cat([mine[name] for mine in of_ranks])
            one.rows.copy_(whole[head.shard.start : head.shard.stop])
    head.sharded().load_state_dict(state)


def refusal(new: Callable[[World], PartialFC | Heads], labels: int) -> str:
    """Why these options do not go together, at a first step at the latest; "": they do."""
    try:
        steps(new(SingleWorld()), SingleWorld(), range(1), labels)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("number", [*range(60), *(pytest.param(n, marks=pytest.mark.long) for n in range(60, 1000))])
def test_heads_of_ones_own_loop_go_on_as_they_would_have(number):
    choose = random.Random(number)
    options = {name: choose.choice(values) for name, values in OPTIONS.items() if choose.random() < 0.3}
    labels = choose.choice((1, 1, 3))
    several_heads, kind = choose.random() < 0.3, choose.choice(("sharded", "sharded", "state_dict", "copy", "pickle"))
    kind = "pickle" if several_heads and kind == "copy" else kind  # a world of threads has locks
    sizes = choose.choice((1, 2, 3)), choose.choice((1, 2, 3))
    if kind != "sharded" or "hard_negatives" in options:  # whose lists are of each process
        sizes = (1, 1) if kind == "pickle" else (sizes[0], sizes[0])

    def new(world: World) -> PartialFC | Heads:
        if several_heads:
            return Heads(x=layer(world, options, "x"), y=layer(world, {}, "y", 17))
        return layer(world, options)

    while message := refusal(new, labels):
        names = [name for name, of in options.items() if name in message or type(of).__name__ in message]
        names += ["labels"] if labels > 1 and "label" in message else []
        assert names, f"{number}, {options}, {labels} labels: {message}"
        gone = choose.choice(names)
        options.pop(gone, None)
        labels = 1 if gone == "labels" else labels
    about = f"{number}: {options}, {labels} labels, several heads: {several_heads}, {kind}, ranks {sizes}"

    def before(world: World) -> tuple[list[float], Any]:
        world = SingleWorld() if kind == "pickle" else world
        head = new(world)
        found = steps(head, world, range(2), labels)
        each = head.tables()
        if kind == "sharded":
            kept: Any = {name: saved(one) for name, one in each.items()}
            for one in each.values():
                if one.hard_negatives is not None:
                    one.hard_negatives.clear()  # they are not in it
        elif kind == "state_dict":
            kept = copy.deepcopy(head.state_dict())
        else:
            kept = copy.deepcopy(head) if kind == "copy" else pickle.dumps(head)
        return found + steps(head, world, range(2, 4), labels), kept

    def after(world: World) -> list[float]:
        head = new(world)
        if kind == "sharded":
            for name, one in head.tables().items():
                loaded(one, [kept[name] for _, kept in first])
        elif kind == "state_dict":
            head.load_state_dict(first[world.rank][1])
        else:
            head = first[world.rank][1] if kind == "copy" else pickle.loads(first[0][1])
        return steps(head, head.world, range(2, 4), labels)

    first = in_world(sizes[0], before)
    whole = first[0][0]
    near = 0.02 if "storage" in options else 1e-9
    for found in in_world(sizes[1], after):
        assert found == pytest.approx(whole[2:], rel=near), about

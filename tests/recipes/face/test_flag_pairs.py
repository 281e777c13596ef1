"""No two flags of recipe `face` go together silently wrong: every pair of settings either trains, or is refused at the
start with the reason."""

import dataclasses
import itertools
import math
import random

import pytest

from recipes.face.main import Config, parse
from tests.running import losses, train_several

SETTINGS = {
    "precision": ("fp32", "bf16", "fp16", "fp16-o2", "fp64"),
    "gradient_compression": ("none", "fp16", "bf16"),
    "accumulate": (1, 2),
    "activation_checkpointing": (True, False),
    "sync_bn": (True, False),
    "clip": (0.0, 1.0),
    "head_clip": (0.0, 1.0),
    "optimizer": ("sgd", "muon"),
    "head_impl": ("auto", "plain", "cpu"),
    "loss": ("cosface", "adaface", "curricularface"),
    "sample_rate": (1.0, 0.3),
    "centre_dtype": ("fp32", "bf16"),
    "head_catch_up": ("none", "exact"),
    "hard_negatives": (0, 2),
    "ema": (0.0, 0.9),
    "lora": (0, 2),
    "labels": (1, 3),
    "rule": ("mean-softmax", "mlcd"),
}
# What is refused, and a word of the reason.
REFUSED = {
    (("precision", "fp64"), ("centre_dtype", "bf16")): "centre-dtype",
    (("precision", "fp64"), ("head_impl", "cpu")): "fp64 goes with plain",
    (("accumulate", 2), ("loss", "adaface")): "averages over whole batches",
    (("accumulate", 2), ("loss", "curricularface")): "averages over whole batches",
    (("sample_rate", 1.0), ("hard_negatives", 2)): "without sampling",
    (("loss", "curricularface"), ("labels", 3)): "told by one target",
    (("loss", "curricularface"), ("rule", "mlcd")): "told by one target",
}
PAIRS = [
    ((one, a), (other, b))
    for one, other in itertools.combinations(SETTINGS, 2)
    for a in SETTINGS[one]
    for b in SETTINGS[other]
]
FIXED = (
    "--dataset synthetic --num-classes 60 --num-images 400 --backbone tiny --image-size 16 --embedding-size 16 "
    "--batch-size 6 --max-steps 3 --warmup-steps 0 --seed 3"
)


def flags(chosen: dict) -> str:
    words = ["--margins None"]
    for name, value in chosen.items():
        flag = name.replace("_", "-")
        words.append(f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag} {value}")
    return " ".join(words)


def refusals(chosen: dict) -> list[str]:
    return [reason for pair, reason in REFUSED.items() if set(pair) <= set(chosen.items())]


def changed(config: Config, chosen: dict) -> Config:
    """... checked, as from the command line."""
    groups = {}
    for field in dataclasses.fields(config):
        group = getattr(config, field.name)
        mine = {name: value for name, value in chosen.items() if hasattr(group, name)}
        groups[field.name] = dataclasses.replace(group, **mine)
    assert sum(hasattr(group, name) for group in groups.values() for name in chosen) == len(chosen)
    return dataclasses.replace(config, **groups)


def test_exactly_the_known_pairs_are_refused_at_the_start():
    config, _ = parse(FIXED.split())
    for pair in PAIRS:
        chosen = {"sample_rate": 0.3, **dict(pair)}
        if reasons := refusals(chosen):
            with pytest.raises(ValueError, match=reasons[0]):
                changed(config, chosen)
        else:
            changed(config, chosen)


def runs_that_cover_all_pairs() -> list[dict]:
    """Few combinations in which every pair that is not refused occurs."""
    generator, found = random.Random(0), []
    left = {pair for pair in PAIRS if not refusals(dict(pair))}

    def covered(chosen: dict) -> int:
        return len(left.intersection(itertools.combinations(chosen.items(), 2)))

    while left:
        pairs = sorted(left, key=str)
        drawn = [
            {name: generator.choice(values) for name, values in SETTINGS.items()} | dict(generator.choice(pairs))
            for _ in range(500)
        ]
        found.append(max((chosen for chosen in drawn if not refusals(chosen)), key=covered))
        left -= set(itertools.combinations(found[-1].items(), 2))
    return found


@pytest.mark.long
def test_all_other_pairs_train(tmp_path):
    runs = {
        tmp_path / str(number): f"{FIXED} {flags(chosen)}" for number, chosen in enumerate(runs_that_cover_all_pairs())
    }
    train_several(runs)
    for models_root, words in runs.items():
        found = losses(models_root)
        assert len(found) == 3, words
        # An update that a loss scale skips says so; its loss is finite all the same.
        assert all(math.isfinite(loss) for loss in found), words

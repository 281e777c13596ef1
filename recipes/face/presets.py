"""Presets of `--dataset NAME`: facts about data sets and their published schedules.

Data by flag name. The recipe takes a value from the command line, else --config, else here, else its default; what the
set at --rec states overrides a preset.

Sources: InsightFace recognition/partial_fc/mxnet/default.py (webface, emore, glint360k, ...w) and
recognition/arcface_torch/configs (ms1mv3, wf4m, wf12m, wf42m; image counts of emore and glint360k).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from partial_fc import flags

if TYPE_CHECKING:
    from .main import DataFlags

from partial_fc.flags import near

Preset = dict[str, Any]


def _steps(lr_steps: tuple[int, ...], max_steps: int, base_batch_size: int = 512, **more: Any) -> Preset:
    """Returns the schedule of InsightFace's MXNet trainer: the rate times 0.1 after each of lr_steps; these and
    max_steps count updates of that global batch. Its centres rest while they are not sampled."""
    schedule = {"lr": 0.1, "base_batch_size": base_batch_size, "lr_scheduler": "step", "head_catch_up": "none"}
    return {**schedule, "lr_steps": lr_steps, "max_steps": max_steps, **more}


def _synthetic(num_classes: int) -> Preset:
    return _steps((20_000, 28_000), 32_000, num_classes=num_classes)


def _arcface_torch(num_classes: int, num_images: int, val_targets: tuple[str, ...]) -> Preset:
    """Returns the schedule common to these configs, published for 8 processes with a batch of 128 each."""
    schedule = {"lr": 0.1, "base_batch_size": 1024, "lr_scheduler": "polynomial", "epochs": 20}
    return {**schedule, "num_classes": num_classes, "num_images": num_images, "val_targets": val_targets}


_GLINT360K = {"num_classes": 360_232, "num_images": 17_091_657}

# Synthetic data: no records are read, to measure speed without IO.
SYNTHETIC: dict[str, Preset] = {
    # "w" is 10,000 in Chinese counting: 100w is a million classes.
    "100w": _synthetic(1_000_000),
    "1000w": _synthetic(10_000_000),
    "2000w": _synthetic(20_000_000),
    "3000w": _synthetic(30_000_000),
    "10000w": _synthetic(100_000_000),
    # Any number of classes, by --num-classes.
    "synthetic": {"lr_scheduler": "polynomial"},
}

PRESETS: dict[str, Preset] = {
    "webface": _steps((20_000, 28_000), 32_000, num_classes=10_575, val_targets=("lfw", "cfp_fp", "agedb_30")),
    "emore": _steps(
        (100_000, 160_000), 180_000, num_classes=85_742, num_images=5_822_653, val_targets=("agedb_30", "cfp_fp", "lfw")
    ),
    "glint360k_8GPU": _steps(
        (200_000, 400_000, 500_000, 550_000),
        600_000,
        val_targets=("agedb_30", "calfw", "cfp_ff", "cfp_fp", "cplfw", "lfw", "vgg2_fp"),
        **_GLINT360K,
    ),
    "glint360k_16GPU": _steps(
        (200_000, 280_000, 360_000), 400_000, 1024, val_targets=("agedb_30", "cfp_fp", "lfw"), **_GLINT360K
    ),
    "ms1mv3": _arcface_torch(93_431, 5_179_510, ("lfw", "cfp_fp", "agedb_30")),
    "wf4m": _arcface_torch(205_990, 4_235_242, ("lfw", "cfp_fp", "agedb_30")),
    "wf12m": _arcface_torch(617_970, 12_720_066, ()),
    "wf42m": _arcface_torch(2_059_906, 42_474_557, ("lfw", "cfp_fp", "agedb_30")),
    # Characters across typefaces (docs/data.md). A flipped character is another one. The demo's values: a CPU can
    # process few images, and AdamW needs a third of SGD's, mini with Muon half of tiny's with AdamW; an image teaches
    # more in a small batch than in a large one (docs/log.md, 2026-11-20, 2026-11-23 and 2026-11-29).
    "glyphs": {
        "image_size": 40,
        "network": "mini",
        "embedding_size": 128,
        "loss": "combined",
        "scale": 32.0,
        "margins": (1.0, 0.0, 0.3),
        "optimizer": "muon",
        "weight_decay": 0.05,
        "lr": 0.007,
        "batch_size": 24,
        "base_batch_size": 48,
        "lr_scheduler": "cosine",
        "warmup_epochs": 0.05,
        "epochs": 1.8,
        "val_targets": ("unseen", "unseen_font", "lookalike"),
        "augment": "glyph",
        "mirror": False,
        "frequent": 100,
        "checkpoint_every": 500,
    },
    **SYNTHETIC,
}


def get(name: str) -> Preset:
    """Returns a preset; custom has nothing. Raises ValueError, with all names, for an unknown one."""
    if name == "custom":
        return {}
    if name not in PRESETS:
        known = ", ".join(PRESETS)
        raise ValueError(f"--dataset is {name}; expected custom or one of {known}{near(name, PRESETS)}")
    return {"dataset": name, **PRESETS[name]}


# The data's own values override a preset's.
OF_THE_DATA = ("num_classes", "image_size")


def give_way(data: DataFlags, given: Collection[str]) -> tuple[DataFlags, list[str]]:
    """Replaces a preset's values, with a note, and the default image size by what the set at --rec states. given: flags
    that are neither the preset's nor a default."""
    preset = PRESETS.get(data.dataset, {})
    names = [name for name in OF_THE_DATA if name in (*preset, "image_size") and name not in given]
    if data.synthetic or not data.recs or not names or not (preset or data.is_record_file or data.are_sets):
        return data, []
    from partial_fc.data.sets.joined import stated_together  # NumPy takes a while, which --help avoids

    num_classes, size = stated_together(data.recs, "image_size" in names)
    own = {"num_classes": num_classes, "image_size": size[0] if size and size[0] == size[1] > 0 else None}
    taken: dict[str, Any] = {name: own[name] for name in names if own[name] not in (None, preset.get(name))}
    notes = [
        f"{flags.flag(name)} {value}, as {data.shown} says, not --dataset {data.dataset}'s {preset[name]}"
        for name, value in taken.items()
        if name in preset
    ]
    return dataclasses.replace(data, **taken), notes

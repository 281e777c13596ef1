"""What `--dataset NAME` stands for: facts about data sets and the schedules they were published with.

Data only. The recipe takes a value from the command line, else --config, else here, else its default.

Sources: InsightFace recognition/partial_fc/mxnet/default.py (webface, emore, glint360k, ...w) and
recognition/arcface_torch/configs (ms1mv3, wf4m, wf12m, wf42m; image counts of emore and glint360k).
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Preset:
    """None: not fixed by the data set; the records or the recipe's default decide."""

    num_classes: int | None
    """All classes. None: read from the `property` file beside the records."""
    num_images: int | None = None
    """Images of one epoch. None: as many as the records hold."""
    image_size: int = 112
    lr: float = 0.1
    """For a global batch of `base_batch_size`."""
    base_batch_size: int = 512
    """The global batch (all ranks) that lr, lr_steps and max_steps were meant for."""
    lr_scheduler: Literal["step", "polynomial", "cosine"] = "step"
    """step: x0.1 after each of lr_steps. polynomial: power 1, to 0 at the end."""
    lr_steps: tuple[int, ...] = ()
    """In updates. The update after the named one is the first with the lower rate."""
    max_steps: int | None = None
    """Updates, after which training ends; else `epochs` counts."""
    epochs: float | None = None
    val_targets: tuple[str, ...] = ()
    """Verification files beside the records, without .bin."""
    augment: Literal["none", "glyph"] = "none"
    """Training-time distortion beside mirroring (partial_fc/demo/augment.py)."""
    mirror: bool = True
    """A mirrored image is of the same class: mirror in training, add both embeddings in verification."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Other flags of the recipe with the values that were found to work on this data set."""
    synthetic: bool = False
    """No records are read: images and labels are made up, to measure speed without IO."""


def _synthetic(num_classes: int) -> Preset:
    return Preset(num_classes=num_classes, lr_steps=(20_000, 28_000), max_steps=32_000, synthetic=True)


def _arcface_torch(num_classes: int, num_images: int, val_targets: tuple[str, ...]) -> Preset:
    """The schedule that all of these configs share; published for 8 processes with a batch of 128 each."""
    return Preset(
        num_classes=num_classes,
        num_images=num_images,
        base_batch_size=1024,
        lr_scheduler="polynomial",
        epochs=20,
        val_targets=val_targets,
    )


_GLINT360K_CLASSES, _GLINT360K_IMAGES = 360_232, 17_091_657

PRESETS: dict[str, Preset] = {
    "webface": Preset(
        num_classes=10_575, lr_steps=(20_000, 28_000), max_steps=32_000, val_targets=("lfw", "cfp_fp", "agedb_30")
    ),
    "emore": Preset(
        num_classes=85_742,
        num_images=5_822_653,
        lr_steps=(100_000, 160_000),
        max_steps=180_000,
        val_targets=("agedb_30", "cfp_fp", "lfw"),
    ),
    "glint360k_8GPU": Preset(
        num_classes=_GLINT360K_CLASSES,
        num_images=_GLINT360K_IMAGES,
        lr_steps=(200_000, 400_000, 500_000, 550_000),
        max_steps=600_000,
        val_targets=("agedb_30", "calfw", "cfp_ff", "cfp_fp", "cplfw", "lfw", "vgg2_fp"),
    ),
    "glint360k_16GPU": Preset(
        num_classes=_GLINT360K_CLASSES,
        num_images=_GLINT360K_IMAGES,
        base_batch_size=1024,
        lr_steps=(200_000, 280_000, 360_000),
        max_steps=400_000,
        val_targets=("agedb_30", "cfp_fp", "lfw"),
    ),
    "ms1mv3": _arcface_torch(93_431, 5_179_510, ("lfw", "cfp_fp", "agedb_30")),
    "wf4m": _arcface_torch(205_990, 4_235_242, ("lfw", "cfp_fp", "agedb_30")),
    "wf12m": _arcface_torch(617_970, 12_720_066, ()),
    "wf42m": _arcface_torch(2_059_906, 42_474_557, ("lfw", "cfp_fp", "agedb_30")),
    # Characters across typefaces (docs/data.md). A mirrored character is another one. These are the demo's values:
    # a CPU has to see few images, and AdamW needs a third of SGD's (docs/log.md, 2026-11-20).
    "glyphs": Preset(
        num_classes=None,
        image_size=40,
        lr=0.003,
        base_batch_size=128,
        lr_scheduler="cosine",
        epochs=2.5,
        val_targets=("unseen", "unseen_font", "lookalike"),
        augment="glyph",
        mirror=False,
        more={
            "network": "tiny",
            "embedding_size": 128,
            "loss": "combined",
            "scale": 32.0,
            "margins": (1.0, 0.0, 0.3),
            "optimizer": "adamw",
            "weight_decay": 0.05,
            "warmup_epochs": 0.09,
            "frequent": 50,
            "verbose": 500,
            "checkpoint_every": 500,
        },
    ),
    # "w" is 10,000 in Chinese counting: 100w is a million classes.
    "100w": _synthetic(1_000_000),
    "1000w": _synthetic(10_000_000),
    "2000w": _synthetic(20_000_000),
    "3000w": _synthetic(30_000_000),
    "10000w": _synthetic(100_000_000),
    # Any number of classes, by --num-classes.
    "synthetic": Preset(num_classes=None, lr_scheduler="polynomial", synthetic=True),
}


def get(name: str) -> Preset:
    """Raises ValueError, naming all presets, for an unknown one."""
    if name not in PRESETS:
        raise ValueError(f"--dataset {name}: no such preset; expected one of {', '.join(PRESETS)}")
    return PRESETS[name]


def flags_of(name: str) -> dict[str, Any]:
    """What a preset says, by flag name."""
    preset = get(name)
    values = {field.name: getattr(preset, field.name) for field in dataclasses.fields(preset)}
    flags = {key: value for key, value in values.items() if key not in ("synthetic", "more") and value is not None}
    return {"dataset": name, **flags, **preset.more}

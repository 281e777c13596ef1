"""The settings of Partial FC on MXNet: its default.py, an EasyDict of other names than arcface_torch's.

    config.backbone_lr = 0.1
    config.lr_steps = '100000,160000'

`arcface_torch.read` reads the file, as data. Names and values: InsightFace's recognition/partial_fc/mxnet/default.py.
"""

from collections.abc import Collection
from typing import Any

_NUMBER = (int, float)
# Theirs -> (ours, the types of its value).
_SAME: dict[str, tuple[str, tuple[type, ...]]] = {
    **{name: (name, (int,)) for name in ("embedding_size", "image_size", "batch_size", "num_classes")},
    **{name: (name, (int,)) for name in ("frequent", "verbose")},
    "rec": ("rec", (str,)),
    "val_targets": ("val_targets", (list, tuple)),
    "backbone_lr": ("lr", _NUMBER),
    "memory_bank_lr": ("head_lr", _NUMBER),
    "sample_ratio": ("sample_rate", _NUMBER),
    "loss_s": ("scale", _NUMBER),
    "max_update": ("max_steps", (int,)),
    "num_layers": ("network", (int,)),
    "lr_steps": ("lr_steps", (str,)),
    "fp16": ("precision", (bool,)),
    "debug": ("dataset", (bool, int)),
}
_MARGINS = ("loss_m1", "loss_m2", "loss_m3")
# What the networks here are like: another value would be another network.
_FIXED = {
    "bn_mom": 0.9,
    "net_se": 0,
    "net_act": "prelu",
    "net_unit": 3,
    "net_input": 1,
    "net_output": "FC",
    "net_name": "resnet",
}
_WITHOUT_MEANING = {"workspace": "it is cuDNN's, under MXNet", "memonger": "--activation-checkpointing is like it"}
_LAYERS = (50, 100)
# A name by itself tells which trainer a file is of.
_KNOWN = {*_SAME, *_MARGINS, *_FIXED, *_WITHOUT_MEANING}

OF_A_FUNCTION = (
    "a function is not run, and it has no values of its own: what it sets are presets here, `--dataset emore --rec DIR "
    "--network r100 --loss cosface` (webface, glint360k_8GPU, 100w ...). Leave --config out, or leave the function out "
    "of the file"
)


def is_meant(config: Collection[str], arcface_torch: Collection[str]) -> bool:
    """Whether these settings are default.py's: some are, and are none of arcface_torch's."""
    return bool(_KNOWN.intersection(config).difference(arcface_torch))


def translate(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Settings -> (flags of recipe `face` by name, notes). As there, the learning rate is not scaled by the number of
    processes. Raises ValueError for a setting that is not known here, has a value of another type, or cannot be
    honoured."""
    flags: dict[str, Any] = {"lr_scaling": "none"}
    notes: list[str] = []
    for key, value in config.items():
        if key not in _KNOWN:
            raise ValueError(
                f"config.{key} is not a setting of partial_fc/mxnet's default.py that is known here; known are "
                f"{', '.join(sorted(_KNOWN))}"
            )
        if key in _FIXED and value != _FIXED[key]:
            raise ValueError(
                f"config.{key} = {value!r}: the networks here have {_FIXED[key]!r}"
                + (" (of fresnext there is no code in InsightFace either)" if key == "net_name" else "")
            )
        if key in _WITHOUT_MEANING:
            notes.append(f"config.{key} has no effect: {_WITHOUT_MEANING[key]}")
        if key in _SAME:
            name, types = _SAME[key]
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                expected = " or ".join(t.__name__ for t in types)
                raise ValueError(f"config.{key} = {str(value)[:200]}; expected {expected}")
            flags |= _flags(key, name, value, notes)
    return flags | _margins(config), notes


def _flags(key: str, name: str, value: Any, notes: list[str]) -> dict[str, Any]:
    match key:
        case "lr_steps":
            words = value.split(",")
            if not all(word.strip().isdecimal() for word in words):
                raise ValueError(f"config.lr_steps = {value[:200]!r}; expected updates, as in '100000,160000'")
            return {"lr_scheduler": "step", name: tuple(int(word) for word in words)}
        case "debug":
            return {name: "synthetic"} if value else {}
        case "fp16":
            return {name: "fp16" if value else "fp32"}
        case "num_layers" if value not in _LAYERS:
            raise ValueError(
                f"config.num_layers = {value}: expected 50 or 100 (r122 has no code in InsightFace either; "
                "r18, r34 and r200 are --network's)"
            )
        case "num_layers":
            return {name: f"r{value}"}
        case "sample_ratio" if value < 1:
            notes.append(
                f"config.sample_ratio = {value:g}: of all classes that take part, the batch's among them, as there "
                "(--quota insightface); --quota negatives has the batch's classes on top"
            )
            return {name: float(value), "quota": "insightface"}
        case "val_targets":
            if not all(isinstance(target, str) for target in value):
                raise ValueError(f"config.val_targets = {str(value)[:200]}; expected names of verification sets")
            return {name: tuple(value)}
    return {name: float(value) if _SAME[key][1] == _NUMBER else value}


def _margins(config: dict[str, Any]) -> dict[str, Any]:
    given = [config[name] for name in _MARGINS if name in config]
    if not given:
        return {}
    if len(given) < 3 or not all(isinstance(m, _NUMBER) and not isinstance(m, bool) for m in given):
        raise ValueError("config.loss_m1, loss_m2, loss_m3: expected three numbers, of cos(m1 * angle + m2) - m3")
    named = {(1.0, 0.5, 0.0): "arcface", (1.0, 0.0, 0.4): "cosface"}
    margins = (float(given[0]), float(given[1]), float(given[2]))
    return {"loss": named[margins]} if margins in named else {"loss": "combined", "margins": margins}

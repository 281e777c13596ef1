"""Settings of arcface_torch as flags of recipe `face`.

(Names and values: InsightFace's recognition/arcface_torch/configs.)
"""

import math
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from reprlib import Repr
from typing import Any

_PAGE = "docs/coming-from-insightface.md"
_short = Repr()  # a list may contain one list many times
_short.maxlevel, _short.maxstring = 2, 200
_shown = _short.repr

_Types = tuple[type, ...]
_INT, _TEXT, _BOOL, _LIST = (int,), (str,), (bool,), (list, tuple)
_NUMBER: _Types = (int, float)


# train_v2.py: PolynomialLRWarmup, a rate independent of the number of processes, clipping of the backbone's gradient,
# not the centres', at norm 5; torch.optim with momentum 0.9 and one decay moves all parameters and all centres in every
# update, by the sum of the micro-batches' gradients.
_ALWAYS = {
    **{"lr_scheduler": "arcface-torch", "lr_scaling": "none", "clip": 5.0, "head_clip": math.inf},
    **{"momentum": 0.9, "decay_all": True, "head_catch_up": "exact", "accumulate_sum": True},
}
_SAME = {
    **dict.fromkeys(("network", "loss", "rec", "optimizer"), _TEXT),
    **dict.fromkeys(("image_size", "embedding_size", "num_classes", "batch_size"), _INT),
    **dict.fromkeys(("seed", "num_workers", "verbose", "frequent"), _INT),
    **dict.fromkeys(("sample_rate", "lr", "weight_decay", "interclass_filtering_threshold"), _NUMBER),
    **{"resume": _BOOL, "val_targets": _LIST},
}
# Setting -> (flag, types of its value).
_TAKEN: dict[str, tuple[str, _Types]] = {
    **{name: (name, types) for name, types in _SAME.items()},
    "num_image": ("num_images", _INT),
    "gradient_acc": ("accumulate", _INT),
    "num_epoch": ("epochs", _INT),
    "warmup_epoch": ("warmup_epochs", _INT),
    "fp16": ("precision", _BOOL),
    "margin_list": ("margins", _LIST),
    "output": ("models_root", (str, type(None))),
}
# Setting -> (the value that needs no note, why another has no effect).
_WITHOUT_EFFECT = {
    "momentum": (0.9, "their SGD has 0.9 always"),
    "dali": (False, "DALI is not used"),
    "using_wandb": (False, "see --wandb PROJECT"),
}
# Checkpoints always hold all states; the others are used only with using_wandb, and one is a key.
_SILENT = (
    "save_all_states", "wandb_key", "wandb_entity", "wandb_project", "wandb_resume", "wandb_log_all",
    "suffix_run_name", "save_artifacts", "notes",
)  # fmt: skip
OF_A_FUNCTION = (
    "a function is not run; what that of partial_fc/mxnet's default.py sets are presets here: `--dataset emore --rec "
    "DIR --network r100 --loss cosface` (webface, glint360k_8GPU, 100w ...), without --config"
)


def translate(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns (flags of recipe `face` by name, notes for the user). Raises ValueError for an unknown setting, with
    similar names, for a value of another type, and for an unsupported one that changes what is learned."""
    known = sorted({*_TAKEN, *_WITHOUT_EFFECT, *_SILENT, "dali_aug"})
    flags, notes = dict[str, Any](_ALWAYS), list[str]()
    for key, value in config.items():
        if key not in known:
            near = get_close_matches(key, known)
            hint = f"; did you mean {' or '.join(near)}?" if near else f"; known are {', '.join(known)}"
            raise ValueError(f"config.{key} is not a setting of arcface_torch that is known here{hint}")
        if key == "dali_aug" and value:
            raise ValueError(
                f"config.dali_aug = {_shown(value)}: DALI's augmentations are not implemented; set it to False"
            )
        neutral, why = _WITHOUT_EFFECT.get(key, (value, ""))
        if value != neutral:
            notes.append(f"config.{key} has no effect: {why} ({_PAGE})")
        if key in _TAKEN:
            name, types = _TAKEN[key]
            if not _is_a(value, types):
                raise ValueError(f"config.{key} = {_shown(value)}; expected {' or '.join(t.__name__ for t in types)}")
            flags |= _flags(key, name, float(value) if types == _NUMBER else value, notes)
    return flags, notes


def _is_a(value: Any, types: _Types) -> bool:
    # A bool is an int in Python, but never meant as one here.
    return isinstance(value, types) and (bool in types or not isinstance(value, bool))


def _flags(key: str, name: str, value: Any, notes: list[str]) -> dict[str, Any]:
    """Returns the flags of one setting. name: ours."""
    match name:
        case "margins":
            return _arcface_torch_margins(value, notes)
        case "sample_rate" if value < 1:
            notes.append(f"config.{key} = {value:g}: --quota insightface, as there ({_PAGE})")
            return {name: value, "quota": "insightface"}
        case "interclass_filtering_threshold" if value:
            notes.append(f"config.{key}: classes are left out ({_PAGE})")
        case "rec" if value == "synthetic":
            return {"dataset": value}
        case "resume":
            value = "auto" if value else "same"  # theirs loads no other run; ours resumes its own
        case "models_root" if value is None:
            return {}
        case "rec":
            value = Path(value)
        case "models_root":
            notes.append(f"config.output = {_shown(value)}: the run writes there (--models-root)")
            value = Path(value)
        case "precision" if value:
            notes.append(f"config.fp16: bf16 where the hardware has it ({_PAGE})")
            value = "auto"
        case "precision":
            value = "fp32"
        case "accumulate" if value > 1:
            notes.append(f"config.{key} = {value}: --accumulate-sum, as there ({_PAGE})")
        case "warmup_epochs":
            value = max(0, value)  # some published configs use -1 for none
        case "val_targets":
            if not all(isinstance(target, str) for target in value):
                raise ValueError(f"config.{key} = {_shown(value)}; expected names of verification sets")
            value = tuple(value)
    return {name: value}


def _arcface_torch_margins(margins: Any, notes: list[str]) -> dict[str, Any]:
    """Converts margin_list as arcface_torch's CombinedMarginLoss reads it, with its fixed scale."""
    flags = _margins(f"config.margin_list = {_shown(margins)}", margins)
    m1, m2, m3 = (float(m) for m in margins)
    if (m1, m3) == (1.0, 0.0) and m2:
        flags = {"loss": "arcface-straight-through"} | ({} if m2 == 0.5 else {"margins": (m1, m2, m3)})
        notes.append(f"config.margin_list: the margin's slope is left out, as there ({_PAGE})")
    elif m3 > 0 and (m1, m2) != (1.0, 0.0):
        flags = _margins("", (1.0, 0.0, m3))
        notes.append(f"config.margin_list: m1 and m2 are ignored beside m3, as there ({_PAGE})")
    return {**flags, "scale": 64.0}


def _margins(what: str, given: Any) -> dict[str, Any]:
    """Returns the loss with the margins (m1, m2, m3), by name if it has one."""
    if len(given) != 3 or not all(_is_a(m, _NUMBER) for m in given):
        raise ValueError(f"{what}; expected three numbers (m1, m2, m3) of cos(m1 * angle + m2) - m3")
    margins = tuple(float(m) for m in given)
    named = {(1.0, 0.5, 0.0): "arcface", (1.0, 0.0, 0.4): "cosface"}
    return {"loss": named[margins]} if margins in named else {"loss": "combined", "margins": margins}

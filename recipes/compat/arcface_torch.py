"""Reads configuration files in the style of arcface_torch: Python text that fills an EasyDict.

    from easydict import EasyDict as edict
    config = edict()
    config.network = "r50"
    config.warmup_epoch = config.num_epoch // 10

The text is parsed, never executed: `read` returns what it assigns, `translate` turns that into the flags of
recipe `face`. As in arcface_torch, a `base.py` in the same folder is read first (`load`).
"""

import ast
import operator
import tokenize
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

ALLOWED = (
    "allowed are: `from easydict import EasyDict as edict`, `config = edict()`, and assignments "
    "`config.name = value`, where a value is a number, string, bool, None, list, tuple or dict, arithmetic "
    "of numbers, another `config.name`, or `edict()` or `edict({...})`"
)

_TOO_DEEP = (RecursionError, MemoryError)
_MAX_INT = 2**63  # a few powers of powers fill any memory

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def load(path: Path) -> tuple[dict[str, Any], list[str]]:
    """A file and the base.py beside it -> flags of recipe `face`, notes for the user (see `translate`)."""
    path = Path(path)
    base = path.with_name("base.py")
    values = {**read(base), **read(path)} if base.exists() and base != path else read(path)
    try:
        return translate(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read(path: Path) -> dict[str, Any]:
    """What the file assigns to its `config`; a nested edict becomes a dict.

    Raises ValueError naming file, line and source text for anything that is not plain data.
    """
    try:
        with tokenize.open(path) as file:
            source = file.read()
        module = ast.parse(source, filename=str(path))
    except _TOO_DEEP as error:  # as the parser says, too
        raise ValueError(f"{path}: brackets or operators within each other, too deep") from error
    except (SyntaxError, ValueError, LookupError) as error:  # LookupError: a coding that is none of text
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ValueError(f"{path}{line}: not readable as a Python file: {error}") from error
    try:
        return _Reader(path, source).read(module)
    except _TOO_DEEP as error:
        raise ValueError(f"{path}: values within values, too deep: {error}") from error


class _Reader:
    def __init__(self, path: Path, source: str):
        self.path = path
        self.source = source
        self.edict_name = ""
        self.config_name = ""
        self.config: dict[str, Any] = {}

    def read(self, module: ast.Module) -> dict[str, Any]:
        for statement in module.body:
            match statement:
                case ast.ImportFrom(module="easydict", names=[ast.alias(name="EasyDict") as alias], level=0):
                    self.edict_name = alias.asname or alias.name
                case ast.Expr(value=ast.Constant(value=str())):
                    pass  # a docstring, or a block that was commented out with quotes
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        self.assign(target, value)
                case _:
                    raise self.error(statement, "not plain data")
        if not self.config_name:
            raise ValueError(f"{self.path}: nothing is configured, expected `config = edict()`; {ALLOWED}")
        return self.config

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        match target:
            case ast.Name(id=name) if not self.config_name:
                config = self.value(value)
                if not isinstance(config, dict) or not isinstance(value, ast.Call):
                    raise self.error(target, f"{name} is not an edict()")
                self.config_name, self.config = name, config
            case ast.Attribute(value=owner, attr=name):
                holder = self.attribute(owner)
                if not isinstance(holder, dict):
                    raise self.error(target, f"{ast.unparse(owner)} is not an edict()")
                holder[name] = self.value(value)
            case _:
                raise self.error(target, "only attributes of one edict can be assigned")

    def attribute(self, node: ast.expr) -> Any:
        """The value of `config` or `config.a.b`."""
        match node:
            case ast.Name(id=name) if name == self.config_name:
                return self.config
            case ast.Attribute(value=owner, attr=name):
                holder = self.attribute(owner)
                if not isinstance(holder, dict) or name not in holder:
                    raise self.error(node, f"{ast.unparse(node)} has no value here")
                return holder[name]
        raise self.error(node, "not plain data")

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() as value) if abs(value) > _MAX_INT:
                raise self.error(node, "a number above 2^63")
            case ast.Constant(value=value) if value is None or isinstance(value, bool | int | float | str):
                return value
            case ast.List(elts=items):
                return [self.value(item) for item in items]
            case ast.Tuple(elts=items):
                return tuple(self.value(item) for item in items)
            case ast.Dict(keys=keys, values=values):
                return self.dictionary(node, keys, values)
            case ast.Attribute():
                return self.attribute(node)
            case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
                number = self.number(operand)
                return -number if isinstance(node.op, ast.USub) else number
            case ast.BinOp():
                return self.arithmetic(node)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name == self.edict_name:
                match args:
                    case []:
                        return {}
                    case [ast.Dict() as content]:
                        return self.value(content)
        raise self.error(node, "not plain data")

    def dictionary(self, node: ast.expr, keys: list[ast.expr | None], values: list[ast.expr]) -> dict[Any, Any]:
        result = {}
        for key, value in zip(keys, values, strict=True):
            if not isinstance(key, ast.Constant):
                raise self.error(node, "a key of a dict must be a string or a number")
            result[self.value(key)] = self.value(value)
        return result

    def arithmetic(self, node: ast.BinOp) -> int | float:
        left, right = self.number(node.left), self.number(node.right)
        if type(node.op) not in _ARITHMETIC:
            raise self.error(node, "not plain data")
        if isinstance(node.op, ast.Pow) and abs(right) > 64:
            raise self.error(node, "an exponent above 64")
        try:
            result = _ARITHMETIC[type(node.op)](left, right)
        except ArithmeticError as error:
            raise self.error(node, str(error)) from error
        if isinstance(result, complex):
            raise self.error(node, "not a real number")
        if isinstance(result, int) and abs(result) > _MAX_INT:
            raise self.error(node, "a number above 2^63")
        return result

    def number(self, node: ast.expr) -> int | float:
        value = self.value(node)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(node, f"arithmetic needs numbers, got {value!r}")
        return value

    def error(self, node: ast.stmt | ast.expr, what: str) -> ValueError:
        text = (ast.get_source_segment(self.source, node) or "").partition("\n")[0][:200]
        return ValueError(f"{self.path}:{node.lineno}: `{text}`: {what}; {ALLOWED}")


# Same meaning here: arcface_torch's name -> (our flag, type of the value).
_RENAMED: dict[str, tuple[str, type]] = {
    "network": ("network", str),
    "loss": ("loss", str),  # older versions; newer ones say margin_list
    "image_size": ("image_size", int),
    "embedding_size": ("embedding_size", int),
    "num_classes": ("num_classes", int),
    "num_image": ("num_images", int),
    "sample_rate": ("sample_rate", float),
    "optimizer": ("optimizer", str),
    "lr": ("lr", float),
    "momentum": ("momentum", float),
    "weight_decay": ("weight_decay", float),
    "batch_size": ("batch_size", int),
    "gradient_acc": ("accumulate", int),
    "num_epoch": ("epochs", int),
    "seed": ("seed", int),
    "num_workers": ("num_workers", int),  # there processes, here threads; both decode
    "verbose": ("verbose", int),
    "frequent": ("frequent", int),
}

# Same meaning, other spelling of the value (see `_converted`): arcface_torch's name -> type of the value.
_CONVERTED: dict[str, type | tuple[type, ...]] = {
    "margin_list": (list, tuple),
    "interclass_filtering_threshold": (int, float),
    "rec": str,
    "resume": bool,
    "output": (str, type(None)),
    "fp16": bool,
    "warmup_epoch": int,
    "val_targets": (list, tuple),
}

# Would change what is learned, and is not there: key -> (the value that asks for nothing, remedy).
_REFUSED = {"dali_aug": (False, "DALI's augmentations are not implemented; set it to False")}

# Changes only how, not what, is learned: key -> (the value about which nothing need be said, note).
_WITHOUT_MEANING = {
    "dali": (False, "DALI is not used; OpenCV threads decode the records"),
    "save_all_states": (True, "checkpoints always hold all states"),
    "using_wandb": (False, "Weights & Biases is not used; curves go to TensorBoard"),
}
# Read by arcface_torch only where using_wandb is on. Their values, among them a key, are never printed.
_WANDB = (
    "wandb_key",
    "wandb_entity",
    "wandb_project",
    "wandb_resume",
    "wandb_log_all",
    "suffix_run_name",
    "save_artifacts",
    "notes",
)


def translate(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """arcface_torch's keys -> (flags of recipe `face` by name, notes that the user should see once).

    Besides the keys it fixes what arcface_torch always does: polynomial decay of power 1, scale 64, and a
    learning rate that is not scaled by the number of processes. Raises ValueError for an unknown key, naming
    near ones, and for a setting that changes what is learned and cannot be honoured.
    """
    known = [*_RENAMED, *_CONVERTED, *_REFUSED, *_WITHOUT_MEANING, *_WANDB]
    for key in config:
        if key not in known:
            near = get_close_matches(key, known)
            hint = f"; did you mean {' or '.join(near)}?" if near else f"; known are {', '.join(sorted(known))}"
            raise ValueError(f"config.{key} is not a setting of arcface_torch that is known here{hint}")
    for key, (neutral, remedy) in _REFUSED.items():
        if config.get(key, neutral) != neutral:
            raise ValueError(f"config.{key} = {config[key]!r}: {remedy}")

    notes = [
        f"config.{key} has no effect: {note}"
        for key, (silent, note) in _WITHOUT_MEANING.items()
        if key in config and config[key] != silent
    ]
    flags: dict[str, Any] = {"lr_scheduler": "polynomial", "lr_scaling": "none"}
    for key, value in config.items():
        if key in _RENAMED:
            flag, kind = _RENAMED[key]
            flags[flag] = kind(_typed(key, value, (int, float) if kind is float else kind))
        elif key in _CONVERTED:
            flags |= _converted(key, _typed(key, value, _CONVERTED[key]), notes)
    return flags, notes


def _typed(key: str, value: Any, kind: type | tuple[type, ...]) -> Any:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    # A bool passes for an int in Python; nobody means that here.
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"config.{key} = {value!r}; expected {' or '.join(k.__name__ for k in kinds)}")
    return value


def _converted(key: str, value: Any, notes: list[str]) -> dict[str, Any]:
    match key:
        case "margin_list":
            return _margins(value, notes)
        case "interclass_filtering_threshold":
            if value:
                notes.append(
                    f"config.{key} = {value}: a class above it is left out of the row's softmax here; "
                    "arcface_torch keeps it, with the cosine 0"
                )
            return {key: float(value)}
        case "rec":
            return {"dataset": "synthetic"} if value == "synthetic" else {"rec": value}
        case "resume":
            return {"resume": "auto" if value else "never"}
        case "output":
            return {} if value is None else {"models_root": value}
        case "fp16":
            if value:
                notes.append(
                    "config.fp16: 16 bits are bf16 where the hardware has them, and no loss scale is needed; "
                    "--precision fp16 is arcface_torch's"
                )
            return {"precision": "auto" if value else "fp32"}
        case "warmup_epoch":
            # Some published configs say -1 where they mean none.
            return {"warmup_epochs": max(0, value)}
        case "val_targets":
            return {"val_targets": tuple(value)}
    raise AssertionError(key)


def _margins(margins: list[Any] | tuple[Any, ...], notes: list[str]) -> dict[str, Any]:
    """(m1, m2, m3) of cos(m1 * angle + m2) - m3 -> the loss by name where it has one."""
    if len(margins) != 3 or not all(isinstance(margin, int | float) for margin in margins):
        raise ValueError(f"config.margin_list = {margins!r}; expected three numbers (m1, m2, m3)")
    m1, m2, m3 = (float(margin) for margin in margins)
    if (m1, m3) == (1.0, 0.0) and m2 > 0:
        notes.append(
            f"config.margin_list = {margins!r}: the margin is differentiated here; arcface_torch leaves "
            "its slope out, which is --loss arcface-straight-through"
        )
    if (m1, m2, m3) == (1.0, 0.5, 0.0):
        return {"loss": "arcface", "scale": 64.0}
    if (m1, m2, m3) == (1.0, 0.0, 0.4):
        return {"loss": "cosface", "scale": 64.0}
    if m3 > 0 and (m1, m2) != (1.0, 0.0):
        notes.append(
            f"config.margin_list = {margins!r}: all three margins are used; arcface_torch itself ignores "
            "m1 and m2 where m3 is positive"
        )
    return {"loss": "combined", "margins": (m1, m2, m3), "scale": 64.0}

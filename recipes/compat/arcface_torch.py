"""Reads configuration files in the style of arcface_torch: Python text that fills an EasyDict.

    from easydict import EasyDict as edict
    config = edict()
    config.network = "r50"
    config.warmup_epoch = config.num_epoch // 10

The text is parsed, never executed: `read` returns what it assigns, `translate` turns that into the flags of
recipe `face`. As in arcface_torch, a `base.py` in the same folder is read first (`load`).
"""

import ast
import io
import math
import operator
import tokenize
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from reprlib import Repr
from typing import Any

from partial_fc.files import read_bytes
from partial_fc.flags import near

from . import default_py

ALLOWED = (
    "allowed are: `from easydict import EasyDict as edict`, `config = edict()` or `edict({...})`, and assignments "
    "`config.name = value`, where a value is a number, string, bool, None, list or tuple, arithmetic of numbers, or "
    "another `config.name`"
)

_MAX_INT = 2**63  # a few powers of powers fill any memory
_MOST_BYTES = 1 << 16  # configurations have one or two thousand; a parsed text takes a hundred times its size
_short = Repr()  # lists may hold one list often
_short.maxlevel, _short.maxstring = 2, 200
_shown = _short.repr

_ARITHMETIC: dict[type[ast.operator | ast.unaryop], Callable[..., Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def load(path: Path) -> tuple[dict[str, Any], list[str]]:
    """A file and the base.py beside it -> flags of recipe `face`, notes for the user (see `translate`). The default.py
    of Partial FC on MXNet is told by its names."""
    path = Path(path)
    if not path.suffix and not path.exists():  # as arcface_torch's own command line has them
        path = path.with_name(f"{path.name}.py")
    if not path.is_file():
        others = [other.stem for other in path.parent.glob("*.py")]
        raise ValueError(f"--config {path}: no such file{near(path.stem, others)}")
    base = path.with_name("base.py")
    values = {**read(base), **read(path)} if base.exists() and base != path else read(path)
    try:
        return default_py.translate(values) if default_py.is_meant(values, _known()) else translate(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read(path: Path) -> dict[str, Any]:
    """What the file assigns to its `config`.

    Raises ValueError naming file, line and source text for anything that is not plain data.
    """
    try:
        return _Reader(path).read()
    except (RecursionError, MemoryError) as error:  # the second by Python's parser
        raise ValueError(f"{path}: brackets or operators within each other, too deep") from error


class _Reader:
    def __init__(self, path: Path):
        self.path = path
        try:
            content = io.BytesIO(read_bytes(path, _MOST_BYTES))
            encoding, _ = tokenize.detect_encoding(content.readline)
            content.seek(0)
            self.source = io.TextIOWrapper(content, encoding).read()
            self.statements = ast.parse(self.source, filename=str(path)).body
        except (SyntaxError, ValueError, LookupError) as error:  # LookupError: a coding that is none of text
            line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            raise ValueError(f"{path}{line}: not readable as a Python file: {error}") from error
        self.edict_name = ""
        self.config_name = ""
        self.config: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        for statement in self.statements:
            match statement:
                case ast.ImportFrom(module="easydict", names=[ast.alias(name="EasyDict") as alias], level=0):
                    self.edict_name = alias.asname or alias.name
                case ast.Expr(value=ast.Constant(value=str())):
                    pass  # a docstring, or a block that was commented out with quotes
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        self.assign(target, value)
                case ast.FunctionDef(name="generate_config"):
                    raise ValueError(f"{self.path}:{statement.lineno}: generate_config: {default_py.OF_A_FUNCTION}")
                case _:
                    raise self.error(statement, "not plain data")
        if not self.config_name:
            raise ValueError(f"{self.path}: nothing is configured, expected `config = edict()`; {ALLOWED}")
        return self.config

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        match target, value:
            case ast.Name(id=name), ast.Call(func=ast.Name(id=called), args=args, keywords=[]) if (
                called == self.edict_name and not self.config_name
            ):
                self.config_name = name
                self.config = self.edict(value, args)
            case ast.Attribute(value=ast.Name(id=owner), attr=name), _ if owner == self.config_name:
                self.config[name] = self.value(value)
            case _:
                raise self.error(target, "only one edict(), and its attributes, can be assigned")

    def edict(self, call: ast.expr, arguments: list[ast.expr]) -> dict[str, Any]:
        """What edict() or edict({"name": value}) holds."""
        match arguments:
            case []:
                return {}
            case [ast.Dict(keys=keys, values=values)]:
                names = [key.value if isinstance(key, ast.Constant) else None for key in keys]
                if all(isinstance(name, str) for name in names):
                    return {str(name): self.value(value) for name, value in zip(names, values, strict=True)}
        raise self.error(call, "edict() takes nothing, or a dict of names and values")

    def value(self, node: ast.expr) -> Any:
        result: Any
        match node:
            case ast.Constant(value=None | bool() | int() | float() | str() as value):
                result = value
            case ast.List(elts=items):
                result = [self.value(item) for item in items]
            case ast.Tuple(elts=items):
                result = tuple(self.value(item) for item in items)
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner == self.config_name:
                if name not in self.config:
                    raise self.error(node, "has no value here")
                result = self.config[name]
            case ast.UnaryOp(op=op, operand=operand):
                result = self.arithmetic(node, op, operand)
            case ast.BinOp(left=left, op=op, right=right):
                result = self.arithmetic(node, op, left, right)
            case _:
                raise self.error(node, "not plain data")
        if isinstance(result, int) and abs(result) > _MAX_INT:
            raise self.error(node, "a number above 2^63")
        return result

    def arithmetic(self, node: ast.expr, op: ast.operator | ast.unaryop, *operands: ast.expr) -> int | float:
        numbers = [self.value(operand) for operand in operands]
        if type(op) not in _ARITHMETIC or not all(type(number) in (int, float) for number in numbers):
            raise self.error(node, "only + - * / // % ** of numbers can be computed")
        if isinstance(op, ast.Pow) and numbers[1] > 64:
            raise self.error(node, "an exponent above 64")
        try:
            result = _ARITHMETIC[type(op)](*numbers)
        except ArithmeticError as error:
            raise self.error(node, str(error)) from error
        if isinstance(result, complex):
            raise self.error(node, "not a real number")
        return result

    def error(self, node: ast.stmt | ast.expr, what: str) -> ValueError:
        text = (ast.get_source_segment(self.source, node) or "").partition("\n")[0][:200]
        return ValueError(f"{self.path}:{node.lineno}: `{text}`: {what}; {ALLOWED}")


# arcface_torch's name -> the types of its value.
_NUMBER = (int, float)
_TYPES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("network", "loss", "rec", "optimizer"), (str,)),
    **dict.fromkeys(("image_size", "embedding_size", "num_classes", "num_image", "batch_size"), (int,)),
    **dict.fromkeys(("gradient_acc", "num_epoch", "warmup_epoch", "seed", "num_workers"), (int,)),
    **dict.fromkeys(("verbose", "frequent"), (int,)),
    **dict.fromkeys(("sample_rate", "lr", "momentum", "weight_decay", "interclass_filtering_threshold"), _NUMBER),
    **dict.fromkeys(("fp16", "resume"), (bool,)),
    **dict.fromkeys(("margin_list", "val_targets"), (list, tuple)),
    "output": (str, type(None)),
}
# Those that have another name here.
_RENAMED = {
    "num_image": "num_images",
    "gradient_acc": "accumulate",
    "num_epoch": "epochs",
    "warmup_epoch": "warmup_epochs",
    "output": "models_root",
}

# Would change what is learned, and is not there: key -> (the value that asks for nothing, remedy).
_REFUSED = {"dali_aug": (False, "DALI's augmentations are not implemented; set it to False")}

# Changes only how, not what, is learned: key -> (the value about which nothing need be said, note).
_WITHOUT_MEANING = {
    "dali": (False, "DALI is not used; OpenCV threads decode the records"),
    "using_wandb": (False, "curves go to TensorBoard; --wandb PROJECT sends them to Weights & Biases, too"),
}
# Nothing need be said of these: checkpoints always hold all states; the others are read by arcface_torch only where
# using_wandb is on. Their values, among them a key, are never printed.
_SILENT = (
    "save_all_states",
    "wandb_key",
    "wandb_entity",
    "wandb_project",
    "wandb_resume",
    "wandb_log_all",
    "suffix_run_name",
    "save_artifacts",
    "notes",
)


def _known() -> list[str]:
    return [*_TYPES, *_REFUSED, *_WITHOUT_MEANING, *_SILENT]


def translate(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """arcface_torch's keys -> (flags of recipe `face` by name, notes that the user should see once).

    Besides the keys it fixes what arcface_torch always does: polynomial decay of power 1, scale 64, a learning rate
    that is not scaled by the number of processes, and a gradient of the backbone, not of the centres, whose norm is at
    most 5; where it samples, its quota. Raises ValueError for an unknown key, naming near ones, and for a setting that
    changes what is learned and cannot be honoured.
    """
    known = _known()
    flags: dict[str, Any] = {"lr_scheduler": "polynomial", "lr_scaling": "none", "clip": 5.0, "head_clip": math.inf}
    notes: list[str] = []
    for key, value in config.items():
        if key not in known:
            near = get_close_matches(key, known)
            hint = f"; did you mean {' or '.join(near)}?" if near else f"; known are {', '.join(sorted(known))}"
            raise ValueError(f"config.{key} is not a setting of arcface_torch that is known here{hint}")
        neutral, words = (_REFUSED | _WITHOUT_MEANING).get(key, (value, ""))
        if value != neutral and key in _REFUSED:
            raise ValueError(f"config.{key} = {_shown(value)}: {words}")
        if value != neutral:
            notes.append(f"config.{key} has no effect: {words}")
        if key in _TYPES:
            types = _TYPES[key]
            # A bool passes for an int in Python; nobody means that here.
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                raise ValueError(f"config.{key} = {_shown(value)}; expected {' or '.join(t.__name__ for t in types)}")
            flags |= _flags(key, float(value) if types == _NUMBER else value, notes)
    return flags, notes


def _flags(key: str, value: Any, notes: list[str]) -> dict[str, Any]:
    """The flags that one setting stands for."""
    match key:
        case "margin_list":
            return _margins(value, notes)
        case "sample_rate" if value < 1:
            notes.append(
                f"config.{key} = {value:g}: of all classes that take part, the batch's among them, as arcface_torch "
                "counts (--quota insightface), but over the classes of all processes at once; --quota negatives, "
                "otherwise the default here, has the batch's classes on top"
            )
            return {"sample_rate": value, "quota": "insightface"}
        case "interclass_filtering_threshold" if value:
            notes.append(
                f"config.{key} = {value}: a class above it is left out of the row's softmax here; "
                "arcface_torch keeps it, with the cosine 0"
            )
        case "rec" if value == "synthetic":
            return {"dataset": value}
        case "resume":
            value = "auto" if value else "same"  # theirs loads no other run; what is this one's goes on
        case "output" if value is None:
            return {}
        case "output":
            notes.append(f"config.output = {_shown(value)}: this is where the run writes (--models-root names another)")
        case "fp16":
            if value:
                notes.append(
                    "config.fp16: 16 bits are bf16 where the hardware has them, and no loss scale is needed; "
                    "--precision fp16 is arcface_torch's"
                )
            return {"precision": "auto" if value else "fp32"}
        case "warmup_epoch":
            value = max(0, value)  # some published configs say -1 where they mean none
        case "val_targets":
            if not all(isinstance(name, str) for name in value):
                raise ValueError(f"config.{key} = {_shown(value)}; expected names of verification sets")
            value = tuple(value)
    return {_RENAMED.get(key, key): value}


def _margins(margins: list[Any] | tuple[Any, ...], notes: list[str]) -> dict[str, Any]:
    """(m1, m2, m3) of cos(m1 * angle + m2) - m3 -> the loss by name where it has one."""
    if len(margins) != 3 or not all(isinstance(margin, int | float) for margin in margins):
        raise ValueError(f"config.margin_list = {_shown(margins)}; expected three numbers (m1, m2, m3)")
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

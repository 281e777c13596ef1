"""Reader of configuration files in arcface_torch's style: Python text that fills an EasyDict.

    from easydict import EasyDict as edict
    config = edict()
    config.network = "r50"
    config.warmup_epoch = config.num_epoch // 10

The text is parsed, never executed: `read` returns its assignments, which settings.py converts to flags of recipe
`face`. As in arcface_torch, a `base.py` in the same folder is read first (`load`).
"""

import ast
import io
import operator
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import Any

from partial_fc.files import read_bytes
from partial_fc.flags import near

from . import settings

ALLOWED = (
    "allowed are: `from easydict import EasyDict as edict`, `config = edict()` or `edict({...})`, and assignments "
    "`config.name = value`, where a value is a number, string, bool, None, list or tuple, arithmetic of numbers, or "
    "another `config.name`"
)

_MAX_INT = 2**63  # a few nested powers fill any memory
_MOST_BYTES = 1 << 16  # configurations have one or two thousand; parsed text takes a hundred times its size

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
    """Converts a file and its base.py to flags of recipe `face` and notes for the user (see `settings.translate`)."""
    path = Path(path)
    if not path.suffix and not path.exists():  # arcface_torch's command line omits the suffix
        path = path.with_name(f"{path.name}.py")
    if not path.is_file():
        others = [other.stem for other in path.parent.glob("*.py")]
        raise ValueError(f"--config {path}: no such file{near(path.stem, others)}")
    base = path.with_name("base.py")
    values = {**read(base), **read(path)} if base.exists() and base != path else read(path)
    try:
        return settings.translate(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read(path: Path) -> dict[str, Any]:
    """Returns a file's assignments to its `config`.

    Raises ValueError, with file, line and source text, for anything but plain data.
    """
    try:
        return _Reader(path).read()
    except (RecursionError, MemoryError) as error:  # MemoryError: from Python's parser
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
        except (SyntaxError, ValueError, LookupError) as error:  # LookupError: not a text encoding
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
                    pass  # a docstring, or a block commented out with quotes
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        self.assign(target, value)
                case ast.FunctionDef(name="generate_config"):
                    raise ValueError(f"{self.path}:{statement.lineno}: generate_config: {settings.OF_A_FUNCTION}")
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
        """Evaluates edict() or edict({"name": value})."""
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

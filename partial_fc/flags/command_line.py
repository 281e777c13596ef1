"""The parser of command lines into dataclasses, whose fields are the flags.

It calls tyro, and adds: `--help` shows the basic flags and `--help-all` all of them; an error is one line that names
the flag as it was typed, or the nearest existing one.
"""

import dataclasses
import difflib
import functools
import os
import re
import shutil
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, StructConstructorSpec, StructTypeInfo

from partial_fc.errors import UsageError
from partial_fc.flags.facts import basic as basic_of
from partial_fc.flags.facts import check_numbers, flag

_T = TypeVar("_T")
_Result = TypeVar("_Result")
_WIDTHS = 40, 400  # columns of the help, at least and at most
_LONGEST_HELP = 150  # characters, of two lines beside or below a flag
_KINDS = {
    int: ("INT", "a whole number"),
    float: ("FLOAT", "a number"),
    str: ("STR", "a word"),
    Path: ("PATH", "a path"),
}
_BY_TYRO = object()  # marks what tyro's own rule is asked for
# Flags of other programs with exactly the same meaning: theirs -> ours.
_ALIASES = {"bs": "batch_size", "learning_rate": "lr", "wd": "weight_decay", "workers": "num_workers"}


def parse(
    flags: type[_T],
    given: Sequence[str],
    program: str,
    *,
    default: _T | None = None,
    matter: Collection[str] = (),
    elsewhere: Mapping[str, str] | None = None,
    typed: Sequence[str] | None = None,
    renamed: Mapping[str, str] | None = None,
) -> _T:
    """Parses a command line. Raises UsageError if it is invalid. Ends the process with status 0 after --help.

    program: the command as the user typed it. default: overrides the fields' own defaults; its values need not be valid
    by themselves. matter: the fields that --help shows; none: those marked Basic, or all. elsewhere: other programs'
    flags, and values as "flag value" -> what they are called here. typed: the user's words, if `given` is their
    translation; renamed: names of flags before it -> after it.
    """
    fields = dict(_fields(flags))
    # A translation has read the flags already: aliases would come too late.
    aliases = {} if typed is not None else {a: b for a, b in _ALIASES.items() if b in fields and a not in fields}
    line = _Line(fields, elsewhere or {}, given if typed is None else typed, {**aliases, **(renamed or {})})
    paragraphs, basic = [" ".join(part.split()) for part in (flags.__doc__ or "").split("\n\n")], frozenset[str]()
    matter = matter or basic_of(flags)
    if matter and {"-h", "--help"} & set(given):
        basic = frozenset(matter)
        paragraphs.append(f"These are the flags that matter; --help-all shows all {len(fields)}.")
    # What tyro draws its boxes in: with a few columns it never ends, and millions fill the memory.
    width = min(max(_WIDTHS[0], shutil.get_terminal_size().columns), _WIDTHS[1])
    if width in _WIDTHS:
        os.environ["COLUMNS"] = str(width)
    # tyro would join lines that begin with a letter.
    description = "\n".join(
        textwrap.fill(text, width, initial_indent=" ", subsequent_indent=" ") for text in paragraphs
    )
    words = [_translated(word, aliases) for word in given]
    line.check(words)
    try:
        with warnings.catch_warnings():
            # About a default that is invalid for its flag: it is refused here, unless the flag replaces it.
            warnings.filterwarnings("ignore", message="The field .* is annotated", module="tyro")
            found, unknown = tyro.cli(
                flags,
                args=words,
                prog=program,
                description=description,
                default=tyro.MISSING_NONPROP if default is None else default,
                return_unknown_args=True,
                registry=_rules(basic, elsewhere or {}),
            )
    except _Refused as error:
        raise UsageError(line.as_typed(str(error))) from error
    if unknown:
        raise UsageError(_STRAY.format(repr(unknown[0]), _of(unknown[0], fields)))
    return found


def trainer() -> str:
    """Returns the command that started this training process, for the first line of help."""
    return "train.py" if Path(sys.argv[0]).name == "train.py" else "partial-fc train"


def told_as_usage(read: Callable[..., _Result]) -> Callable[..., _Result]:
    """Makes a function that parses a command line raise UsageError in place of ValueError."""

    @functools.wraps(read)
    def reading(*args: Any, **kwargs: Any) -> _Result:
        try:
            return read(*args, **kwargs)
        except ValueError as error:
            raise UsageError(str(error)) from error

    return reading


def near(name: str, names: Collection[str]) -> str:
    """Returns "; did you mean NAME?" for an unknown name; "" if none of `names` is similar."""
    by_lower = {candidate.lower(): candidate for candidate in names}
    begun = [candidate for candidate in by_lower if candidate.startswith(name.lower()) and len(name) > 2]
    found = difflib.get_close_matches(name.lower(), by_lower, 1) or begun
    return f"; did you mean {by_lower[found[0]]}?" if found else ""


def _of(word: str, fields: Collection[str]) -> str:
    """Returns the question whether a file, or data, that follows no flag is for one of these; "" if it is neither."""
    is_file = not word.endswith(".rec") and (os.path.isfile(word) or os.path.isfile(f"{word}.py"))
    name = "config" if is_file else "rec" if os.path.exists(word) else ""
    return f"; did you mean {flag(name)} {word}?" if name in fields else ""


def _translated(word: str, aliases: Mapping[str, str]) -> str:
    """Replaces an alias by our name, and --help-all by --help."""
    name, equals, value = word.partition("=")
    theirs = name.replace("-", "_").removeprefix("__")
    if theirs in aliases:
        return f"{flag(aliases[theirs])}{equals}{value}"
    return "--help" if theirs == "help_all" else word


_STRAY = "{} belongs to no flag; every value follows its --flag{}"


class _Refused(Exception):
    """What a value, or a group of flags, is refused for. No ValueError: tyro would print that, and exit."""


class _Missing(NamedTuple):
    """The default of a required flag."""

    flag: str
    what: str


class _Line:
    """The words of one command line; finds unknown flags."""

    def __init__(
        self, fields: Mapping[str, Any], elsewhere: Mapping[str, str], typed: Sequence[str], renamed: Mapping[str, str]
    ) -> None:
        self.elsewhere, self.fields = elsewhere, fields
        self.has_positionals = any(
            tyro.conf.Positional in getattr(kind, "__metadata__", ()) for kind in fields.values()
        )
        self.field_of = {other: field for field in fields.items() for other in _spellings(field)}
        self.names = [known.lstrip("-") for known in (*self.field_of, *map(flag, renamed))]
        self.typed: dict[str, str] = {}  # a flag as messages have it -> as it stands on the command line
        ours = {flag(theirs): flag(field) for theirs, field in renamed.items()}
        for word in (word.partition("=")[0] for word in typed if word.startswith("-")):
            name = word.replace("_", "-")
            if field := self.field_of.get(ours.get(name, name)):
                self.typed[flag(field[0])] = word

    def as_typed(self, message: str) -> str:
        """Returns the message with the flags as the user spelt them."""
        return re.sub(r"(?<![\w-])--[a-z][a-z0-9_-]*", lambda match: self.typed.get(match[0], match[0]), message)

    def check(self, words: Sequence[str]) -> None:
        """Raises UsageError for an unknown flag, one without its value, and a word that belongs to none: before tyro,
        which would refuse first what is missing without that word."""
        may_stray = self.has_positionals or {"-h", "--help"} & set(words)
        left = 0  # values that may follow; -1: any
        for word, following in zip(words, [*words[1:], "--"], strict=False):
            name, equals, _ = word.partition("=")
            if not re.match(r"--?[a-zA-Z]", name) or re.match(r"-(inf|nan)$", name):
                if left == 0 and not may_stray:
                    raise UsageError(_STRAY.format(repr(word), _of(word, self.fields)))
                left -= left > 0
                continue
            if re.match(r"-h$|--help$|--tyro-", name):
                continue
            field = self.field_of.get(name.replace("_", "-"))
            if field is None:
                raise UsageError(self._unknown(name))
            count = _Values.of(field[1]).number
            if equals and not count:
                raise UsageError(f"{name} takes no value; its other side is {flag(f'no_{field[0]}')}")
            if count == 1 and not equals and re.match(r"--?[a-zA-Z]|--$", following):
                raise UsageError(self.as_typed(f"{flag(field[0])} needs a value"))
            left = 0 if equals else count

    def _unknown(self, word: str) -> str:
        name = word.lstrip("-").replace("_", "-")
        if name in self.elsewhere:
            return f"{word} is no flag here: {self.elsewhere[name]}"
        begun = [known for known in self.names if known.startswith(f"{name}-") or known.endswith(f"-{name}")]
        alias = flag(_ALIASES.get(name.replace("-", "_"), "")).lstrip("-")
        begun = [alias] if alias in self.names else begun
        question = f"; did you mean {min(begun, key=len)}?" if begun else near(name, self.names)
        question = question.replace("-", "_") if "_" in word else question
        return f"{word} is no flag here{question.replace('did you mean ', 'did you mean --')} (--help-all lists them)"


class _Values(NamedTuple):
    """The values after a flag. kind: the type of each. choices: the allowed ones by name, if limited. number: how many;
    0: none, -1: any number, in a tuple. words: what may stand for a value of another kind, such as none."""

    kind: Any
    choices: dict[str, Any]
    number: int
    words: dict[str, Any]

    @classmethod
    def of(cls, kind: Any) -> "_Values":
        bare = _bare(kind)
        parts = get_args(bare) if get_origin(bare) in (Union, types.UnionType) else (bare,)
        words: dict[str, Any] = {"none": None, "None": None} if type(None) in parts else {}
        one, *literals = (part for part in parts if part is not type(None))
        words |= {word: word for literal in literals for word in get_args(literal)}
        count = int(bare is not bool)
        if get_origin(one) is tuple:
            count = -1 if Ellipsis in get_args(one) else len(get_args(one))
            one = get_args(one)[0]
        choices = get_args(one) if get_origin(one) is Literal else (True, False) if one is bool else ()
        return cls(one, {str(choice): choice for choice in choices}, count, words)

    def spec(self, name: str, elsewhere: Mapping[str, str]) -> PrimitiveConstructorSpec[Any]:
        """Returns the rules by which tyro reads and shows them."""
        one = "{" + ",".join(self.choices) + "}" if self.choices else _KINDS[self.kind][0]
        one = "|".join([one, *(word for word, value in self.words.items() if value is not None)])
        return PrimitiveConstructorSpec(
            nargs=1 if self.number == 1 else "*",
            metavar=f"{one} ..." if self.number < 0 else " ".join([one] * self.number),
            instance_from_str=functools.partial(self.read, name, elsewhere),
            is_instance=lambda value: True,
            str_from_instance=lambda value: list(map(str, value)) if isinstance(value, tuple) else [str(value)],
        )

    def read(self, name: str, elsewhere: Mapping[str, str], words: list[str]) -> Any:
        """Returns the value. Raises _Refused."""
        if len(words) == 1 and words[0] in self.words:
            return self.words[words[0]]
        wrong = [word for word in words if word not in self.choices]
        if self.choices and wrong:
            hint = elsewhere.get(f"{name} {wrong[0].lower()}")
            hint = f"; {hint}" if hint else near(wrong[0], self.choices)
            raise _Refused(f"{flag(name)} is {wrong[0]}; expected one of {', '.join(self.choices)}{hint}")
        try:
            values = [self.choices[word] if self.choices else self.kind(word) for word in words]
        except ValueError:
            values = []
        if len(values) != len(words) or self.number not in (-1, len(words)):
            times = {-1: " or more", 1: ""}.get(self.number, f" {self.number} times")
            other = "".join(f" or {word}" for word, value in self.words.items() if value is not None)
            raise _Refused(f"{flag(name)} is {' '.join(words)}; expected {_KINDS[self.kind][1]}{times}{other}")
        return values[0] if self.number == 1 else tuple(values)


def _rules(basic: Collection[str], elsewhere: Mapping[str, str]) -> ConstructorRegistry:
    """Returns the rules by which tyro reads and shows fields. basic: show only these fields, in short."""
    registry = ConstructorRegistry()

    @registry.struct_rule
    def rule(info: StructTypeInfo) -> StructConstructorSpec | None:
        if _BY_TYRO in info.markers or not dataclasses.is_dataclass(info.type):
            return None
        spec = ConstructorRegistry.get_struct_spec(dataclasses.replace(info, markers=(*info.markers, _BY_TYRO)))
        assert isinstance(spec, StructConstructorSpec)
        fields = [field if dataclasses.is_dataclass(_bare(field.type)) else shown(field) for field in spec.fields]

        def instantiate(**values: Any) -> Any:
            return _instantiated(spec.instantiate, values)

        instantiate.__doc__ = info.type.__doc__  # the heading of a group
        return StructConstructorSpec(instantiate, tuple(fields))

    def shown(field: Any) -> Any:
        kind, default, metadata = field.type, field.default, getattr(field.type, "__metadata__", ())
        whole = " ".join(((field.helptext() if callable(field.helptext) else field.helptext) or "").split())
        values = _Values.of(kind)
        if values.number:
            hint: Any = lambda label: f"(default: {'none' if label in ('', 'None') else label})"  # noqa: E731
            if default in (tyro.MISSING, tyro.MISSING_NONPROP):
                own = next((extra.metavar for extra in metadata if getattr(extra, "metavar", None)), field.name.upper())
                name = own if tyro.conf.Positional in metadata else flag(field.name)
                what = _sentences(whole, 0).partition(": ")[0].rstrip(".")
                default, hint = _Missing(name, what), "(required)"
            hint = "(default: none)" if default == () else hint
            spec = [] if tyro.conf.UseAppendAction in metadata else [values.spec(field.name, elsewhere)]
            kind = Annotated[kind, *spec, tyro.conf.arg(help_behavior_hint=hint)]
        if basic and field.name not in basic:
            kind = Annotated[kind, tyro.conf.Suppress]
        helptext = (_sentences(whole, _LONGEST_HELP) if basic else whole) or None
        return dataclasses.replace(field, type=kind, default=default, helptext=helptext)

    return registry


def _instantiated(make: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Returns the dataclass. Raises _Refused."""
    if missing := [value for value in values.values() if isinstance(value, _Missing)]:
        are = "is" if len(missing) == 1 else "are"
        raise _Refused(f"{', '.join(each.flag for each in missing)} {are} missing: {missing[0].what}")
    try:
        made = make(**values)
        if not hasattr(made, "__post_init__"):
            check_numbers(made)
    except ValueError as error:
        raise _Refused(str(error)) from error
    return made


def _sentences(text: str, longest: int) -> str:
    """Returns the first sentences of a text, of at most `longest` characters, but at least one."""
    ends = [match.start() for match in re.finditer(r"(?<=[.;]) (?=[A-Z0-9a-z-])", text)] + [len(text)]
    text = text[: max([ends[0], *(end for end in ends if end <= longest)])]
    return f"{text[:-1]}." if text[-1:] == ";" else text


def _bare(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _fields(flags: Any) -> Iterator[tuple[str, Any]]:
    """Yields (name, type) of each flag, those of groups included."""
    for name, kind in get_type_hints(flags, include_extras=True).items():
        if dataclasses.is_dataclass(_bare(kind)):
            yield from _fields(_bare(kind))
        else:
            yield name, kind


def _spellings(field: tuple[str, Any]) -> Iterator[str]:
    """Yields the spellings of a flag: its name, --no-NAME of a switch, and its other names."""
    name, kind = field
    if tyro.conf.Positional in getattr(kind, "__metadata__", ()):
        return
    yield flag(name)
    if _bare(kind) is bool:
        yield flag(f"no_{name}")
    for extra in getattr(kind, "__metadata__", ()):
        yield from getattr(extra, "aliases", None) or ()
        if getattr(extra, "name", None):
            yield flag(extra.name)

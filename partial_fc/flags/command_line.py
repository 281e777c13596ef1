"""A command line -> the dataclass whose fields are its flags: help, and what is wrong with it in our own words.

tyro reads it. What is added: `--help` shows the flags that matter and `--help-all` all of them, and an error is one
line that names the flag as it was typed, and the nearest one where there is none.
"""

import dataclasses
import difflib
import functools
import re
import shutil
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from tyro import _errors as refusals  # experimental there: setup.cfg names the one version that has been tried
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

from partial_fc.errors import UsageError
from partial_fc.flags.numbers import check_numbers, flag

_T = TypeVar("_T")
_Result = TypeVar("_Result")
_LONGEST_HELP = 150  # characters, of two lines beside or below a flag
_KINDS = {"INT": "a whole number", "FLOAT": "a number", "PATH": "a path", "STR": "a word"}
_KINDS["{True,False}"] = "True or False"
# Of other programs, and exactly the same: theirs -> ours.
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
    """Raises UsageError for what cannot be. Ends the process, with status 0, where help is asked for.

    program: how the user started it. default: other values than the fields' own, whose values alone need make no sense.
    matter: the fields that --help shows; none: all. elsewhere: flags of other programs, and values as "flag value" ->
    what they are here. typed: the user's own words, where `given` is a translation of them, and renamed: theirs ->
    ours.
    """
    arguments = ["--help" if word in ("--help-all", "--help_all") else word for word in given]
    fields = dict(_fields(flags))
    aliases = {theirs: ours for theirs, ours in _ALIASES.items() if ours in fields and theirs not in fields}
    if typed is not None:  # where a translation has counted with the flags already, they would come too late
        aliases = {}
    arguments = _in_our_words(arguments, fields, aliases)
    paragraphs = [" ".join((flags.__doc__ or "").split())]
    shown: Collection[str] = ()
    if matter and {"-h", "--help"} & set(given):
        shown = matter
        paragraphs.append(f"These are the flags that matter; --help-all shows all {len(fields)}.")
    width = max(40, shutil.get_terminal_size().columns)  # what tyro draws its boxes in
    # tyro would join lines that begin with a letter.
    lines = [textwrap.fill(text, width, initial_indent=" ", subsequent_indent=" ") for text in paragraphs]
    description = "\n".join(lines)
    reader = _Reader(flags, elsewhere or {}, given if typed is None else typed, {**aliases, **(renamed or {})})
    with refusals.on_parse_error(reader.refuse), warnings.catch_warnings():
        # Of a configuration's value that is no choice: refused below, unless a flag replaces it.
        warnings.filterwarnings("ignore", message="The field .* is annotated", module="tyro")
        more: dict[str, Any] = {} if default is None else {"default": default}
        try:
            found = tyro.cli(
                flags, args=arguments, prog=program, description=description, registry=_words(shown), **more
            )
            if not hasattr(flags, "__post_init__"):
                check_numbers(found)
        except ValueError as error:  # of tyro's caller above, or of the dataclass: what does not go together
            raise UsageError(reader.as_typed(str(error))) from error
    return found


def _in_our_words(arguments: list[str], fields: Mapping[str, Any], aliases: Mapping[str, str]) -> list[str]:
    """The arguments with our names for aliases, and Python's None for the `none` of a flag that has it."""
    may_be_none = {flag(name) for name, kind in fields.items() if type(None) in get_args(_bare(kind))}
    found: list[str] = []
    for word in arguments:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if name in map(flag, aliases):
            word = f"{flag(aliases[name[2:].replace('-', '_')])}{equals}{value}"
        elif word == "none" and found and found[-1].replace("_", "-") in may_be_none:
            word = "None"
        found.append(word)
    return found


def trainer() -> str:
    """How the user started this process to train, for the first line of help: from a checkout, or as installed."""
    return "train.py" if Path(sys.argv[0]).name == "train.py" else "partial-fc train"


def told_as_usage(read: Callable[..., _Result]) -> Callable[..., _Result]:
    """A function that reads a command line, all of whose ValueErrors are mistakes in it."""

    @functools.wraps(read)
    def reading(*args: Any, **kwargs: Any) -> _Result:
        try:
            return read(*args, **kwargs)
        except ValueError as error:
            raise UsageError(str(error)) from error

    return reading


def near(name: str, names: Collection[str]) -> str:
    """What to ask after a name that is none of `names`; nothing where none is like it."""
    by_lower = {candidate.lower(): candidate for candidate in names}
    begun = [candidate for candidate in by_lower if candidate.startswith(name.lower()) and len(name) > 2]
    found = difflib.get_close_matches(name.lower(), by_lower, 1) or begun
    return f"; did you mean {by_lower[found[0]]}?" if found else ""


class _Reader:
    """What is wrong with one command line, told."""

    def __init__(self, flags: type, elsewhere: Mapping[str, str], typed: Sequence[str], renamed: Mapping[str, str]):
        self.elsewhere, self.typed_words = elsewhere, typed
        self.names = [known for field in _fields(flags) for known in _spellings(field)] + list(map(flag, renamed))
        # A flag as messages have it -> as it stands on the command line.
        self.typed: dict[str, str] = {}
        of_ours = {other: flag(field[0]) for field in _fields(flags) for other in _spellings(field)}
        for word in (word.partition("=")[0] for word in typed if word.startswith("-")):
            name = word.lstrip("-")
            spellings = (name, name.replace("-", "_"), name.replace("_", "-"))
            ours = flag(next((renamed[theirs] for theirs in spellings if theirs in renamed), name))
            ours = ours if word.startswith("--") else word
            if ours in of_ours:
                self.typed[of_ours[ours]] = word

    def as_typed(self, message: str) -> str:
        """A message in which the flags are spelt as the user spelt them."""
        return re.sub(r"(?<![\w-])--[a-z][a-z0-9_-]*", lambda found: self.typed.get(found[0], found[0]), message)

    def refuse(self, event: refusals.ParseErrorEvent) -> None:
        """Raises UsageError, or returns where tyro's own words have to do."""
        match event:
            case refusals.UnrecognizedArgs(tokens=tokens):
                self._unknown(tokens)
            case refusals.MissingArgs(unrecognized_tokens=[*tokens]) if tokens:
                self._unknown(tokens)
            case refusals.MissingArgs(missing_arguments=missing):
                names = [_name(argument.arg) for argument in missing]
                what = re.split(r"(?<=[.;:]) ", _help(missing[0].arg.field.helptext))[0].rstrip(".;:")
                raise UsageError(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} missing: {what}")
            case refusals.InvalidChoice(argument=argument, value=value, choices=choices):
                known = ", ".join(choices)
                hint = self.elsewhere.get(f"{argument.field.intern_name} {value.lower()}")
                hint = f"; {hint}" if hint else near(value, choices)
                raise UsageError(f"{self._typed(argument)} is {value}; expected one of {known}{hint}")
            case refusals.BadValue(argument=argument, reason="too_few_values"):
                many = argument.lowered.nargs
                raise UsageError(f"{self._typed(argument)} needs {'a value' if many == 1 else f'{many} values'}")
            case refusals.InstantiationFailure(argument=None, message=message):
                raise UsageError(self.as_typed(message))
            case refusals.InstantiationFailure(argument=argument) if argument is not None:
                name = self._typed(argument)
                kinds = str(argument.lowered.metavar).split()
                expected = _KINDS.get(kinds[0], kinds[0])
                if len(kinds) > 1:
                    expected += f" {'or more' if kinds[1] == '...' else f'{len(kinds)} times'}"
                raise UsageError(f"{name} is {self._value(name)}; expected {expected}")

    def _unknown(self, tokens: list[str]) -> NoReturn:
        wrong = next((token for token in tokens if token.startswith("-")), None)
        if wrong is None:
            raise UsageError(f"{tokens[0]!r} belongs to no flag; every value follows its --flag")
        wrong = wrong.partition("=")[0]
        name = wrong.lstrip("-").replace("_", "-")
        if name in self.elsewhere:
            raise UsageError(f"{wrong} is no flag here: {self.elsewhere[name]}")
        names = [known.lstrip("-") for known in self.names]
        if name in names:
            raise UsageError(f"{wrong} takes another number of values (--help-all shows them)")
        alias = flag(_ALIASES.get(name.replace("-", "_"), "")).lstrip("-")
        begun = (
            [alias]
            if alias in names
            else [known for known in names if known.startswith(f"{name}-") or known.endswith(f"-{name}")]
        )
        question = f"; did you mean {begun[0]}?" if begun else near(name, names)
        question = question.replace("-", "_") if "_" in wrong else question
        question = question.replace("did you mean ", "did you mean --")
        raise UsageError(f"{wrong} is no flag here{question} (--help-all lists them)")

    def _typed(self, argument: Any) -> str:
        """The flag as it stands on the command line."""
        return self.as_typed(_name(argument))

    def _value(self, name: str) -> str:
        for number, word in enumerate(self.typed_words):
            if word.partition("=")[0] == name and "=" in word:
                return word.partition("=")[2]
            if word == name:
                following = self.typed_words[number + 1 :]
                end = next((n for n, other in enumerate(following) if other.startswith("--")), len(following))
                return " ".join(following[:end])
        return "what it is"


def _name(argument: Any) -> str:
    """A flag by its field's name, or the metavariable of an argument without one."""
    if argument.is_positional():
        return str(argument.lowered.metavar)
    return flag(argument.field.intern_name)


def _help(text: str | Callable[[], str | None] | None) -> str:
    """One paragraph: where a docstring's lines end is not where the screen's do."""
    return " ".join(((text() if callable(text) else text) or "").split())


def _first_sentences(text: str) -> str:
    """As much of a help text as two lines hold, and at least its first sentence."""
    found = ""
    for sentence in re.split(r"(?<=[.;]) (?=[A-Z0-9a-z-])", text):
        if found and len(found) + len(sentence) > _LONGEST_HELP:
            return f"{found.rstrip(';')}." if found[-1] == ";" else found
        found = f"{found} {sentence}" if found else sentence
    return found


def _words(matter: Collection[str]) -> ConstructorRegistry:
    """How fields are shown: paragraphs, `none` for None, and with `matter` only those fields, in short."""
    registry, busy = ConstructorRegistry(), set[int]()

    @registry.struct_rule
    def rule(info: StructTypeInfo) -> StructConstructorSpec | None:
        if not dataclasses.is_dataclass(info.type) or id(info) in busy:
            return None
        busy.add(id(info))
        try:
            spec = ConstructorRegistry.get_struct_spec(info)
        finally:
            busy.discard(id(info))
        assert isinstance(spec, StructConstructorSpec)
        fields = []
        for field in spec.fields:
            kind: Any = field.type
            if not dataclasses.is_dataclass(_bare(kind)):
                if matter and field.name not in matter:
                    kind = tyro.conf.Suppress[kind]  # type: ignore[misc]
                kind = _tuple(kind, field.default) if get_origin(_bare(kind)) is tuple else _optional(kind)
            text = functools.partial(_shown_help, field.helptext, bool(matter))
            fields.append(dataclasses.replace(field, type=kind, helptext=text))
        return dataclasses.replace(spec, fields=tuple(fields))

    return registry


def _shown_help(text: str | Callable[[], str | None] | None, short: bool) -> str | None:
    whole = _help(text)
    return (_first_sentences(whole) if short else whole) or None


def _optional(kind: Any) -> Any:
    """`X | None` shown as an X that is none, rather than as Python has it."""
    union = _bare(kind)
    inner = [part for part in get_args(union) if part is not type(None)]
    if get_origin(union) not in (Union, types.UnionType) or len(inner) != 1 or len(get_args(union)) != 2:
        return kind
    if any(getattr(extra, "metavar", None) for extra in getattr(kind, "__metadata__", ())):
        return kind
    part, more = inner[0], ""
    if get_origin(part) is tuple:
        parts = get_args(part)
        part, more = parts[0], " ..." if parts[-1] is Ellipsis else "*"
    names = {int: "INT", float: "FLOAT", str: "STR", bool: "{True,False}"}
    metavar = names.get(part, "PATH" if isinstance(part, type) else "")
    if get_origin(part) is not None:
        metavar = "{" + ",".join(map(str, get_args(part))) + "}"
    if more == "*":
        metavar, more = " ".join([metavar] * len(get_args(inner[0]))), ""
    hint = lambda label: f"(default: {'none' if label == 'None' else label})"  # noqa: E731
    return Annotated[kind, tyro.conf.arg(metavar=f"{metavar}{more}", help_behavior_hint=hint)]


def _tuple(kind: Any, default: Any) -> Any:
    """Any number of values; tyro shows no default as an empty one."""
    missing = default in (tyro.MISSING, tyro.MISSING_NONPROP)
    if default == () or (missing and get_args(_bare(kind))[-1] is Ellipsis):
        hint = "(default: none)" if default == () else "(required)"
        return Annotated[kind, tyro.conf.arg(help_behavior_hint=hint)]
    return kind


def _bare(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _fields(flags: Any) -> Iterator[tuple[str, Any]]:
    """(name, type) of each flag, those of groups included."""
    for name, kind in get_type_hints(flags, include_extras=True).items():
        if dataclasses.is_dataclass(_bare(kind)):
            yield from _fields(_bare(kind))
        else:
            yield name, kind


def _spellings(field: tuple[str, Any]) -> Iterator[str]:
    """Of one flag: its name, its other names, and without what it turns off."""
    name, kind = field
    yield flag(name)
    if _bare(kind) is bool:
        yield flag(f"no_{name}")
    for extra in getattr(kind, "__metadata__", ()):
        yield from getattr(extra, "aliases", None) or ()
        if getattr(extra, "name", None):
            yield flag(extra.name)

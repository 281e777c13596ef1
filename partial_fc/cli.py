"""The command `partial-fc`: finds the verb, parses its flags, calls its function."""

import contextlib
import dataclasses
import difflib
import importlib
import io
import signal
import sys
from collections.abc import Callable
from typing import Any, TextIO, cast, get_type_hints

from partial_fc import __version__, errors, interrupts, output, recipe_table
from partial_fc.files import make_private
from partial_fc.printable import Lines, clean_stderr

# Section of the help -> (its purpose, an example, verb -> (function, a line of help)). The function is "module:name" in
# verbs/, imported when it is called; the type of its parameter `options` has the flags. These modules import
# torch within functions, so that help and usage errors take no seconds. Verbs of _OWN_READERS parse their arguments
# themselves.
_CLASSES = "checkpoint.classes"
_OWN_READERS = ("train", "launch")
# Verbs that talk to other processes ignore SIGPIPE: a broken connection is an error to report, and they continue if
# nobody reads their output.
_CONNECTED = ("launch", "doctor env", "embed", "evaluate", "search", "data clean")
SECTIONS: dict[str, tuple[str, str, dict[str, tuple[str, str]]]] = {
    "Train": (
        "a backbone and its last layer, on one GPU or many hosts",
        "partial-fc train face --rec faces --network r50 --gpus 2",
        {
            "train": ("train:run_and_exit", "train a recipe: face, imagenet, kinetics, mnist"),
            "report": ("report.page:report", "make one HTML page of a run: curves, tests, speed"),
        },
    ),
    "Use a model": (
        "that a run or another program has written",
        "partial-fc evaluate runs/face-faces-r50 pairs.bin",
        {
            "embed": ("model.embed:embed", "write the embeddings of images"),
            "evaluate": ("model.evaluate:evaluate", "test on pairs: accuracy, TAR at FAR, threshold"),
            "search": ("model.search:search_faces", "find each image among those of a gallery"),
            "classify": ("model.classify:classify", "name the classes nearest to an image"),
            "export": ("model.export:export", "write ONNX, or arcface_torch's model.pt"),
        },
    ),
    "Data": (
        "look at it, check it, bring it into a form that is fast to read",
        "partial-fc data pack photos faces",
        {
            "doctor data": ("doctor.data:doctor_data", "check a training set before training"),
            "data pack": ("data.pack:pack_images", "pack a folder or list of images into train.rec"),
            "data clean": ("data.clean:clean", "find wrong labels, and classes that are one or two"),
            "data pairs": ("data.draw_pairs:make_pairs", "draw pairs of images for tests, as a .bin"),
            "data show": ("data.show:show", "draw a picture of a set, one row for each class"),
            "data index": ("data.pack:make_index", "index tar shards, or a .rec without .idx"),
        },
    ),
    "Checkpoints": (
        "inspect, check and change what a training has saved",
        "partial-fc checkpoint inspect runs/face-faces-r50",
        {
            "checkpoint inspect": ("checkpoint.inspect:inspect", "say what is in one, or list those of a run"),
            "checkpoint verify": ("checkpoint.verify:verify", "check that no file is missing or damaged"),
            "checkpoint reshard": ("checkpoint.reshard:reshard", "write one for another number of ranks"),
            "checkpoint import": ("checkpoint.import_centres:import_centres", "read InsightFace's class centres"),
            "checkpoint classes list": (f"{_CLASSES}:list_classes", "list the classes: number, name, last step"),
            "checkpoint classes add": (f"{_CLASSES}:add", "add classes, placed by their images"),
            "checkpoint classes remove": (f"{_CLASSES}:remove", "remove classes by name"),
            "checkpoint classes merge": (f"{_CLASSES}:merge_classes", "make one class of several"),
            "checkpoint classes rename": (f"{_CLASSES}:rename", "rename classes"),
            "checkpoint classes match": (f"{_CLASSES}:match", "make the classes those of a data set"),
        },
    ),
    "Machines": (
        "check them, measure them, plan for them",
        "partial-fc plan --classes 10000000 --gpus 8",
        {
            "doctor env": ("doctor.env:doctor_env", "check this machine, or all hosts of a run"),
            "plan": ("plan.report:report", "estimate memory, traffic and time of a last layer"),
        },
    ),
}
for _section, _verbs in recipe_table.VERBS.items():
    SECTIONS[_section][2].update({name: (f"recipes:{where}", said) for name, (where, said) in _verbs.items()})
VERBS = {name: verb for _, _, verbs in SECTIONS.values() for name, verb in verbs.items()}
# Other programs' names of a verb -> ours.
_OTHER_NAMES = {
    **dict.fromkeys(("predict", "infer", "inference"), ("embed", "classify")),
    **dict.fromkeys(("test", "val", "eval", "validate"), ("evaluate",)),
    **dict.fromkeys(("fit", "finetune", "face"), ("train face",)),
    **dict.fromkeys(("identify", "retrieve"), ("search",)),
    **dict.fromkeys(("check",), ("doctor data", "doctor env")),
}
# "checkpoint classes" is one, too.
GROUPS = {" ".join(name.split()[:n]) for name in VERBS for n in range(1, len(name.split()))}


def find(words: list[str]) -> tuple[str, list[str]]:
    """Returns (the verb or group that the words begin with, or "", and the remaining words)."""
    for num in range(len(words), 0, -1):
        name = " ".join(words[:num])
        if name in VERBS or name in GROUPS:
            return name, words[num:]
    return "", words


def usage(group: str = "") -> str:
    """Returns the help of a group; by default of all verbs, by section."""
    if group:
        of_group = {name: summary for name, (_, summary) in VERBS.items() if name.startswith(f"{group} ")}
        return f"usage: partial-fc {group} COMMAND [--help]\n\n{_listed(of_group)}"
    parts = [
        "partial-fc trains models whose last layer has millions of classes, such as face\n"
        "recognition, and makes use of them.\n\n"
        "usage: partial-fc COMMAND [--help]"
    ]
    for title, (purpose, example, verbs) in SECTIONS.items():
        shown = {name: summary for name, (_, summary) in verbs.items() if not name.startswith("checkpoint classes ")}
        if len(shown) < len(verbs):
            shown["checkpoint classes"] = "add, remove, rename, merge, match or list classes"
        parts.append(f"{title}: {purpose}\n{_listed(shown)}\n  $ {example}")
    return "\n\n".join(parts)


def _listed(verbs: dict[str, str]) -> str:
    width = max(20, *map(len, verbs))
    return "\n".join(f"  {name:{width}}  {summary}" for name, summary in verbs.items())


def nearest(words: list[str]) -> tuple[str, ...]:
    """Returns verbs or a group with a similar name; () if there is none."""
    if words[0] in _OTHER_NAMES:
        return _OTHER_NAMES[words[0]]
    by_spelling = {name.rpartition(" ")[2]: name for name in reversed(VERBS)} | {
        name: name for name in (*VERBS, *GROUPS)
    }
    for num in range(min(3, len(words)), 0, -1):
        for spelling in difflib.get_close_matches(" ".join(words[:num]), by_spelling, 1):
            return (by_spelling[spelling],)
    return ()


def load(name: str) -> Callable[..., Any]:
    """Imports the function of a verb."""
    where = VERBS[name][0]
    if where.startswith("recipes:"):
        return recipe_table.load(where.removeprefix("recipes:"))
    module, _, function = where.partition(":")
    return getattr(importlib.import_module(f"partial_fc.verbs.{module}"), function)


def main() -> None:
    interrupts.listen()
    output.open_closed()
    clean_stderr()
    words = sys.argv[1:]
    if any(word.startswith(("--local-rank", "--local_rank")) for word in words):
        words = importlib.import_module("partial_fc.verbs.train").without_local_rank(words, "partial-fc")
    name, rest = find(words)
    if name in _CONNECTED:
        output.detach()
    elif name != "train":  # which does so itself
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `partial-fc ... | head` ends quietly, as other tools do
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names that are no UTF-8, as stderr has them
    if name in VERBS:
        errors.require_trainer(f"partial-fc {name}")
        with (
            contextlib.redirect_stdout(cast(TextIO, Lines(sys.stdout)))
            if name not in _OWN_READERS
            else contextlib.nullcontext()
        ):
            status = run(name, rest)
        sys.exit(status)
    if rest[:1] == ["--version"]:
        print(f"partial-fc {__version__}")
        return
    if not rest or rest[0] in ("-h", "--help"):
        print(usage(name))
        return
    near = " or ".join(f"`partial-fc {verb}`" for verb in nearest(sys.argv[1:]))
    wrong = " ".join(sys.argv[1 : 2 + len(name.split())])
    print(
        f"partial-fc: there is no command {wrong!r}{f'; did you mean {near}?' if near else ''}\n"
        f"`{' '.join(['partial-fc', *name.split()])} --help` lists the commands",
        file=sys.stderr,
    )
    sys.exit(2)


def run(name: str, arguments: list[str]) -> int | None:
    """Calls a verb with its flags; returns the exit status."""
    if name in _OWN_READERS:
        return load(name)(arguments)
    return call(load(name), arguments, f"partial-fc {name}")


def call(verb: Callable[..., Any], arguments: list[str], program: str) -> int | None:
    """Calls a function whose parameter `options` has the flags; returns the exit status. program: for messages."""
    from safetensors import SafetensorError

    from partial_fc.flags.command_line import parse

    try:
        make_private()
        flags = get_type_hints(verb)["options"]
        names = [field.name for field in dataclasses.fields(flags)]
        # What --help shows; []: the default. Not what starts processes on several hosts.
        matter = [*names, "gpus", "device"] if "launch" in names else []
        options: Any = parse(flags, arguments, program, matter=matter)
        if not hasattr(options, "launch"):
            return verb(options)
        from partial_fc.verbs.on_ranks import on_ranks

        on_ranks(program, options.launch, lambda world, device: verb(options, world, device))
        return None
    except errors.UsageError as error:
        errors.report(program, error)
        return 2
    except (ValueError, OSError, SafetensorError) as error:
        errors.report(program, error)
        return 1


if __name__ == "__main__":
    main()

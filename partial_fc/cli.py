"""`partial-fc`: training, what one does before and after it, and with its data."""

import contextlib
import difflib
import importlib
import io
import signal
import sys
from collections.abc import Callable
from typing import Any, TextIO, cast, get_type_hints

from partial_fc import __version__, errors, output
from partial_fc.files import make_private
from partial_fc.printable import Lines, clean_stderr

# verb -> (its function, one line of help). The function is "module:name" below partial_fc, imported when its flags are
# asked for: the type of its `options` has them. Those of _OWN_READERS read their arguments themselves.
_CLASSES = "checkpoint.tools.classes"
_OWN_READERS = ("train", "launch", "torture")
VERBS: dict[str, tuple[str, str]] = {
    "train": ("train_command:run_and_exit", "a recipe, in as many processes as a launcher starts"),
    "launch": ("launcher.command:launch", "a command on several hosts, with MXNet's servers; its launch.py"),
    "embed": ("embedding.command:embed", "a model and images -> a table of embeddings"),
    "classify": ("embedding.classify:classify", "an image's nearest class centres, by name"),
    "evaluate": ("evaluate.evaluate_command:evaluate", "a model on pairs: accuracy, TAR at FAR, the threshold to use"),
    "search": ("evaluate.search_command:search_faces", "a model on 1:N: each probe among a gallery"),
    "export": ("export.command:export", "a model as ONNX (fp32, fp16, int8) or arcface_torch's model.pt"),
    "data pack": ("data.tools.pack:pack_images", "a folder or list of images -> train.rec"),
    "data lmdb": ("data.tools.image_databases:make_lmdb", "images or a LevelDB -> an LMDB of Caffe's"),
    "data leveldb": ("data.tools.image_databases:make_leveldb", "the same as a LevelDB"),
    "data pairs": ("data.tools.draw_pairs:make_pairs", "a list of pairs, or images to draw them from -> .bin"),
    "data show": ("data.tools.show:show", "a picture of any set, a class a row; also as training sees it"),
    "data index": ("data.tools.pack:make_index", "train.idx is lost: make it anew from train.rec"),
    "data glyphs": ("demo.glyphs:build", "the demo's data: characters across typefaces of Debian"),
    "data digits": ("demo.digits:write_digits", "real handwritten digits as MNIST's files"),
    "data kinetics": ("data.tools.video_lists:make_lists", "lists of a folder of videos, checked"),
    "data make-motion": ("demo.motion:make_motion", "the video demo's data: characters that move"),
    "checkpoint inspect": ("checkpoint.tools.inspect:inspect", "what it holds, or which there are"),
    "checkpoint verify": ("checkpoint.tools.verify:verify", "is all there, and as it was written?"),
    "checkpoint merge": ("checkpoint.tools.reshard:merge", "the files of all ranks, of all hosts -> one's"),
    "checkpoint reshard": ("checkpoint.tools.reshard:reshard", "files of W ranks -> another number"),
    "checkpoint import": ("foreign.import_centres:import_centres", "InsightFace's centre files -> one"),
    "checkpoint export": ("foreign.export_centres:export_centres", "class centres -> InsightFace's files"),
    "checkpoint diff": ("checkpoint.tools.diff:diff", "in what two checkpoints differ"),
    "checkpoint classes list": (f"{_CLASSES}:list_classes", "number, name, last step of each"),
    "checkpoint classes add": (f"{_CLASSES}:add", "new ones, which start where their images lie"),
    "checkpoint classes remove": (f"{_CLASSES}:remove", "classes go, by name"),
    "checkpoint classes merge": (f"{_CLASSES}:merge_classes", "several become one"),
    "checkpoint classes rename": (f"{_CLASSES}:rename", "other names"),
    "checkpoint classes match": (f"{_CLASSES}:match", "those of a data set: some new, some gone"),
    "report": ("report.command:report", "the folder of a run -> one HTML page: curves, evaluations, speed"),
    "convert": ("foreign.convert:convert", "a backbone between MXNet's files, ours and arcface_torch's"),
    "doctor data": ("data.check.command:doctor_data", "what is wrong with a training set, before training does"),
    "doctor env": ("doctor.env:doctor_env", "what is wrong with this machine, or the hosts of a run"),
    "torture": ("torture.command:torture", "a training, again with processes killed: can the losses tell?"),
    "bench data": ("bench.data:bench_data", "how fast a set is read and decoded, beside other loaders"),
    "bench head": ("bench.head:bench_head", "time and memory of the head, alone or beside others"),
    "plan": ("bench.plan_report:report", "memory, traffic, time of a head; whether sampling pays"),
}
# The verbs whose module imports torch, which takes seconds: their flags are classes of the module `options` beside it,
# and it is imported only once the command line is read.
_FLAGS = {
    "embed": "EmbedOptions",
    "classify": "ClassifyOptions",
    "evaluate": "EvaluateOptions",
    "search": "SearchOptions",
    "export": "ExportOptions",
    "checkpoint inspect": "InspectOptions",
    "checkpoint verify": "VerifyOptions",
    "checkpoint merge": "MergeOptions",
    "checkpoint reshard": "ReshardOptions",
    "checkpoint import": "ImportOptions",
    "checkpoint export": "ExportOptions",
    "checkpoint diff": "DiffOptions",
    "checkpoint classes list": "ListOptions",
    "checkpoint classes add": "AddOptions",
    "checkpoint classes remove": "RemoveOptions",
    "checkpoint classes merge": "MergeClassesOptions",
    "checkpoint classes rename": "RenameOptions",
    "checkpoint classes match": "MatchOptions",
    "convert": "ConvertOptions",
    "bench data": "DataOptions",
    "bench head": "HeadOptions",
    "plan": "PlanOptions",
}
# "checkpoint classes" is one, too.
GROUPS = {" ".join(name.split()[:n]) for name in VERBS for n in range(1, len(name.split()))}


def find(words: list[str]) -> tuple[str, list[str]]:
    """(the verb or group, as far as there is one, that the words begin with, the words after it)."""
    for num in range(len(words), 0, -1):
        name = " ".join(words[:num])
        if name in VERBS or name in GROUPS:
            return name, words[num:]
    return "", words


def usage(group: str = "") -> str:
    """The list of all verbs, or of those of a group."""
    verbs = {name: verb for name, verb in VERBS.items() if not group or name.startswith(f"{group} ")}
    width = max(map(len, verbs))
    lines = [f"  partial-fc {name:{width}}  {summary}" for name, (_, summary) in verbs.items()]
    return f"usage: partial-fc {group or '[GROUP]'} COMMAND [--help]\n\n" + "\n".join(lines)


def nearest(words: list[str]) -> str:
    """The verb or group that the words may have meant; nothing where none is like them."""
    by_spelling = {name.rpartition(" ")[2]: name for name in reversed(VERBS)} | {
        name: name for name in (*VERBS, *GROUPS)
    }
    for num in range(min(3, len(words)), 0, -1):
        for spelling in difflib.get_close_matches(" ".join(words[:num]), by_spelling, 1):
            return by_spelling[spelling]
    return ""


def load(name: str) -> Callable[..., Any]:
    """The function of a verb."""
    module, _, function = VERBS[name][0].partition(":")
    return getattr(importlib.import_module(f"partial_fc.{module}"), function)


def flags_of(name: str) -> type:
    """The class whose fields are the flags of a verb."""
    if name not in _FLAGS:
        return get_type_hints(load(name))["options"]
    package, _, _ = VERBS[name][0].rpartition(".")
    return getattr(importlib.import_module(f"partial_fc.{package}.options"), _FLAGS[name])


def main() -> None:
    output.open_closed()
    clean_stderr()
    name, rest = find(sys.argv[1:])
    if name not in (*_OWN_READERS, "doctor env"):  # there a connection that breaks is an error to be told, not the end
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `partial-fc ... | head` ends quietly, as other tools do
    if name in ("launch", "torture"):
        output.detach()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names that are no UTF-8, as stderr has them
    if name in VERBS:
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
    near = nearest(sys.argv[1:])
    question = f"; did you mean `partial-fc {near}`?" if near else ""
    print(f"partial-fc: no command {' '.join(sys.argv[1:3])!r}{question}\n{usage(name)}", file=sys.stderr)
    sys.exit(2)


def run(name: str, arguments: list[str]) -> int | None:
    """Calls a verb with its flags; returns the exit status."""
    if name in _OWN_READERS:
        return load(name)(arguments)
    from safetensors import SafetensorError

    from partial_fc.flags.command_line import parse

    try:
        make_private()
        options: Any = parse(flags_of(name), arguments, f"partial-fc {name}")
        return load(name)(options)
    except errors.UsageError as error:
        errors.report(f"partial-fc {name}", error)
        return 2
    except (ValueError, OSError, SafetensorError) as error:
        errors.report(f"partial-fc {name}", error)
        return 1


if __name__ == "__main__":
    main()

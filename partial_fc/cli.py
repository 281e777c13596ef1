"""`partial-fc`: what one does before and after training, and with its data."""

import io
import signal
import sys
from collections.abc import Callable
from typing import Any

import tyro

from benchmarks.head import HeadOptions, bench_head
from partial_fc.checkpoint.foreign.join import ImportOptions, import_centres
from partial_fc.checkpoint.tools import class_flags, classes
from partial_fc.checkpoint.tools.diff import DiffOptions, diff
from partial_fc.checkpoint.tools.inspect import InspectOptions, inspect
from partial_fc.checkpoint.tools.reshard import MergeOptions, ReshardOptions, merge, reshard
from partial_fc.checkpoint.tools.verify import VerifyOptions, verify
from partial_fc.data.check.command import DataOptions, doctor_data
from partial_fc.data.tools.draw_pairs import PairsOptions, make_pairs
from partial_fc.data.tools.pack import IndexOptions, PackOptions, make_index, pack_images
from partial_fc.demo.digits import DigitsOptions, write_digits
from partial_fc.demo.glyphs import GlyphOptions, build
from partial_fc.demo.glyphs_sheet import SheetOptions, contact_sheet
from partial_fc.doctor.env import EnvOptions, doctor_env
from partial_fc.plan_report import PlanOptions, report

Command = tuple[type, Callable, str]

# group -> command -> (its flags, what it does, one line of help)
COMMANDS: dict[str, dict[str, Command]] = {
    "data": {
        "pack": (PackOptions, pack_images, "a folder or list of images -> train.rec"),
        "pairs": (PairsOptions, make_pairs, "a list of pairs, or images to draw them from -> NAME.bin"),
        "index": (IndexOptions, make_index, "train.idx is lost: make it anew from train.rec"),
        "glyphs": (GlyphOptions, build, "the demo's data: characters across typefaces, from Debian's fonts"),
        "digits": (DigitsOptions, write_digits, "real handwritten digits as MNIST's files, for recipe mnist"),
        "sheet": (SheetOptions, contact_sheet, "a picture of a glyph set: characters, typefaces, pairs"),
    },
    "checkpoint": {
        "inspect": (InspectOptions, inspect, "what a checkpoint holds, or which there are"),
        "verify": (VerifyOptions, verify, "is everything there, and as it was written?"),
        "merge": (MergeOptions, merge, "the files of all ranks, and of all hosts' folders -> one rank's"),
        "reshard": (ReshardOptions, reshard, "the files of W ranks -> those of another number"),
        "import": (ImportOptions, import_centres, "InsightFace's centre files of all ranks -> a checkpoint"),
        "diff": (DiffOptions, diff, "in what two checkpoints differ"),
    },
    "checkpoint classes": {
        "list": (class_flags.ListOptions, classes.list_classes, "number, name and last step of each class"),
        "add": (class_flags.AddOptions, classes.add, "new classes, which start where their images lie"),
        "remove": (class_flags.RemoveOptions, classes.remove, "classes go, by name"),
        "merge": (class_flags.MergeClassesOptions, classes.merge_classes, "several classes become one"),
        "rename": (class_flags.RenameOptions, classes.rename, "other names"),
        "match": (
            class_flags.MatchOptions,
            classes.match,
            "the classes of a data set: new ones added, others gone",
        ),
    },
    "doctor": {
        "data": (DataOptions, doctor_data, "what is wrong with a training set, before training finds out"),
        "env": (EnvOptions, doctor_env, "what is wrong with this machine, or with the hosts of a run"),
    },
    "bench": {
        "head": (HeadOptions, bench_head, "time and memory of the head, alone or against the textbook one"),
    },
    "": {
        "plan": (PlanOptions, report, "memory, traffic and time of a head, and whether sampling pays"),
    },
}


def usage() -> str:
    summaries = {
        f"{group} {name}".strip(): summary
        for group, commands in COMMANDS.items()
        for name, (_, _, summary) in commands.items()
    }
    width = max(map(len, summaries))
    lines = [f"  partial-fc {name:{width}}  {summary}" for name, summary in summaries.items()]
    return "usage: partial-fc [GROUP] COMMAND [--help]\n\n" + "\n".join(lines)


def find(arguments: list[str]) -> tuple[str, Command, list[str]] | None:
    """The command that a command line names: (its name, what it is, its own arguments)."""
    # The longest group that the words begin with; one without a name is always there.
    group = max((g for g in COMMANDS if arguments[: len(g.split())] == g.split()), key=len)
    words = arguments[len(group.split()) :]
    if not words or words[0] not in COMMANDS[group]:
        return None
    return f"{group} {words[0]}".strip(), COMMANDS[group][words[0]], words[1:]


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `partial-fc ... | head` ends quietly, as other tools do
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names that are no UTF-8, as stderr has them
    arguments = sys.argv[1:]
    found = find(arguments)
    if found is None:
        asked_for_help = not arguments or bool({"-h", "--help"} & set(arguments))
        if not asked_for_help:
            print(f"partial-fc: no command {' '.join(arguments[:2])!r}", file=sys.stderr)
        print(usage())
        sys.exit(0 if asked_for_help else 2)
    name, (options_type, command, _), rest = found
    try:
        options: Any = tyro.cli(options_type, args=rest, prog=f"partial-fc {name}")
        sys.exit(command(options))
    except (ValueError, OSError) as error:
        sys.exit(f"partial-fc {name}: {error}")


if __name__ == "__main__":
    main()

"""What sampled negatives cost, and when they pay (docs/fidelity.md).

    python -m benchmarks.fidelity clean-0.1 3     trains one run on one core, and writes its result
    python -m benchmarks.fidelity --missing       lists the registered runs without a result
    python -m benchmarks.fidelity --jobs 2        runs them, two at a time
    python -m benchmarks.fidelity --repeat 3      runs three of the finished ones again, and compares the bits
    python -m benchmarks.fidelity --analyse       recomputes every interval and test from benchmarks/results/fidelity,
                                                  and writes them into docs/fidelity.md

Runs on your own data, `python -m benchmarks.fidelity faces-0.1 0 --rec SET --held-out SET --steps N --flags='...'`, are
rows of their own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from pathlib import Path

import numpy as np

from .study import sets
from .study.cells import Cell, registered, steps
from .study.command import Options, Study
from .study.measure import HeldOut
from .study.run import GLYPHS, ROOT, Data, held_out
from .study.statistics import FEWEST, MAIN, Hypothesis, Results, Values, errors, interval, ratio, verdicts

NAMES = {"clean": "clean", "flipped": "40 % of the labels flipped", "split": "half of the classes twice",
         "small": "clean, 4,000 classes", "large": "clean, 34,694 classes",
         "long": "clean, 4,000 classes, 56 images of each", "sgd": "clean, centres by SGD"}  # fmt: skip
NONE = "--head-catch-up none"  # centres rest while they are not sampled
# Without its rate and decay it gets the backbone's, which suit another optimizer.
ADAGRAD = "--head-optimizer adagrad --head-lr 0.1 --head-weight-decay 0"
ARMS = {
    "1": "--sample-rate 1",
    "0.3": f"--sample-rate 0.3 {NONE}",
    "0.1": f"--sample-rate 0.1 {NONE}",
    "0.03": f"--sample-rate 0.03 {NONE}",
    "rising": f"--sample-rate-schedule '0:0.1 80%:1.0' {NONE}",  # a flag that has left: 1aee0b7c has it
    "filter": "--sample-rate 1 --interclass-filtering-threshold 0.4",
    "hard": f"--sample-rate 0.1 --hard-negatives 5 {NONE}",
    "exact": "--sample-rate 0.1",
    "exact-0.03": "--sample-rate 0.03",
    "corrected": f"--sample-rate 0.1 --sampling-correction {NONE}",  # a flag that has left: 8494176c has it
    "adagrad": f"--sample-rate 0.1 {ADAGRAD}",
    "adagrad-all": f"--sample-rate 1 {ADAGRAD}",
    "adagrad-hard": f"--sample-rate 0.1 --hard-negatives 5 {ADAGRAD}",
    "adagrad-rising": f"--sample-rate-schedule '0:0.1 80%:1.0' {ADAGRAD}",  # so is this one
}
OTHERS = [arm for arm in ARMS if arm != "1"]
BEGIN, END = "<!-- begin: python -m benchmarks.fidelity --analyse -->", "<!-- end -->"
SAME_IMAGES = ("clean", "flipped", "split")  # under other labels; runs of one arm take equally long
SETS = (*SAME_IMAGES, "long")  # of the first table
SHOWN = {  # in it, by arm
    "exact": "0.1 (default; arcface_torch)",
    "exact-0.03": "0.03 (default; arcface_torch)",
    "0.3": "0.3, centres rest",
    "0.1": "0.1, centres rest (MXNet trainer)",
    "0.03": "0.03, centres rest",
    "rising": "0.1, then all, centres rest",
    "hard": "0.1, hard negatives, centres rest",
    "adagrad": "0.1, Adagrad",
    "adagrad-all": "all, Adagrad",
    "adagrad-hard": "0.1, hard negatives, Adagrad",
    "adagrad-rising": "0.1, then all, Adagrad",
    "filter": "all, filter",
}
CONTRASTS = (  # what an arm changes in another
    ("exact", "0.1"),
    ("exact-0.03", "0.03"),
    ("rising", "0.1"),
    ("hard", "0.1"),
    ("adagrad", "0.1"),
    ("adagrad", "adagrad-all"),
    ("adagrad", "exact"),
    ("adagrad-hard", "adagrad"),
    ("adagrad-rising", "adagrad"),
)
DRAWN = {"long": "small", "sgd": "clean"}  # other sets have images of their own
VISITS = {"long": 56}  # how often a run sees a class, on average; 14 in the other sets
FLAGS = {"sgd": "--head-optimizer sgd --head-lr 0.1 --head-weight-decay 0.0005"}
# Hypotheses rest on seven seeds or more: a sign-flip test of six has no p below 1/64, which Holm's correction for six
# hypotheses does not accept.
STAGES = (
    [("clean", ("1", "0.1"), 6)],
    [("split", ("1", "0.1", "filter"), 7), ("split", ("0.3", "0.03"), 6),
     ("flipped", ("1", "0.3", "0.1", "0.03", "filter"), 6)],
    [("clean", ("0.3", "0.03", "rising", "hard", "filter"), FEWEST)],  # the first table's first
    [(name, ("exact",), 6) for name in SAME_IMAGES],
    [(name, ("adagrad", "adagrad-all"), FEWEST) for name in SAME_IMAGES],
    [("sgd", ("1", "0.1", "exact"), FEWEST), ("clean", ("exact-0.03",), FEWEST)],
    [("long", ("1", "0.1", "exact"), FEWEST)],
    [("small", ("1", "0.1", "exact", "adagrad", "adagrad-all"), FEWEST)],
    [("long", ("adagrad", "adagrad-all", "adagrad-hard", "adagrad-rising"), FEWEST)],
    [(name, ("adagrad-hard",), FEWEST) for name in SAME_IMAGES],
    [("large", ("1", "0.1", "exact", "adagrad", "adagrad-hard"), FEWEST)],
    [("clean", ("1", "0.1", "0.3", "0.03", "rising", "hard", "exact"), 8),
     ("clean", ("filter", "exact-0.03", "corrected"), 6), ("sgd", ("1", "0.1", "exact", "corrected"), 6),
     *((name, ("adagrad", "adagrad-all"), 6) for name in SAME_IMAGES)],
    [(name, ("1", "0.1"), 7) for name in ("small", "large")],
    [("long", ("1", "0.1", "exact"), 6)],
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FidelityOptions(Options):
    rec: Path | None = None
    """Training data of your own, for a cell of a new SET."""
    held_out: Path | None = None
    """With --rec: images of classes that are not in it, several of each."""
    steps: int = 0
    """With --rec: steps of a run, a multiple of five."""
    flags: str = ""
    """With --rec: flags of `train.py face` in every arm, after a "=", as --flags='--gpus 8 --backbone r50'."""


def data(cell: Cell, options: FidelityOptions) -> Data:
    if options.rec is not None:
        if options.held_out is None or options.steps < 5 or options.steps % 5:
            raise ValueError("--rec needs --held-out SET and --steps N, a multiple of five")
        facts = sha256(f"{options.rec} {options.held_out} {options.steps} {options.flags}".encode()).hexdigest()
        return Data(str(options.rec), HeldOut.read(options.held_out), options.steps, options.flags, facts)
    if cell.set not in NAMES:
        raise ValueError(
            f"set {cell.set!r}: expected {', '.join(NAMES)}; for data of your own give --rec and --held-out"
        )
    drawn = DRAWN.get(cell.set, cell.set)
    folder, images = sets.folder(options.folder, drawn), drawn if drawn in ("small", "large") else "clean"
    original = folder / "original.npy"
    return Data(
        str(folder),
        held_out(options.folder),
        steps(sets.CLASSES[drawn], VISITS.get(cell.set, 14)),
        f"{GLYPHS} {FLAGS.get(cell.set, '')}",
        " ".join(map(sets.digest, (folder, sets.folder(options.folder, "heldout")))),
        seen=sets.folder(options.folder, f"seen-{images}"),
        original=original if original.exists() else None,
    )


# ---- what was found


def hypotheses(results: Results) -> list[Hypothesis]:
    def cost(name: str, arm: str, measure: str = MAIN, base: str = "1") -> Values:
        return results.difference(Cell(name, arm), Cell(name, base), measure)

    def logs(*cells: Cell) -> list[Values]:
        seeds = results.seeds(*cells)
        return [results.log(cell, seeds) for cell in cells]

    filtered, full, sampled = logs(*(Cell("split", arm) for arm in ("filter", "1", "0.1")))
    by_size = logs(*(Cell(name, arm) for name, arm in product(("small", "clean", "large"), ("1", "0.1"))))
    size = np.log([sets.CLASSES[name] for name in ("small", "clean", "large")])
    size -= size.mean()
    slope = size @ (np.stack(by_size[1::2]) - np.stack(by_size[::2])) / (size @ size)
    clean = cost("clean", "0.1")
    return [
        Hypothesis("H1", "clean: a rate of 0.1 costs between 0 and 8 % of the error", [-clean, clean - np.log(1.08)]),
        Hypothesis("H2", "half of the classes twice: 0.1 has less than 0.8 of the error of all classes",
                   [cost("split", "0.1") - np.log(0.8)]),
        Hypothesis("H3", "half of the classes twice: all classes with the filter get back at least half of H2",
                   [filtered - (full + sampled) / 2, sampled - full]),
        Hypothesis("H4", "clean: 0.1, then 1 in the last fifth, costs less than 5 % at FAR 1e-6",
                   [cost("clean", "rising", "FAR 1e-6") - np.log(1.05)]),
        Hypothesis("H5", "clean: five hard negatives at 0.1 lower the error at FAR 1e-6, and of look-alikes",
                   [cost("clean", "hard", name, "0.1") for name in ("FAR 1e-6", "look-alikes")]),
        Hypothesis("H6", "clean: what 0.1 costs falls with the number of classes", [slope]),
    ]  # fmt: skip


def analyse(folder: Path) -> None:
    """Writes the tables and the picture into the pages, and prints them and the table of all measures."""
    results = Results.read(folder)
    if not results.by_run:
        raise ValueError(f"{folder} has no results; python -m benchmarks.fidelity --jobs 2 makes them")
    of_pages = pages(results)
    for page, tables in of_pages.items():
        path = ROOT / page
        path.write_text(between(path.read_text(), tables))
    draw(results, ROOT / "docs/pictures/fidelity.png")
    print("\n\n".join(f"{page}\n\n{tables}" for page, tables in of_pages.items()))
    print("", *measures(results), sep="\n")


def pages(results: Results) -> dict[str, str]:
    """Returns the tables of each page."""
    return {"docs/fidelity.md": "\n".join((*for_users(results), "", *for_readers(results)))}


def between(page: str, tables: str) -> str:
    """Returns a page with other tables between its marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{tables}\n{END}{rest.split(END, 1)[1]}"


def measures(results: Results) -> Iterator[str]:
    """Yields the table of all measures."""
    cells = product(_sets(results), ARMS)
    yield from errors(results, [(Cell(name, arm), f"{NAMES.get(name, name)}, {arm}") for name, arm in cells])


def _sets(results: Results) -> list[str]:
    there = {cell.set for cell, _ in results.by_run}
    return [name for name in NAMES if name in there] + sorted(there - set(NAMES))


def for_readers(results: Results) -> Iterator[str]:
    """Yields the tables of the ratios, with intervals, and of the hypotheses."""
    yield f"| error at {MAIN}, over that of all classes | |\n| --- | --- |"
    for name, arm in product(_sets(results), OTHERS):
        if found := ratio(results, Cell(name, arm), Cell(name, "1")):
            yield f"| {NAMES.get(name, name)}, {arm} | {found} |"
    if found := ratio(results, Cell("clean", "1"), Cell("split", "1")):
        yield f"| clean, 1, relative to half of the classes twice, 1 | {found} |"
    yield f"\n| error at {MAIN}, of one arm over that of another | |\n| --- | --- |"
    for name, (arm, other) in product(_sets(results), CONTRASTS):
        if len(results.difference(Cell(name, arm), Cell(name, other))) >= FEWEST:
            found = ratio(results, Cell(name, arm), Cell(name, other))
            yield f"| {NAMES.get(name, name)}, {arm} over {other} | {found} |"
    yield ""
    yield from verdicts(hypotheses(results), 0.05)


def for_users(results: Results) -> Iterator[str]:
    """Yields the first table: the error of all classes, and the ratios to it, with intervals over seeds."""
    found = {
        (name, arm): value
        for name, arm in product(SETS, SHOWN)
        if len(value := results.difference(Cell(name, arm), Cell(name, "1"))) >= FEWEST
    }
    sets = [name for name in SETS if any((name, arm) in found for arm in SHOWN)]
    arms = [arm for arm in SHOWN if any((name, arm) in found for name in sets)]
    minutes = {arm: results.minutes(*(Cell(name, arm) for name in SAME_IMAGES)) for arm in ("1", *arms)}
    kinds = sorted({kind for of_arm in minutes.values() for kind in of_arm})

    def row(title: str, cells: Iterable[str], arm: str) -> str:
        taken = (f"{minutes[arm][kind]:.1f}" if kind in minutes[arm] else "" for kind in kinds)
        return f"| {' | '.join((title, *cells, *taken))} |"

    heads = ["classes in a step", *(NAMES[name] for name in sets), *(f"minutes, {kind}" for kind in kinds)]
    yield f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}"
    full = [np.exp(results.log(Cell(name, "1"), results.seeds(Cell(name, "1"))).mean()) for name in sets]
    yield row("all: the error", (f"{error:.3f}" for error in full), "1")
    for arm in arms:
        yield row(SHOWN[arm], (_short(found.get((name, arm))) for name in sets), arm)


def _short(value: Values | None) -> str:
    if value is None:
        return ""
    low, high = np.exp(interval(value))
    return f"{np.exp(value.mean()):.2f} ({low:.2f} to {high:.2f})"


def draw(results: Results, path: Path) -> None:
    """Draws the ratios of the first table, with intervals over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained", dpi=100)
    axes = figure.add_subplot()
    of_set = {name: {arm: results.difference(Cell(name, arm), Cell(name, "1")) for arm in SHOWN} for name in SETS}
    arms = [arm for arm in SHOWN if any(len(found[arm]) >= FEWEST for found in of_set.values())]
    for number, (name, found) in enumerate(of_set.items()):
        places = [i for i, arm in enumerate(arms) if len(found[arm]) >= FEWEST]
        if places:
            at = [i + (number - 1.5) * 0.12 for i in places]
            mean = np.exp([found[arms[i]].mean() for i in places])
            bounds = np.exp([interval(found[arms[i]]) for i in places])
            axes.errorbar(at, mean, np.abs(bounds.T - mean), fmt="o", capsize=3, color=f"C{number}", label=NAMES[name])
    axes.axhline(1, color="grey", linewidth=1)
    axes.set_yscale("log")
    axes.set_xticks(range(len(arms)), [SHOWN[arm].replace(" ", "\n") for arm in arms], fontsize=8)
    axes.set_xlim(-0.5, len(arms) - 0.5)
    axes.set_xlabel("classes in a step")
    axes.set_ylabel(f"error at {MAIN}, over that of all classes")
    ticks = [0.7, 0.8, 0.9, 1, 1.2, 1.5, 2]
    axes.set_yticks(ticks, map(str, ticks))
    axes.minorticks_off()
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    Study("fidelity", ARMS, registered(STAGES), data, analyse).main(FidelityOptions, __doc__)

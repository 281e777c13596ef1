"""`python -m benchmarks.head`: time and memory of the head alone, or beside other implementations.

Each measurement runs in fresh processes. With --versus all sides run in turn, several times, and the medians of the
rounds' ratios are reported, since a machine's speed drifts. Each row states the side's precision, without which a ratio
of times means nothing.
"""

import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any, Literal

import tyro

from partial_fc import terminal
from partial_fc.cli import call
from partial_fc.comm.launch import spawn
from partial_fc.flags.facts import BATCH, CLASSES, THREADS, In

Line = dict[str, Any]
OURS, LABEL_BY_LABEL = "this head", "label-by-label"
LINE, REFUSAL = "line.json", "refusal-{}.txt"  # result files of a run's processes
_RATIOS = {"times_as_fast": "step_s", "memory_ratio": "added_bytes"}
_ROWS_APART = 0.02  # sides are compared only if their rows differ by less


@dataclass(frozen=True)
class HeadOptions:
    """Trains the head on random features and prints a table. The defaults are what suits this machine, without
    emulating a number format: it says what that is, and how recipe face is told to train so."""

    classes: Annotated[int, In(CLASSES)] = 1_000_000
    """Classes over all processes."""
    sample_rate: Annotated[float, In("(0, 1]")] = 1.0
    """Share of the classes that are negatives in a step."""
    batch: Annotated[int, In(BATCH)] = 128
    """Global batch."""
    dim: Annotated[int, In("[1, 65536]")] = 512
    """Width of a feature."""
    labels: Annotated[int, In("[1, 1000]")] = 1
    """Labels of a feature, at random."""
    num_processes: Annotated[int, In(THREADS), tyro.conf.arg(name="np")] = 2
    """Processes on this machine; with --device cuda each takes a GPU."""
    threads: Annotated[int, In(THREADS)] = 1
    """Threads of each process."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the head computes."""
    impl: Literal["auto", "plain", "cpu", "triton"] = "auto"
    """The kernel; auto: the fastest that this machine has."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the matrix products' operands, as in PartialFC; auto: bf16 where this machine multiplies such
    numbers itself, else fp32. Sums are float32 either way."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Dtype of this head's centres; auto: that of the operands. bf16 halves the memory either way. (Recipe face: fp32
    without --centre-dtype.)"""
    state_dtype: Literal["same", "fp32", "bf16", "fp16"] = "same"
    """Dtype of this head's optimizer state; same: as the centres'."""
    optimizer: Literal["sgd", "adamw", "adagrad"] = "sgd"
    """Optimizer of the centres, on the active rows; adagrad and adam have one second moment a row."""
    place: Literal["device", "host"] = "device"
    """Where this head's centres and state are kept."""
    fresh: bool = False
    """Rows are created when they first take part, as in the first steps of a run. Else all of them are created before,
    as later on: then every row takes memory."""
    steps: Annotated[int, In(1)] = 3
    """Timed steps, after one that is not; the median counts."""
    versus: tuple[Literal["plain", "torch", "insightface-style", "label-by-label"], ...] = ()
    """In turn with others. plain: what people write themselves in PyTorch (normalise, CosFace, cross_entropy, SGD).
    torch: F.linear_cross_entropy of torch 2.13 and SGD, without margin and without normalised centres, for which it has
    no place. Both know nothing of processes: with --np above 1 each trains its own share of the classes and exchanges
    nothing, a lower bound of their time; --np 1 is exact. insightface-style: the sharded head as users of InsightFace
    run it. These take one label. label-by-label: this head, with a softmax for each of --labels, and one update. A side
    whose rows differ from this head's by more than 2 % is not compared."""
    versus_precision: Literal["same", "fp32", "bf16"] = "same"
    """Precision of the other sides' operands; same: as this head's."""
    versus_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the other sides' centres and momentum. bf16 is for comparing time and memory: torch.optim.SGD rounds to
    nearest, so that small updates are lost."""
    rounds: Annotated[int, In(1)] = 3
    """Rounds with --versus: each side runs once in each; the median, the smallest and the largest ratio are said."""
    json: bool = False
    """One line for programs instead of the table."""


def bench_head(options: HeadOptions) -> None:
    """Measures and prints the results. Raises ValueError if a run fails."""
    line = measure(options)
    print(json.dumps(line, default=str) if options.json else "\n".join(report(line)))


def measure(options: HeadOptions) -> Line:
    """Returns the options and the median run of this head; "others" has those of --versus, and the ratios."""
    _check(options)
    rounds: list[dict[str, Line]] = []
    for _ in terminal.bar(range(options.rounds if options.versus else 1), desc="rounds", unit="round", leave=False):
        runs: dict[str, Line] = {}
        for side in (OURS, *options.versus):
            runs[side] = run(options, side, precision_of(options, side, runs))
        rounds.append(runs)
    line = {**asdict(options), **_median_run([runs[OURS] for runs in rounds])}
    if options.versus:
        line["others"] = {side: compare(rounds, OURS, side) for side in options.versus}
    return line


def compare(rounds: list[dict[str, Line]], ours: str, other: str) -> Line:
    """Returns the other side's median run, and of the ratios of consecutive runs the median, with the smallest and
    largest in "..._range". Has "not_compared" with the reason instead if the sides did not train equally many rows."""
    found = dict(_median_run([runs[other] for runs in rounds]))
    rows, our_rows = (round(mean(runs[side]["rows"] for runs in rounds)) for side in (other, ours))
    if abs(rows - our_rows) > _ROWS_APART * our_rows:
        return {**found, "not_compared": f"{rows:,} rows beside {our_rows:,}"}
    for ratio, measured in _RATIOS.items():
        each = [runs[other][measured] / runs[ours][measured] for runs in rounds]
        found[ratio] = round(median(each), 2)
        found[f"{ratio}_range"] = [round(min(each), 2), round(max(each), 2)]
    return found


def precision_of(options: HeadOptions, side: str, runs: dict[str, Line]) -> str:
    """Returns the operand precision of a side's products. runs: this round's, including this head's."""
    if side == OURS:
        return options.precision
    return runs[OURS]["precision"] if options.versus_precision == "same" else options.versus_precision


def run(options: HeadOptions, side: str, precision: str) -> Line:
    """Measures one side's time and memory, in its own processes."""
    with tempfile.TemporaryDirectory(prefix="partial-fc-bench-") as name:
        folder = Path(name)
        job = {**asdict(options), "side": side, "side_precision": precision, "folder": folder}
        search = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        status = spawn.run(
            [sys.executable, "-m", "benchmarks.head_worker", json.dumps(job, default=str)],
            gpus=options.num_processes,
            environ={**os.environ, "OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": os.pathsep.join(search)},
        )
        for refusal in sorted(folder.glob(REFUSAL.format("*"))):
            raise ValueError(f"{side}: {refusal.read_text()}")
        if status:
            raise ValueError(f"{side}: its processes ended with status {status}; what they printed says why")
        return json.loads((folder / LINE).read_text())


def _check(options: HeadOptions) -> None:
    """Raises ValueError for incompatible flags."""
    if options.batch % options.num_processes:
        raise ValueError(f"--batch {options.batch} is not divisible by --np {options.num_processes}")
    if len(set(options.versus)) < len(options.versus):
        raise ValueError(f"--versus {' '.join(options.versus)}: name each side once")
    for side in options.versus:
        if (side == LABEL_BY_LABEL) != (options.labels > 1):
            raise ValueError(
                f"--versus {side} with --labels {options.labels}; beside several labels expected {LABEL_BY_LABEL} alone"
            )
    if options.versus and options.optimizer != "sgd":
        raise ValueError(f"--versus with --optimizer {options.optimizer}: the other sides have SGD; leave one out")
    if not options.versus:
        for flag, is_default in (
            ("--versus-precision", options.versus_precision == "same"),
            ("--versus-dtype", options.versus_dtype == "fp32"),
            ("--rounds", options.rounds == 3),
        ):
            if not is_default:
                raise ValueError(f"{flag} without --versus: there is no other side; name one, or leave it out")


def _median_run(runs: list[Line]) -> Line:
    return sorted(runs, key=lambda line: line["step_s"])[len(runs) // 2]


# ---- for people

_COLUMNS = {
    "operands": "precision",
    "logits": "logit_dtype",
    "sums": "sum_dtype",
    "centres": "dtype",
    "momentum": "state_dtype",
    "rows": "rows",
    "step s": "step_s",
    "forward": "forward_s",
    "backward": "backward_s",
    "update": "update_s",
    "exchange": "communication_s",
    "GB": "added_bytes",
    "GFLOP/s": "gflops",
    "of torch.mm": "share_of_matmul",
    "of the bound": "share_of_bound",
}


def report(line: Line) -> list[str]:
    """Formats the results as a table."""
    others: dict[str, Line] = line.get("others", {})
    state = "" if line["state_dtype"] == line["dtype"] else f" --centre-state-dtype {line['state_dtype']}"
    width = max(len(side) for side in (OURS, *others))
    lines = [
        f"{line['classes']:,} classes, rate {line['sample_rate']:g}, batch {line['batch']}, {line['labels']} label(s) "
        f"each, D {line['dim']}, {line['optimizer']}; {line['num_processes']} process(es), {line['threads']} thread(s) "
        f"each; {line['instructions']}; torch {line['torch']}",
        f"this head: kernel {line['impl']}, operands {line['precision']}, centres {line['dtype']}; recipe face trains "
        f"so with --precision {line['precision']} --centre-dtype {line['dtype']}{state} (its defaults: auto, fp32)",
        f"{'a process:':{width}}  " + "  ".join(_COLUMNS),
    ]
    lines += [_row(side, found, width) for side, found in {OURS: line, **others}.items()]
    lines.append(
        f"the bound of this head: products at torch.mm's rate {line['products_s']:.4g} s, bytes at that of a copy "
        f"{line['bytes_s']:.4g} s; the longer counts"
    )
    if line["num_processes"] > 1 and {"plain", "torch"} & set(others):
        lines.append("plain, torch: each process alone with its share of the classes, without exchange: a lower bound")
    for side, found in others.items():
        dtypes = f"operands {found['precision']}, centres {found['dtype']}"
        if "not_compared" in found:
            lines.append(f"{side} ({dtypes}) is not compared: {found['not_compared']}")
            continue
        low, high = found["times_as_fast_range"]
        lines.append(
            f"{side} ({dtypes}) takes {found['times_as_fast']} times as long ({low} to {high}) as this head "
            f"({line['precision']}, {line['dtype']}), and {found['memory_ratio']} times its memory"
        )
    return lines


def _row(side: str, found: Line, width: int) -> str:
    cells = []
    for name, key in _COLUMNS.items():
        value = found[key]
        match name:
            case "GB":
                text = f"{value / 1e9:.2f}"
            case "step s":
                text = f"{value:.4f}"
            case "of torch.mm" | "of the bound":
                text = f"{value:.0%}"
            case _:
                text = f"{value:,}" if isinstance(value, int) else str(value)
        cells.append(f"{text:>{len(name)}}")
    return f"{side:{width}}  " + "  ".join(cells)


if __name__ == "__main__":
    sys.exit(call(bench_head, sys.argv[1:], "python -m benchmarks.head"))

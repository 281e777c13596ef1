"""Imprinted beside random start centres: an encoder of some characters moves to others, and to another script.

    python -m benchmarks.imprint --out DIR

An encoder learns half of the Chinese characters. Then it is fine-tuned on the other half, and on Hangul, with both
kinds of start centres. The score is the share of images, in a typeface that no run sees, whose nearest centre is that
of their own class. That of the frozen encoder is the imprinted centres' before the first step. Imprinted runs also
start with 20 and 40 frozen steps, in which centres move alone. Finished runs in DIR are not repeated, so seeds may run
at the same time.
"""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
import torch
import tyro
from torch.nn.functional import normalize

from demo.glyphs_fonts import CHINESE, NEVER_TRAINED, TYPEFACES, characters, choose, find_fonts, script
from demo.glyphs_render import Pen, workers
from demo.make_glyphs import drawn_by, write_training
from partial_fc.checkpoint.read import Checkpoint
from partial_fc.checkpoint.rows_now import rows_now
from partial_fc.data import open_source
from partial_fc.data.sample import still
from partial_fc.embedding.load import from_checkpoint

ROOT = Path(__file__).parents[1]
HANGUL = tuple(i for i, typeface in enumerate(TYPEFACES) if "hangul" in typeface.scripts)
UNSEEN_HANGUL = next(i for i, typeface in enumerate(TYPEFACES) if typeface.name == "un-graphic")
# Imprinted centres start at their place and need no more than small steps; random ones learn nothing at that rate.
IMPRINTED = "--start-centres imprint --head-lr 0.0015"
STARTS = {"imprinted": IMPRINTED, "imprinted-20": f"{IMPRINTED} --freeze-steps 20",
          "imprinted-40": f"{IMPRINTED} --freeze-steps 40", "random": ""}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Trains encoders and fine-tunes them; prints a table and one JSON line, and draws the curves."""

    out: Path
    """Folder of the sets, runs and curves.png."""
    classes: int = 400
    """Characters of each half, and of Hangul."""
    images: int = 2
    """Training images of a character in a typeface."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each has an order of the images and random centres of its own."""
    epochs: float = 6.0
    """Of the encoder."""
    steps: int = 200
    """Of a fine-tuning run, of 32 images each."""
    every: int = 10
    """Steps between two scores in the first fifth of a run; later four times as many."""
    flags: str = "--lr 0.0015 --head-lr 0.006 --warmup-epochs 0 --warmup-steps 20"
    """Of all fine-tuning runs."""
    threads: int = 1
    """Of every process."""


def main() -> None:
    options = tyro.cli(Options)
    torch.set_num_threads(options.threads)
    build(options)
    curves: dict[str, dict[str, list[dict[int, float]]]] = {}
    encoder = options.out / "encoder"
    train(options, encoder, "source", f"--epochs {options.epochs}")
    for seed in options.seeds:
        for target in ("other", "hangul"):
            for start, flag in STARTS.items():
                scores = fine_tune(options, encoder, target, start, flag, seed)
                curves.setdefault(target, {}).setdefault(start, []).append(scores)
                print(
                    f"[{time.strftime('%H:%M:%S')}] seed {seed} {target} {start}: {scores}", file=sys.stderr, flush=True
                )
    print("\n".join(table(options, curves)))
    draw(curves, options.out / "curves.png")
    print(json.dumps({**asdict(options), "out": "", "curves": curves, "torch": torch.__version__}))


# ---- data


def build(options: Options) -> None:
    """Draws the training sets `source`, `other` and `hangul`, and the test sets of the last two."""
    fonts = find_fonts(Path("/usr/share/fonts"))
    all_characters = characters(fonts)
    han, _ = choose(all_characters, 2 * options.classes, 20, 0)
    hangul = [c for c, indices in all_characters.items() if script(c) == "hangul" and set(HANGUL) <= set(indices)]
    hangul = [hangul[i] for i in np.random.default_rng(0).permutation(len(hangul))[: options.classes].tolist()]
    pen = Pen(tuple((font.path, font.index) for font in fonts), 40, 90, 0)
    sets = {
        "source": (han[: options.classes], CHINESE, NEVER_TRAINED),
        "other": (han[options.classes :], CHINESE, NEVER_TRAINED),
        "hangul": (hangul, HANGUL, UNSEEN_HANGUL),
    }
    for name, (codes, indices, unseen) in sets.items():
        folder = options.out / name
        if (folder / "test/classes.txt").exists():
            continue
        (folder / "test").mkdir(parents=True, exist_ok=True)
        with workers(1) as run:
            drawn = drawn_by(pen, run, {code: indices for code in codes})
            drawn = {code: kept for code, kept in drawn.items() if unseen in kept and len(kept) > 1}
            seen = {code: tuple(i for i in kept if i != unseen) for code, kept in drawn.items()}
            write_training(folder, pen, run, seen, options.images)
            write_training(folder / "test", pen, run, {code: (unseen,) for code in drawn}, 2)


# ---- runs


def train(options: Options, root: Path, name: str, flags: str) -> None:
    """Trains, unless the run is finished. Raises ValueError with the end of what was printed, where it fails."""
    if (root / "result.json").exists():
        return
    words = f"--dataset glyphs --rec {options.out / name} --models-root {root} --val-targets --check-data off "
    words += "--batch-size 32 --num-workers 1 --checkpoint-every 0 --warmup-epochs 0.1 "
    command = [sys.executable, "train.py", "face", *shlex.split(words + flags)]
    environment = {"OMP_NUM_THREADS": str(options.threads), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    )
    if done.returncode:
        raise ValueError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-3000:]}")


def fine_tune(options: Options, encoder: Path, target: str, start: str, flag: str, seed: int) -> dict[int, float]:
    """Returns the score after some of the steps."""
    root = options.out / f"{target}-{start}-{seed}"
    known = root / "scores.json"
    if known.exists():
        return {int(step): score for step, score in json.loads(known.read_text()).items()}
    common, scores = f"--pretrained {encoder} --seed {seed} {options.flags} {flag}", {}
    if start.startswith("imprinted"):
        begin = options.out / f"{target}-imprinted-{seed}-start"
        train(options, begin, target, f"{common} --max-steps 1 --warmup-steps 0 --freeze-steps 1 --head-lr 0")
        scores[0] = score(options, begin / "checkpoints/step-00000001", target)
    keep = f"--checkpoint-every {options.every} --keep-checkpoints {options.steps}"
    train(options, root, target, f"{common} --max-steps {options.steps} {keep}")
    for step in steps(options):
        scores[step] = score(options, root / f"checkpoints/step-{step:08d}", target)
    known.write_text(json.dumps(scores))
    return scores


def steps(options: Options) -> Iterator[int]:
    for step in range(options.every, options.steps + 1, options.every):
        if step <= options.steps // 5 or step % (4 * options.every) == 0:
            yield step


def score(options: Options, folder: Path, target: str) -> float:
    """Returns the share of the test images whose nearest centre is their class's."""
    stored = Checkpoint(folder)
    model, source = from_checkpoint(stored).model(), open_source(options.out / target / "test")
    samples = [source.read(i) for i in range(len(source))]
    feat_ND = torch.from_numpy(model.embed([still(sample) for sample in samples]))
    centre_CD = rows_now(stored).read(torch.arange(stored.rows().stop), ("centres",))["centres"]
    nearest_N = (feat_ND @ normalize(centre_CD.float()).T).argmax(dim=1)
    return float((nearest_N == torch.tensor([sample.label for sample in samples])).double().mean())


# ---- what was found


def table(options: Options, curves: Mapping[str, Mapping[str, list[dict[int, float]]]]) -> Iterator[str]:
    """Yields a Markdown table: medians over the seeds, the smallest and the largest in parentheses."""
    heads = (
        "moved to", "start", "frozen", "random, end", "imprinted, end", "imprinted, lowest", "steps to random's end",
        "share",
    )  # fmt: skip
    yield f"| {' | '.join(heads)} |"
    yield f"|{' --- |' * len(heads)}"
    for (target, by_start), start in product(curves.items(), [start for start in STARTS if start != "random"]):
        imprinted, ends = by_start[start], [scores[options.steps] for scores in by_start["random"]]
        reached = [
            next((step for step in sorted(scores) if scores[step] >= end), options.steps + 1)
            for scores, end in zip(imprinted, ends, strict=True)
        ]
        columns = [
            of([scores[0] for scores in imprinted]),
            of(ends),
            of([scores[options.steps] for scores in imprinted]),
            of([min(scores.values()) for scores in imprinted]),
            f"{median(reached):g} ({min(reached)} to {max(reached)})",
            of([step / options.steps for step in reached]),
        ]
        yield f"| {target} | {start} | {' | '.join(columns)} |"


def of(shares: list[float]) -> str:
    return f"{median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%})".replace("%", " %")


def draw(curves: Mapping[str, Mapping[str, list[dict[int, float]]]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (target, by_start) in zip(figure.subplots(1, len(curves)), curves.items(), strict=True):
        for (start, runs), colour in zip(by_start.items(), ("blue", "cyan", "green", "orange"), strict=True):
            at = sorted(runs[0])
            for number, scores in enumerate(runs):
                axes.plot(
                    at, [100 * scores[step] for step in at], color=f"tab:{colour}", label=None if number else start
                )
        frozen = median(scores[0] for scores in by_start["imprinted"])
        axes.axhline(100 * frozen, color="grey", linestyle=":", label="frozen encoder")
        axes.set(title=f"moved to {target}", xlabel="step", ylabel="top-1, %")
        axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"imprint: {error}")

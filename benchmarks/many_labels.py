"""Several labels and several heads on glyphs: what they change, with seeds (docs/many-labels.md).

    python -m benchmarks.many_labels --jobs 2       runs what is missing, two at a time
    python -m benchmarks.many_labels --analyse      recomputes the tables from benchmarks/results/many_labels

An encoder of 1,000 characters embeds the images of 4,000 others, faiss (`pip install faiss-cpu`) makes 4,000 classes of
them, and networks learn from the nearest cluster of each image, or from its eight nearest. The other half: a head of
characters alone, or with heads of their radicals and typefaces beside it. All are measured on characters that no run
has seen.
"""

import subprocess
import sys
import unicodedata
from bisect import bisect_right
from functools import partial
from pathlib import Path

import numpy as np

from partial_fc.data.recordio import RecordReader, RecordWriter, pack

from .study import sets
from .study.cells import BATCH, Cell, registered, steps
from .study.command import Options, Study
from .study.run import GLYPHS, Data, held_out, train
from .study.statistics import MAIN, Hypothesis, Results, errors, ratio, verdicts

SEEDS = 6  # the least of which a sign-flip test can pass Holm's correction for three
CLUSTERS = 4000
VISITS = 25  # how often a run sees a class, on average
ARMS = {
    "1": "",
    "mean-softmax": "--labels 8 --rule mean-softmax",
    "mlcd": "--labels 8 --rule mlcd",
    "one": "",
    "three": f"--batch-size character={BATCH * 3 // 4} radical={BATCH // 8} typeface={BATCH // 8}",
}
NAMES = {
    Cell("clusters", "1"): "nearest cluster",
    Cell("clusters", "mean-softmax"): "eight nearest clusters, mean-softmax",
    Cell("clusters", "mlcd"): "eight nearest clusters, mlcd",
    Cell("heads", "one"): "characters",
    Cell("heads", "three"): "characters, radicals and typefaces",
}
STAGES = ([("clusters", ("1", "mean-softmax", "mlcd"), SEEDS), ("heads", ("one", "three"), SEEDS)],)
RADICALS = [ord(unicodedata.normalize("NFKC", chr(0x2F00 + number))) for number in range(214)]


def data(cell: Cell, options: Options) -> Data:
    if cell.set not in ("clusters", "heads"):
        raise ValueError(f"set {cell.set!r}: expected clusters or heads")
    unseen = sets.folder(options.folder, "heldout")
    if cell.set == "clusters":
        folder = clusters(options.folder)
        digest = f"{sets.digest(folder)} {sets.digest(unseen)}"
        return Data(str(folder), held_out(options.folder), steps(CLUSTERS, VISITS), GLYPHS, digest)
    folders = {
        name: sets.made(options.folder / f"heads-{name}", partial(relabel, options, name))
        for name in ("character", "radical", "typeface")
    }
    digest = " ".join(map(sets.digest, (*folders.values(), unseen)))
    rec = " ".join(f"{name}={path}" for name, path in folders.items()) if cell.arm == "three" else folders["character"]
    num_classes = int((folders["character"] / "property").read_text().split(",")[0])
    flags = GLYPHS.replace(f"--batch-size {BATCH}", "") if cell.arm == "three" else GLYPHS
    table = "character" if cell.arm == "three" else ""
    return Data(str(rec), held_out(options.folder), steps(num_classes, VISITS), flags, digest, table)


# ---- clusters as classes


def clusters(root: Path) -> Path:
    """Returns the images of the set `small` with the numbers of their eight nearest clusters, the nearest first."""
    source, encoder, table = sets.folder(root, "small"), root / "encoder-run", root / "small.npz"

    def make(path: Path) -> None:
        import faiss

        of = Data(str(sets.folder(root, "encoder")), held_out(root), 500, GLYPHS, "")
        if not (encoder / "result.json").exists():
            train(encoder, 0, of, "", points=1)
        verb("embed", encoder, source, "--out", table)
        row_ND = np.load(table)["embeddings"]  # of length 1
        k_means = faiss.Kmeans(row_ND.shape[1], CLUSTERS, spherical=True, seed=0)
        k_means.train(row_ND)
        label_NK = k_means.index.search(row_ND, 8)[1]
        reader = RecordReader(source / "train.rec")
        with RecordWriter(path / "train.rec") as records:
            for key, label_K in enumerate(label_NK.astype(np.float32), start=1):
                records.write(key, pack(label_K, reader.read_sample(key)[1], id=key))
        (path / "property").write_text(f"{CLUSTERS},40,40\n")

    return sets.made(root / "clusters", make)


def verb(*words: object) -> None:
    """Raises ValueError with the end of what `partial-fc` printed, where it fails."""
    done = subprocess.run([sys.executable, "-m", "partial_fc", *map(str, words)], text=True, capture_output=True)
    if done.returncode:
        raise ValueError(
            f"partial-fc {' '.join(map(str, words))}: exit status {done.returncode}\n{done.stderr[-3000:]}"
        )


# ---- heads of characters, radicals and typefaces


def radical(code: int) -> int:
    """Returns the number, from 0, of a character's radical in the dictionary of Kangxi, or -1 where its block is not in
    that order. The 20,902 ideographs of Unicode 1.1 are: each radical begins its section."""
    return bisect_right(RADICALS, code) - 1 if 0x4E00 <= code <= 0x9FA5 else -1


def relabel(options: Options, name: str, path: Path) -> None:
    """Writes the images of those characters of the set `small` whose radical is known, with one kind of label."""
    source = sets.folder(options.folder, "small")
    names, label = sets.rows(source)
    code, face = zip(*(name.removesuffix(".jpg").rsplit("-", 1)[0].split("/") for name in names), strict=True)
    radical_N = np.array([radical(int(one, 16)) for one in code])
    kind_N = {"character": label, "radical": radical_N, "typeface": np.unique(face, return_inverse=True)[1]}[name]
    found = np.full(len(label), -1)
    kept = radical_N >= 0
    found[kept] = np.unique(kind_N[kept], return_inverse=True)[1]
    sets.relabel(source, path, found)


# ---- what was found


def analyse(folder: Path) -> None:
    results = Results.read(folder)
    one, mean, mlcd, alone, three = NAMES
    lines = [*errors(results, list(NAMES.items())), "", f"| ratio of the errors at {MAIN} | |", "| --- | --- |"]
    for cell, other in ((mean, one), (mlcd, mean), (three, alone)):
        lines.append(f"| {NAMES[cell]}, over {NAMES[other]} | {ratio(results, cell, other)} |")
    found = [
        Hypothesis("L1", "eight clusters have a lower error than one", [results.difference(mean, one)]),
        Hypothesis("L2", "mlcd has a lower error than mean-softmax", [results.difference(mlcd, mean)]),
        Hypothesis("L3", "three heads have a lower error than one", [results.difference(three, alone)]),
    ]
    print("\n".join([*lines, "", *verdicts(found, 0.05)]))


if __name__ == "__main__":
    Study("many_labels", ARMS, registered(STAGES), data, analyse).main(Options, __doc__)

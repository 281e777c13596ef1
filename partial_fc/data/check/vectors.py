"""A scan of vectors: those without a direction, and repeated ones. N vectors of D numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partial_fc import terminal
from partial_fc.data.check.images import ImageScan, check_repetitions, hash_of
from partial_fc.data.vectors import BLOCK, Vectors
from partial_fc.findings import Describe, Finding, findings_at


def check_vectors(
    parts: Sequence[Vectors], label_N: NDArray[np.int64], describe: Describe, file: str, bar: str = ""
) -> list[Finding]:
    """Reads every vector of the files. label_N: of all of them. describe(i) names vector i. bar: the name of a progress
    bar, if any."""
    length_N, scan = np.empty(len(label_N)), ImageScan(0)
    scan.hash_N = np.zeros(len(label_N), np.uint64)
    start = 0
    with terminal.bar(total=len(label_N), unit="vector", desc=bar, shown=bool(bar)) as progress:
        for part in parts:
            for first in range(0, len(part), BLOCK):
                row_BD = np.ascontiguousarray(part.row_ND[first : first + BLOCK])
                some = slice(start, start + len(row_BD))
                with np.errstate(over="ignore"):
                    row32_BD = row_BD.astype(np.float32, copy=False)  # as training sees them
                length_N[some] = np.sqrt(np.einsum("nd,nd->n", row32_BD, row32_BD, dtype=np.float64))
                scan.hash_N[some] = [hash_of(row_D.data) for row_D in row_BD]
                start = some.stop
                progress.update(len(row_BD))
    bad_N = ~np.isfinite(length_N) | (length_N == 0)
    scan.hash_N[bad_N] = 0

    def with_problem(i: int) -> Mapping[str, Any]:
        return {**describe(i), "problem": "only zeros" if length_N[i] == 0 else "NaN or Inf"}

    kinds = " and ".join(sorted({str(part.row_ND.dtype) for part in parts}))
    good = length_N[~bad_N]
    lengths = f", of length {good.min():.3g} to {good.max():.3g}, median {np.median(good):.3g}" if len(good) else ""
    findings = [Finding("info", "vectors", f"{kinds}, {parts[0].width} numbers{lengths}", len(label_N), file=file)]
    what = "vectors have NaN or Inf, or only zeros: training replaces them by others"
    findings += findings_at("error", "vectors-bad", what, bad_N, with_problem, file)
    return findings + check_repetitions(scan, label_N, describe, file, "vectors")

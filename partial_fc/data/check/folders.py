"""A folder of class folders: what of it is not read, and names that may be one class twice."""

from collections import defaultdict

import numpy as np

from partial_fc.data.image_folder import ImageFolder
from partial_fc.data.sample import Source
from partial_fc.findings import Finding


def check_folders(source: Source, file: str = "") -> list[Finding]:
    """Nothing where the source is something else."""
    if not isinstance(source, ImageFolder):
        return []
    findings = []
    paths = [path for paths in source.left_out.values() for path in paths]
    if paths:
        what = f"files are left out: {source.left_out_text()}"
        findings.append(
            Finding("warning", "files-left-out", what, len(paths), np.arange(len(paths)),
                    lambda i: {"file": str(source.root / paths[i])}, file)
        )  # fmt: skip
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for name in source.classes:
        alike[" ".join(name.casefold().replace("_", " ").split())].append(name)
    groups = [" = ".join(names) for names in alike.values() if len(names) > 1]
    if groups:
        what = "names of class folders differ only in case, blanks or `_`: is that one class, twice?"
        findings.append(
            Finding("warning", "class-names-alike", what, len(groups), np.arange(len(groups)),
                    lambda i: {"folders": groups[i]}, file)
        )  # fmt: skip
    return findings

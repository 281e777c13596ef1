"""`partial-fc report`: writes an HTML page about a run's folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from partial_fc.files import replacing
from partial_fc.verbs.report.page import page
from partial_fc.verbs.report.run_facts import read_run


@dataclass(frozen=True)
class ReportOptions:
    """Writes a report of a run to one HTML file, which a browser opens without a server: result, curves, evaluations,
    configuration, images, speed, problems. The run may still be in progress."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_FOLDER")]
    """The run's --models-root."""
    out: Path | None = None
    """The file; none: report.html in the run's folder."""


def report(options: ReportOptions) -> None:
    """Prints the path written. Raises ValueError for a folder without a run."""
    out = options.out or options.run / "report.html"
    text = page(read_run(options.run))
    with replacing(out) as partial:
        partial.write_text(text, encoding="utf-8")
    print(f"{out}: {len(text) / 1e6:.1f} MB, opens in any browser")

"""`partial-fc report`: writes an HTML page about a run's folder. (page.html has its sections.)"""

import base64
import io
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import jinja2
import numpy as np
import tyro
from markupsafe import Markup

from partial_fc.accessories import import_matplotlib
from partial_fc.files import replacing
from partial_fc.findings import counted
from partial_fc.flags import flag
from partial_fc.train.record.curve import thinned
from partial_fc.verbs.report.run_facts import RunFacts, read_run

_GREY = "#808080"  # readable on a light and on a dark page


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


def page(run: RunFacts) -> str:
    """Returns the HTML of the page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("partial_fc.verbs.report", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    filters: dict[str, Any] = {
        "base64": lambda png: base64.b64encode(png).decode(),
        "flags": _as_flags,
        "percent": lambda share: f"{100 * share:.2f} %",
        "shell": lambda words: shlex.join(map(str, words)),
    }
    environment.filters |= filters
    scores, point_P3 = run.scores, thinned(run.loss_N3)
    curves = {"loss": point_P3[:, :2], "learning rate": point_P3[:, [0, 2]]} if len(point_P3) else {}
    unit, rates = _speed(run)
    # A single dot adds nothing to the table.
    several = any(len(marks) > 1 for marks in scores.values())
    return environment.get_template("page.html").render(
        run=run,
        name=run.root.resolve().name,
        headline=_headline(run),
        cards=_cards(run),
        last_steps=counted(_last_tenth(run), "step"),
        curves=[line_chart({name: points}, name) for name, points in curves.items()],
        scores=scores,
        score_chart=line_chart(scores, "score") if several else "",
        defaults={name: value for name, value in run.values.items() if name not in (run.differs or {})},
        speed_chart=line_chart({f"{unit}/s": rates}, f"{unit}/s of all processes") if len(rates) > 1 else "",
    )


def line_chart(series: Mapping[str, Any], label: str) -> Markup:
    """Draws lines by name over steps, of (step, value), as PNG. label: of the y axis."""
    figure = import_matplotlib().figure.Figure(figsize=(8, 2.8), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    for name, points in series.items():
        step_N, value_N = np.asarray(points, dtype=np.float64).reshape(-1, 2).T
        axes.plot(step_N, value_N, "o-" if len(step_N) < 30 else "-", markersize=4, label=name.replace("$", r"\$"))
    axes.set(xlabel="step", ylabel=label)
    if len(series) > 1:
        axes.legend(fontsize=9)
    axes.grid(alpha=0.4)
    axes.tick_params(colors=_GREY)
    for part in (axes.xaxis.label, axes.yaxis.label):
        part.set_color(_GREY)
    axes.spines[:].set_visible(False)
    png = io.BytesIO()
    figure.savefig(png, format="png", transparent=True)
    image = Markup('<img alt="{} over steps" src="data:image/png;base64,{}">')
    return image.format(label, base64.b64encode(png.getvalue()).decode())


def _headline(run: RunFacts) -> str:
    what = [f"recipe {run.recipe}"]
    what += [str(run.values[flag]) for flag in ("network", "model") if run.values.get(flag)]
    data = (run.values.get(flag) for flag in ("rec", "train_data", "train_list", "data_dir", "dataset"))
    what += [str(value) for value in data if value and value != "custom"][:1]
    total = run.total_steps
    state = "finished" if run.is_finished else "not finished"
    steps = f"step {run.last_step:,}" + (f" of {total:,}" if total else "")
    when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
    return f"{', '.join(what)}: {state}, {steps}. Written {when}."


def _last_tenth(run: RunFacts) -> int:
    """Returns the number of rows in the last tenth of the loss, at least one."""
    return max(1, len(run.loss_N3) // 10)


def _cards(run: RunFacts) -> dict[str, str]:
    cards = {name: f"{100 * marks[-1][1]:.2f} %" for name, marks in run.scores.items()}
    if not cards:
        cards = {name: f"{100 * score:.2f} %" for name, score in run.result.get("best", {}).items()}
    if len(run.loss_N3):
        cards["loss"] = f"{run.loss_N3[-_last_tenth(run) :, 1].mean():.4g}"
    unit, rates = _speed(run)
    if speed := run.result.get(f"{unit}_per_s") or (rates and rates[-1][1]):
        cards[f"{unit}/s"] = f"{speed:,.0f}"
    if seconds := run.result.get("seconds"):
        cards["time"] = str(timedelta(seconds=round(seconds)))
    if peak := run.result.get("peak_memory_bytes"):
        cards["memory of rank 0"] = f"{peak / 2**30:.1f} GiB"
    if size := run.result.get("world_size") or run.start.get("world_size"):
        cards["processes"] = str(size)
    return cards


def _speed(run: RunFacts) -> tuple[str, list[Any]]:
    """Returns (images or samples, their rates as (step, rate))."""
    series = {unit: run.scalars.get(f"speed/{unit}_per_s", []) for unit in ("samples", "images")}
    unit = "samples" if "samples_per_s" in run.result or series["samples"] else "images"
    return unit, series[unit]


def _as_flags(values: Mapping[str, Any]) -> dict[str, str]:
    return {
        flag(name): " ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in values.items()
    }


def _printable(value: Any) -> Any:
    """Escapes a name that is not UTF-8 with backslashes."""
    return value if isinstance(value, Markup) else str(value).encode("utf-8", "backslashreplace").decode()

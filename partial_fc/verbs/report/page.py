"""The page itself: sections from top to bottom, everything inside one file. Whatever comes from data is escaped."""

import base64
import shlex
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from html import escape
from typing import Any

from partial_fc.findings import counted
from partial_fc.flags import flag
from partial_fc.train.record.curve import thinned
from partial_fc.verbs.report.charts import line_chart, share_bar
from partial_fc.verbs.report.run_facts import RunFacts
from partial_fc.verbs.report.style import STYLE

_LOG_FROM = 20.0  # largest loss over smallest, from which on the axis is logarithmic


def page(run: RunFacts) -> str:
    """The whole file."""
    name = run.root.resolve().name
    sections = [
        ("Result", _result(run)),
        ("Loss and learning rate", _curves(run)),
        ("Evaluations", _evaluations(run)),
        ("Pictures of the evaluations", _pictures(run)),
        ("Configuration", _configuration(run)),
        ("What the network sees", _first_batch(run)),
        ("Speed", _speed(run)),
        ("What went wrong", _trouble(run)),
        ("Go on, or use it", _next(run)),
        ("Versions", _table(run.start.get("versions") or run.result.get("versions") or {})),
    ]
    shown = [(title, "".join(parts)) for title, parts in sections]
    links = "".join(f'<a href="#s{n}">{title}</a>' for n, (title, body) in enumerate(shown) if body)
    bodies = "".join(
        f'<section id="s{n}"><h2>{title}</h2>{body}</section>' for n, (title, body) in enumerate(shown) if body
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(name)}: report</title><style>{STYLE}</style></head><body>"
        f"<h1>{_text(name)}</h1><p>{_headline(run)}</p><nav>{links}</nav>{bodies}</body></html>\n"
    )


def _headline(run: RunFacts) -> str:
    what = [f"recipe {run.recipe}"]
    what += [str(run.values[flag]) for flag in ("network", "model") if run.values.get(flag)]
    data = (run.values.get(flag) for flag in ("rec", "train_data", "train_list", "data_dir", "dataset"))
    what += [str(value) for value in data if value and value != "custom"][:1]
    total = run.total_steps
    if run.is_finished:
        state = "finished"
    elif run.history.ended == "stopped":
        state = "stopped, as asked"
    else:
        state = "not finished"
    steps = f"step {run.last_step:,}" + (f" of {total:,}" if total else "")
    when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
    return _text(f"{', '.join(what)}: {state}, {steps}. Written {when}.")


def _last_tenth(run: RunFacts) -> int:
    """Rows of the loss, one at least."""
    return max(1, len(run.loss_N3) // 10)


def _result(run: RunFacts) -> Iterator[str]:
    cards = {name: f"{100 * marks[-1][1]:.2f} %" for name, marks in run.history.scores().items()}
    if not cards:
        cards = {name: f"{100 * score:.2f} %" for name, score in run.result.get("best", {}).items()}
    if len(run.loss_N3):
        cards["loss"] = f"{run.loss_N3[-_last_tenth(run) :, 1].mean():.4g}"
    speed = run.result.get("images_per_s") or _last(run.history.series("speed/images_per_s"))
    if speed:
        cards["images/s"] = f"{speed:,.0f}"
    if seconds := run.result.get("seconds"):
        cards["time"] = str(timedelta(seconds=round(seconds)))
    if peak := run.result.get("peak_memory_bytes"):
        cards["memory of rank 0"] = f"{peak / 2**30:.1f} GiB"
    if size := run.result.get("world_size") or run.start.get("world_size"):
        cards["processes"] = str(size)
    yield '<div class="cards">'
    for name, value in cards.items():
        interval = _interval(run, name)
        more = f"<br><span>95 %: {interval}</span>" if interval else ""
        yield f"<div><b>{_text(value)}</b><span>{_text(name)}</span>{more}</div>"
    yield "</div>"
    if len(run.loss_N3):
        yield '<p class="small">Scores: of the last evaluation. Loss: mean of the last '
        yield f"{counted(_last_tenth(run), 'step')}, a tenth of the run.</p>"


def _interval(run: RunFacts, name: str) -> str:
    """Of the last accuracy of a set, which few pairs leave wide; nothing where it is not known."""
    values = run.result.get("evaluations", {}) if run.is_finished else {}
    low, high = values.get(f"{name}/accuracy_low"), values.get(f"{name}/accuracy_high")
    return "" if low is None or high is None else f"{100 * low:.1f} to {100 * high:.1f} %"


def _curves(run: RunFacts) -> Iterator[str]:
    point_P5 = thinned(run.loss_N3)
    if not len(point_P5):
        yield "<p>No step yet.</p>"
        return
    log = point_P5[:, 1].min() > 0 and point_P5[:, 1].max() > _LOG_FROM * point_P5[:, 1].min()
    band_N3 = point_P5[:, [0, 2, 3]]
    if log:
        band_N3 = band_N3.clip(min=point_P5[:, 1].min())
    yield line_chart({"loss": point_P5[:, :2]}, "loss", log=bool(log), band_N3=band_N3)
    yield line_chart({"learning rate": point_P5[:, [0, 4]]}, "learning rate")
    if len(run.loss_N3) > len(point_P5):
        yield (
            f'<p class="small">{len(run.loss_N3):,} steps in {len(point_P5)} points: their means, and behind them the '
            "smallest and largest loss.</p>"
        )


def _evaluations(run: RunFacts) -> Iterator[str]:
    scores = run.history.scores()
    if not scores:
        return
    if any(len(marks) > 1 for marks in scores.values()):  # a dot alone says no more than the table
        yield line_chart(scores, "score", marks=True, percent=True, until=run.last_step)
    yield "<table><tr><th>set</th><th>last</th><th>95 % interval</th><th>best</th><th>at step</th></tr>"
    for name, marks in scores.items():
        step, best = max(marks, key=lambda mark: mark[1])
        yield (
            f"<tr><td>{_text(name)}</td><td>{100 * marks[-1][1]:.2f} %</td><td>{_interval(run, name) or '-'}</td>"
            f"<td>{100 * best:.2f} %</td><td>{step:,}</td></tr>"
        )
    yield "</table>"
    values = run.result.get("evaluations", {})
    if values:
        yield "<details><summary>All values of the last evaluation</summary>"
        yield _table({name: "none" if value is None else f"{value:.6g}" for name, value in values.items()})
        yield "</details>"


def _pictures(run: RunFacts) -> Iterator[str]:
    for title, png in run.pictures:
        yield f"<figure><figcaption>{_text(title)}</figcaption>{_image(png, title)}</figure>"


def _configuration(run: RunFacts) -> Iterator[str]:
    if run.differs is not None:
        yield "<h3>Other than by default</h3>" + _table(_as_flags(run.differs))
        rest = {name: value for name, value in run.values.items() if name not in run.differs}
        yield f"<details><summary>As by default ({len(rest)})</summary>{_table(_as_flags(rest))}</details>"
    elif run.values:
        yield _table(_as_flags(run.values))


def _first_batch(run: RunFacts) -> Iterator[str]:
    if not run.tiles:
        return
    yield "<p>The first images of rank 0, as the network got them: cropped, mirrored, augmented.</p>"
    yield '<div class="tiles">'
    for tile in run.tiles:
        name = f"class {tile.label}" if tile.name is None else tile.name
        yield (
            f'<figure title="{_text(f"class {tile.label}, record {tile.key}")}">{_image(tile.png, name)}'
            f"<figcaption>{_text(name)}</figcaption></figure>"
        )
    yield "</div>"


def _speed(run: RunFacts) -> Iterator[str]:
    rates = run.history.series("speed/images_per_s")
    if len(rates) > 1:
        yield line_chart({"images/s": rates}, "images/s of all processes")
    parts: dict[str, float] = {}
    before = 0
    for row in run.history.scalars:
        shares = {name: share for name, share in row.items() if name.startswith("time/") and share is not None}
        for name, share in shares.items():  # each stands for the steps since the row before
            part = name.removeprefix("time/")
            parts[part] = parts.get(part, 0.0) + share * max(1, row["step"] - before)
        before = row["step"] if shares else before
    if parts:
        yield "<h3>Where the time of a step goes</h3>"
        yield share_bar(parts)
    traffic = run.result.get("traffic_per_step") or {}
    if traffic:
        yield "<details><summary>What travels in a step</summary>"
        rows = {name: f"{one['bytes']:,.0f} bytes, {one['calls']:.4g} calls" for name, one in traffic.items()}
        yield _table(rows) + "</details>"


def _trouble(run: RunFacts) -> Iterator[str]:
    found = {what: f"{count:,}" for what, count in run.trouble.items()}
    if skipped := run.result.get("skipped_updates"):
        found["updates skipped in all"] = f"{skipped:,}"
    if found:
        yield _table(found)
    if run.num_problems:
        yield f"<h3>{run.num_problems:,} warnings and errors</h3>" + _list(run.problems)
        if run.num_problems > len(run.problems):
            yield f"<p>The others are in {_text(run.root / 'logs')}.</p>"
    if run.files:
        yield "<h3>Batches that were written down</h3>" + _list(run.files)
    if not (found or run.num_problems or run.files):
        yield "<p>Nothing that the log knows of.</p>"
    if run.notes:
        yield f"<h3>Notes</h3>{_list(run.notes)}"
    if len(run.history.starts) > 1:
        yield f"<h3>Started {len(run.history.starts)} times</h3><table><tr><th>when</th><th>from step</th>"
        yield "<th>processes</th></tr>"
        for row in run.history.starts:
            when = datetime.fromtimestamp(row["time"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
            yield f"<tr><td>{when}</td><td>{row['step']:,}</td><td>{_text(row.get('world_size', '?'))}</td></tr>"
        yield "</table>"


def _next(run: RunFacts) -> Iterator[str]:
    root, command = str(run.root), run.start.get("command")
    if run.checkpoints:
        folders = ", ".join(folder.name for folder, _ in run.checkpoints)
        where = run.checkpoints[-1][0].parent
        yield f"<p>Checkpoints in {_text(where)}: {_text(folders)}.</p>"
    if command:
        more = " (with more --epochs or --max-steps)" if run.is_finished else ""
        yield f"<p>The same command goes on from the newest checkpoint{more}; each process ran:</p>"
        yield f"<pre>{_text(shlex.join(map(str, command)))}</pre>"
    weights = run.root / "model.safetensors"
    if weights.exists():
        lines = ["from safetensors.torch import load_file", "", f"weights = load_file({str(weights)!r})"]
        if run.recipe == "face":
            lines = ["import partial_fc", "", f"model = partial_fc.load({root!r})", "model.embed(['a.jpg', 'b.jpg'])"]
        yield "<p>What was trained, in Python:</p><pre>" + _text("\n".join(lines)) + "</pre>"
    yield "<p>All numbers, and what the checkpoints hold:</p><pre>"
    yield _text(
        f"tensorboard --logdir {shlex.quote(root + '/tensorboard')}\npartial-fc checkpoint inspect {shlex.quote(root)}"
    )
    yield "</pre>"


def _as_flags(values: Mapping[str, Any]) -> dict[str, str]:
    return {
        flag(name): " ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in values.items()
    }


def _table(rows: Mapping[str, Any]) -> str:
    if not rows:
        return ""
    cells = "".join(f"<tr><td>{_text(name)}</td><td>{_text(value)}</td></tr>" for name, value in rows.items())
    return f"<table>{cells}</table>"


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(line)}</li>' for line in lines)}</ul>"


def _image(png: bytes, words: str) -> str:
    return f'<img alt="{_text(words)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _last(points: list[tuple[int, float]]) -> float | None:
    return points[-1][1] if points else None


def _text(value: object) -> str:
    """Escaped, also inside quotes; a name that is no UTF-8 is shown with backslashes."""
    return escape(str(value).encode("utf-8", "backslashreplace").decode(), quote=True)

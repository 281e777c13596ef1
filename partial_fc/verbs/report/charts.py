"""Line charts and bars as inline SVG, without libraries or scripts; the page has the colours."""

import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

Points = Sequence[tuple[float, float]] | NDArray[np.float64]

NUM_COLOURS = 8  # of style.css: .c0, .c1 ...
_WIDE, _HIGH = 760, 270
# Space for letters of twice the size, which narrow pages use.
_LEFT, _RIGHT, _TOP, _BOTTOM = 96, 48, 18, 58


def line_chart(
    series: Mapping[str, Points],
    label: str,
    *,
    log: bool = False,
    marks: bool = False,
    band_N3: NDArray[np.float64] | None = None,
    percent: bool = False,
    until: int = 0,
) -> str:
    """Draws lines by name over steps, of at least one point. label: of the y axis. marks: a dot with its values at each
    point. band_N3: (step, low, high) behind the first line. until: end of the x axis. Log axes need values above 0."""
    every = np.concatenate([np.asarray(points, dtype=np.float64).reshape(-1, 2) for points in series.values()])
    low, high = float(every[:, 1].min()), float(every[:, 1].max())
    first = 0.0 if until else float(every[:, 0].min())
    last = max(float(until), float(every[:, 0].max()))
    ticks = _decades(low, high) if log else _nice(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    measure = math.log10 if log else float

    def x(step: float) -> float:
        return _LEFT + (step - first) / ((last - first) or 1.0) * (_WIDE - _LEFT - _RIGHT)

    def y(value: float) -> float:
        share = (measure(min(max(value, low), high)) - measure(low)) / ((measure(high) - measure(low)) or 1.0)
        return _HIGH - _BOTTOM - share * (_HIGH - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {_WIDE} {_HIGH}" role="img" aria-label="{escape(label)} over steps">']
    for tick in ticks:
        words = f"{100 * tick:g} %" if percent else f"{tick:g}"
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDE - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{words}</text>')
    for tick in _nice(first, last):
        if first <= tick <= last:
            parts.append(f'<text x="{x(tick):.1f}" y="{_HIGH - 34}" text-anchor="middle">{tick:,.0f}</text>')
    parts.append(f'<text x="{_WIDE - _RIGHT}" y="{_HIGH - 6}" text-anchor="end">step</text>')
    if band_N3 is not None and len(band_N3) > 1:
        upper = [f"{x(step):.1f},{y(most):.1f}" for step, _, most in band_N3]
        lower = [f"{x(step):.1f},{y(least):.1f}" for step, least, _ in band_N3[::-1]]
        parts.append(f'<polygon class="band" points="{" ".join(upper + lower)}"/>')
    for number, (name, points) in enumerate(series.items()):
        colour = f"c{number % NUM_COLOURS}"
        corners = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
        parts.append(f'<polyline class="{colour}" points="{corners}"/>')
        if marks or len(points) == 1:
            for step, value in points:
                words = f"{100 * value:.2f} %" if percent else f"{value:.5g}"
                parts.append(
                    f'<circle class="{colour}" cx="{x(step):.1f}" cy="{y(value):.1f}" r="3.5">'
                    f"<title>{escape(name)}, step {step:,.0f}: {words}</title></circle>"
                )
    names = legend(list(series)) if len(series) > 1 else ""
    return f'<p class="axis">{escape(label)}</p>{"".join(parts)}</svg>{names}'


def share_bar(shares: Mapping[str, float]) -> str:
    """Draws shares side by side; the legend has their percentages."""
    total, left, parts = sum(shares.values()) or 1.0, 0.0, []
    for number, (name, share) in enumerate(shares.items()):
        wide = share / total * 100
        parts.append(
            f'<rect class="c{number % NUM_COLOURS}" x="{left:.3f}" y="0" width="{wide:.3f}" height="10">'
            f"<title>{escape(name)}: {wide:.1f} %</title></rect>"
        )
        left += wide
    names = [f"{name} {share / total:.1%}".replace("%", " %") for name, share in shares.items()]
    return f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none">{"".join(parts)}</svg>' + legend(names)


def legend(names: Sequence[str]) -> str:
    items = [f'<span><i class="c{n % NUM_COLOURS}"></i>{escape(name)}</span>' for n, name in enumerate(names)]
    return f'<div class="legend">{"".join(items)}</div>'


def _nice(low: float, high: float) -> list[float]:
    """Returns about five round numbers in the shown range."""
    span = (high - low) or abs(high) or 1.0
    raw = span / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * power for unit in (1, 2, 5, 10) if unit * power >= raw * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]


def _decades(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]

"""Line charts as PNG in the page, by matplotlib."""

import base64
import io
from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from partial_fc.accessories import import_matplotlib

Points = Sequence[tuple[float, float]] | NDArray[np.float64]

_GREY = "#808080"  # readable on a light and on a dark page


def line_chart(series: Mapping[str, Points], label: str) -> Markup:
    """Draws lines by name over steps. label: of the y axis."""
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

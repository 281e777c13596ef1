"""loss.png: loss and learning rate, with the evaluations as marks."""

import threading
import time
from pathlib import Path

from partial_fc.comm import World
from partial_fc.files import replacing
from partial_fc.train.record.history import read_history, read_losses, thinned
from partial_fc.train.record.log import warn_on_os_error

_EVERY_S = 30.0
_LOG_FROM = 20.0  # largest loss over smallest, from which on the axis is logarithmic


class LossPicture:
    """models_root/loss.png, drawn by rank 0 in a thread, from loss.csv and history.jsonl.

    A redraw costs 0.1 s of one core, 0.5 s after 600,000 steps, and the first of a process 0.4 s more for matplotlib
    (docs/after-training.md); the training thread goes on meanwhile. The other ranks draw nothing.
    """

    def __init__(self, models_root: Path, world: World):
        self._root = models_root
        self._speaks = world.rank == 0
        self._thread: threading.Thread | None = None
        self._drawn = time.monotonic()

    def redraw(self, at_end: bool = False) -> None:
        """Begins to, every 30 s at most; what is still being drawn is waited for. at_end: in any case."""
        if not at_end and time.monotonic() < self._drawn + _EVERY_S:
            return
        self._drawn = time.monotonic()
        self.close()
        if self._speaks:
            self._thread = threading.Thread(target=draw, args=(self._root,), name="loss.png", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Waits for what is being drawn."""
        if self._thread:
            self._thread.join()
            self._thread = None


def draw(models_root: Path) -> None:
    """Draws what there is; nothing where there is no step yet."""
    # The object interface needs no display, and leaves pyplot's global state alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    point_P5 = thinned(read_losses(models_root))
    if not len(point_P5):
        return
    step_P, loss_P, low_P, high_P, lr_P = point_P5.T
    figure = Figure(figsize=(9, 6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.fill_between(step_P, low_P, high_P, alpha=0.25, linewidth=0)
    above.plot(step_P, loss_P)
    if loss_P.min() > 0 and loss_P.max() > _LOG_FROM * loss_P.min():
        above.set(yscale="log", ylim=(max(low_P.min(), loss_P.min() / 10), None))
    above.set(ylabel="loss", title=models_root.resolve().name)
    below.plot(step_P, lr_P, color="tab:gray")
    below.set(xlabel="step", ylabel="learning rate")
    scores = read_history(models_root).scores()
    if scores:
        right = above.twinx()
        for number, (name, marks) in enumerate(scores.items(), start=1):
            label = f"{name} {100 * marks[-1][1]:.2f} %"
            steps, percent = [step for step, _ in marks], [100 * score for _, score in marks]
            right.plot(steps, percent, "o-", markersize=4, linewidth=0.8, color=f"C{number}", label=label)
        every = [100 * score for marks in scores.values() for _, score in marks]
        room = max(5.0, 0.2 * (max(every) - min(every)))  # a tenth more or less is no mountain
        right.set(ylabel="score, %", ylim=(min(every) - room, max(every) + room))
        figure.legend(loc="outside lower center", ncols=4, fontsize="small")  # inside it would cover marks
    for axes in (above, below):
        axes.grid(color="0.9")
    with warn_on_os_error(f"{models_root / 'loss.png'}"), replacing(models_root / "loss.png") as partial:
        figure.savefig(partial, format="png")

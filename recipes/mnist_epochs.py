"""What recipe `mnist` has of its own in training: the tutorial's lines, and Apex's checkpoint files."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from partial_fc import checkpoint
from partial_fc.checkpoint.consistency import check_replicas
from partial_fc.checkpoint.snapshot import Snapshot
from partial_fc.evaluate import Classification
from partial_fc.foreign import apex
from partial_fc.foreign.state_dicts import check_fits
from partial_fc.optim.backbone import set_lr
from partial_fc.train.backbone import TorchBackbone
from partial_fc.train.precision import LossScaler
from partial_fc.train.record.log import Interval, StepLine
from partial_fc.train.run import Run


@dataclass(frozen=True)
class TutorialLine(StepLine):
    """The tutorial's line, every `frequent` updates of an epoch."""

    update_size: int
    epochs: float

    early: ClassVar[tuple[int, ...]] = ()

    def due(self, step: int, position: int) -> bool:
        return self._update(position)[1] % self.frequent == 0

    def text(self, step: int, position: int, loss: float, lr: float, since: Interval) -> str:
        epoch, update = self._update(position)
        per_epoch = math.ceil(self.num_samples / self.update_size)
        return f"Epoch [{epoch + 1}/{self.epochs:g}], Step [{update}/{per_epoch}], Loss: {loss:.4f}"

    def _update(self, position: int) -> tuple[int, int]:
        """(epoch from 0, update of it from 1) that ended at this position."""
        epoch, place = divmod(position - 1, self.num_samples)
        return epoch, math.ceil((place + 1) / self.update_size)


class TestSet(Classification):
    """The test images, with the tutorial's line."""

    epochs = 0.0

    def lines(self, step, epoch, values, best) -> list[str]:
        share = f"{values['test/accuracy']:.2%}".replace("%", " %")
        counts = f"({self.num_correct:,} of {len(self.source):,})"
        return [f"Epoch [{math.ceil(epoch)}/{self.epochs:g}], Test accuracy: {share} {counts}"]


class ApexSaver(checkpoint.Saver):
    """Writes an Apex file with every checkpoint, where --save-amp asks for it."""

    amp: tuple[Path | None, TorchBackbone]

    def begin(self, snapshot: Snapshot, since: float | None = None) -> None:
        super().begin(snapshot, since)
        path, backbone = self.amp
        if path and snapshot.rank == 0:
            scaler = backbone.scaler
            state = (scaler.scale, scaler.clean_steps) if scaler else (1.0, 0)
            apex.write(path, snapshot.backbone, backbone.optimizer, *state)


def load_amp(run: Run, backbone: TorchBackbone, path: Path, resumed: bool) -> None:
    """Starts from an Apex checkpoint, unless the run goes on from one of its own. A collective."""
    if resumed:
        run.note(f"--load-amp {path} is for a new run; this one goes on from its own checkpoint")
        return
    found = apex.read(path)
    check_fits(found.model, backbone.weights.state_dict(), path, "ConvNet")
    backbone.weights.load_state_dict(found.model)
    set_lr(backbone.optimizer, run.config.schedule.lr)  # with which the file's is compared
    for note in apex.load_optimizer(found, backbone.optimizer):
        run.note(note)
    scaler = backbone.scaler
    if scaler and found.loss_scale != 1:
        clean = found.unskipped if found.unskipped < LossScaler.GROWTH_INTERVAL else 0
        scaler.load_state({"scale": found.loss_scale, "clean_steps": clean})
    elif scaler or found.loss_scale != 1:
        run.note(
            f"{path} has loss scale {found.loss_scale:g}; this run, --precision {backbone.precision.mode}, has "
            f"{f'{scaler.scale:g}' if scaler else 'none'}"
        )
    run.logger.info(f"started from {path}")
    check_replicas(backbone.replicated(), run.world)


def results(test: TestSet, values: dict[str, float], best: dict[str, float]) -> dict[str, object]:
    assert test.confusion_CC is not None
    return {
        "test_accuracy": values["test/accuracy"],
        "best_test_accuracy": best["test"],
        # Of each label: how often it was taken for what.
        "confusion": test.confusion_CC.tolist(),
    }

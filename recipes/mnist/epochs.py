"""The tutorial's log lines and Apex's checkpoint files for recipe `mnist`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from partial_fc.checkpoint.consistency import check_replicas
from partial_fc.checkpoint.snapshot import Snapshot
from partial_fc.data import Source
from partial_fc.data.transform import as_stored
from partial_fc.evaluate.classification import Classification
from partial_fc.foreign.state_dicts import check_fits
from partial_fc.train.backbone import TorchBackbone
from partial_fc.train.job import Hooks, Outcome, RunState
from partial_fc.train.precision import LossScaler
from partial_fc.train.record.log import Interval, StepLine
from partial_fc.train.run import Run

from . import apex


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
        """Returns (epoch from 0, its update from 1) that ended at this position."""
        epoch, place = divmod(position - 1, self.num_samples)
        return epoch, math.ceil((place + 1) / self.update_size)


class TestSet(Classification):
    """The test images, with the tutorial's line."""

    def __init__(self, source: Source, epochs: float):
        super().__init__("test", source, as_stored, top=5)
        self._epochs, self._best = epochs, 0.0

    def lines(self, step: int, epoch: float, values: Mapping[str, float], best: Mapping[str, float]) -> list[str]:
        self._best = best["test"]
        share = f"{values['test/accuracy']:.2%}".replace("%", " %")
        counts = f"({self.num_correct:,} of {len(self.source):,})"
        return [f"Epoch [{math.ceil(epoch)}/{self._epochs:g}], Test accuracy: {share} {counts}"]

    def results(self, outcome: Outcome) -> dict[str, object]:
        """Returns additions to result.json."""
        assert self.confusion_CC is not None
        return {
            "test_accuracy": outcome.evaluations["test/accuracy"],
            "best_test_accuracy": self._best,
            # Of each label: counts by prediction.
            "confusion": self.confusion_CC.tolist(),
        }


class ApexFile(Hooks):
    """Writes an Apex file with every checkpoint."""

    def __init__(self, path: Path, backbone: TorchBackbone):
        self._path, self._backbone = path, backbone

    def after_checkpoint(self, snapshot: Snapshot) -> None:
        if snapshot.rank == 0:
            scaler = self._backbone.scaler
            state = (scaler.scale, scaler.clean_steps) if scaler else (1.0, 0)
            apex.write(self._path, snapshot.backbone, self._backbone.optimizer, *state)


def load_amp(run: Run, backbone: TorchBackbone, path: Path, start: RunState) -> None:
    """Starts from an Apex checkpoint, unless the run resumes its own. A collective."""
    if start.step:
        run.note(f"--load-amp {path} is for a new run; this one resumes from its own checkpoint")
        return
    found = apex.read(path)
    check_fits(found.model, backbone.weights.state_dict(), path, "ConvNet")
    backbone.weights.load_state_dict(found.model)
    apex.load_optimizer(found, backbone.optimizer)
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

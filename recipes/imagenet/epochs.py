"""End of an epoch in recipe imagenet: tests and Caffe2's CSV row."""

import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partial_fc.accessories import spare
from partial_fc.comm import World, all_gather_json
from partial_fc.data import Source
from partial_fc.data.order import Order
from partial_fc.data.transform import ShortSideCrop
from partial_fc.evaluate.classification import Classification, Predictions
from partial_fc.evaluate.evaluation import Diverged, Evaluation, Forward
from partial_fc.head import PartialFC
from partial_fc.machine import gpu_load
from partial_fc.train.job import Head, Hooks, RunState
from partial_fc.train.run import Run

from .caffe2_log import Caffe2Log, first_start

_EXPLODED = 40.0  # the loss at which Caffe2's trainers stop


class PartialFCTest(Classification):
    """A test that predicts the nearest class centre over all ranks, by `PartialFC.topk`. There are no logits: `loss` is
    NaN."""

    def __init__(self, *arguments: Any, head: PartialFC, **more: Any):
        super().__init__(*arguments, **more)
        self._head = head

    def run(self, forward: Forward, world: World) -> Iterator[tuple[str, float]]:
        yield from super().run(forward, world)
        self.loss = math.nan

    def _batches(self, world: World, counts: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields this rank's batches, then calls `topk` without features until it was called as often as elsewhere."""
        head, missing = self._head, math.ceil(math.ceil(self.num_items / self.batch_size) / world.size)
        for batch in super()._batches(world, counts):
            missing -= 1
            yield batch
        for _ in range(missing):
            head.topk(torch.empty(0, head.embedding_size, device=head.store.device), self.top)

    def _predict(self, forward: Forward, input_B: Tensor, label_B: Tensor) -> Predictions:
        cosine_BK, class_BK = self._head.topk(forward(input_B).float(), self.top)
        cosine_BK, class_BK = cosine_BK.double().cpu(), class_BK.cpu()
        no_loss_B = torch.zeros_like(cosine_BK[:, 0])
        return Predictions(cosine_BK.isfinite().all(dim=1), class_BK[:, 0], class_BK, no_loss_B)


def epoch_test(config: Any, source: Source, head: Any) -> Classification:
    """Returns the test of these flags."""
    data = config.data
    middle = ShortSideCrop(data.resize, data.image_size, random=False)
    batch_size = min(config.optim.batch_size, 64)
    if config.model.head == "partial-fc":
        return PartialFCTest("test", source, middle, batch_size, limit=data.test_epoch_size, head=head)
    return Classification("test", source, middle, batch_size, limit=data.test_epoch_size)


class LastUpdate(Evaluation):
    """Loss and accuracy of the epoch's last update; ends a diverged run."""

    def __init__(self, head: Head, batch_size: int, device: torch.device):
        self._head, self._batch_size, self._device = head, batch_size, device
        self.row: dict[str, float] = {}  # as Caffe2: of this process alone; empty without an update

    def run(self, forward: Forward, world: World) -> Iterator[tuple[str, float]]:
        """Yields the values. Raises Diverged, on all ranks, for a loss of 40 or more."""
        self.row, seen = {}, self._head.last_step
        if not seen:
            return
        loss_B = self._head.row_losses(seen, self._batch_size).double()
        correct_B = seen.get("correct_B", torch.full_like(loss_B, -1)).double()
        sums = torch.stack((loss_B.sum(), correct_B.sum(), torch.ones_like(loss_B).sum())).cpu()
        loss_sum, num_correct, num_images = world.all_reduce(sums, name="epoch/last_update").tolist()
        loss = loss_sum / num_images
        if not loss < _EXPLODED:
            raise Diverged(
                f"the epoch's last loss is {loss:.2f}, {_EXPLODED:g} or more: the gradients have exploded. Go on "
                "from an earlier checkpoint with a lower --base_learning_rate, or start with --warmup-epochs"
            )
        self.row = {"accuracy": float(correct_B.mean()), "loss": float(loss_B.mean())}
        if "correct_B" in seen:
            yield "train/accuracy", num_correct / num_images

    def lines(self, step: int, epoch: float, values: Mapping[str, float], best: Mapping[str, float]) -> list[str]:
        line, row, load = f"Finished epoch {epoch:g}", self.row, spare("the GPU's load", gpu_load, self._device)
        if row:
            line += f"; Training loss: {row['loss']:.4f}, accuracy: {row['accuracy']:.4f}"
        return [line, load] if load else [line]


class Caffe2Rows(Hooks):
    """At the end of an epoch, a row of Caffe2's log in the working directory, by one rank per host."""

    def __init__(self, run: Run, order: Order, last: LastUpdate, arguments: object):
        self._run, self._order, self._last, self._arguments = run, order, last, arguments
        self._log: Caffe2Log | None = None
        self._num_done = 0  # complete epochs with a row

    def begin(self, state: RunState) -> None:
        """Restores the position of the log. A collective."""
        run, config = self._run, self._run.config
        self._num_done = state.position // self._order.num_samples
        # By rank 0's clock and file: all hosts' log names agree.
        started = first_start(run.root / "started.txt", state.step > 0).isoformat() if run.world.rank == 0 else ""
        now = datetime.fromisoformat(all_gather_json(started, run.world, "run/first_start")[0])
        if run.world.local_rank == 0:
            network, groups = config.model.network, config.model.resnext_num_groups
            self._log = Caffe2Log(
                Path.cwd(),
                self._arguments,
                run.world.local_size,
                config.optim.batch_size * run.world.local_size,
                config.data.num_labels,
                config.schedule.lr,
                now,
                model=network if groups == 1 else network.replace("resnet", "resnext"),
                epoch=self._num_done,
                shard=run.world.rank // run.world.local_size,
            )
            run.logger.info(f"one row an epoch: {self._log.path}")

    def after_epoch(self, state: RunState, values: Mapping[str, float]) -> None:
        epoch = state.position // self._order.num_samples
        if self._log and self._last.row and epoch > self._num_done:
            self._num_done = epoch
            row = {**self._last.row, "learning_rate": state.lr, "test_accuracy": values.get("test/accuracy", -1)}
            updates = self._order.num_samples // self._run.global_batch
            spare(str(self._log.path), lambda log: log.add(epoch - 1, updates, **row), self._log)

"""A recipe whose training is arithmetic on whole numbers, with all of the product's code around it."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partial_fc import checkpoint, flags
from partial_fc.data.order import Keyed, Selection
from partial_fc.data.sample import Sample
from partial_fc.flags import ExchangeFlags, Flags, GuardFlags, LaunchFlags, OptimFlags, RunFlags, ScheduleFlags
from partial_fc.head import PartialFC
from partial_fc.head.rows.class_rows import Column
from partial_fc.head.shard import Shard
from partial_fc.models.inputs import Unchanged
from partial_fc.optim.gradient_sync import StepBytes
from partial_fc.train.record.log import StepLine
from partial_fc.train.run import Run
from partial_fc.train.seams import RunState
from tests.simulation.cluster import Cluster
from tests.simulation.disk import Path
from tests.simulation.oracle import START, mix

NUM_SAMPLES, NUM_CLASSES = 97, 7
ROOT = Path("/shared/run")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The shared flags."""

    optim: Flags[OptimFlags] = OptimFlags(batch_size=2)
    schedule: Flags[ScheduleFlags] = ScheduleFlags(lr_scheduler="constant")
    run: Flags[RunFlags] = RunFlags(models_root=ROOT)
    guards: Flags[GuardFlags] = GuardFlags(desync_every=9)
    exchange: Flags[ExchangeFlags] = ExchangeFlags()
    launch: Flags[LaunchFlags] = LaunchFlags(start_timeout=20.0)


def config_of(max_steps: int | None, epochs: float, commit_every: int, checkpoint_every: int) -> Config:
    run = RunFlags(models_root=ROOT, commit_every=commit_every, checkpoint_every=checkpoint_every, keep_checkpoints=2,
                   save_best=False, verbose=0)  # fmt: skip
    schedule = ScheduleFlags(lr_scheduler="constant", max_steps=max_steps, epochs=epochs)
    return dataclasses.replace(Config(), run=run, schedule=schedule)


class Numbers:
    """A source: sample i is i."""

    num_classes = NUM_CLASSES

    def __len__(self) -> int:
        return NUM_SAMPLES

    def read(self, index: int) -> Sample:
        return Sample(np.zeros((1, 1, 3), np.uint8), index % NUM_CLASSES, index)

    def where(self, index: int) -> str:
        return f"sample {index}"

    def will_need(self, indices: Sequence[int]) -> None:
        pass

    def class_names(self) -> None:
        return None

    def labels(self) -> None:
        return None


class InOrder(Keyed):
    """Position p is sample p of each epoch."""

    def select(self, start: int, batch_size: int, rank: int, world_size: int) -> Selection:
        position_B = torch.arange(batch_size) + (start + rank * batch_size)
        return Selection(position_B, position_B % self.num_samples, start + batch_size * world_size, False)


class Backbone:
    """What is equal on all ranks: the number; and what each has for its own."""

    device, scaler, may_overflow, note = torch.device("cpu"), None, False, ""
    contract = {"network": "number"}  # noqa: RUF012
    to_input = Unchanged("whole numbers")
    mode = "whole numbers"

    def __init__(self, world: Any):
        self.world, self.number, self.own = world, START, None

    def not_delivered(self) -> dict[str, dict[str, Tensor]]:
        return {}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        joined = self.world.all_reduce(torch.tensor([self.number]), "max", name="sim/statistics")
        own = {"buffer/own": torch.tensor([mix(self.number, self.world.rank)])}
        return {"number": joined}, {"momentum": torch.tensor([mix(self.number, 7)])}, own

    def replicated(self) -> dict[str, Tensor]:
        return {"number": torch.tensor([self.number])}

    def load(self, found: Any) -> list[str]:
        self.number = int(found.backbone()["number"])
        momentum = int(found.optimizer()["momentum"])
        assert momentum == mix(self.number, 7), "the optimizer's state is of another step"
        own = found.buffers(self.world)
        self.own = int(own["own"]) if own else None
        return []

    def train(self) -> None:
        pass

    def freeze(self, frozen: bool) -> None:
        assert not frozen

    def step_bytes(self) -> StepBytes:
        return StepBytes(0, 0)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        yield None


class Rows:
    """A row for each class that has been met: class c after step c % 4."""

    def __init__(self, shard: Shard):
        self.start, self.stop = shard.start, shard.stop
        self.row_L = torch.zeros(len(shard), 1, dtype=torch.int64)
        self.there_L = torch.zeros(len(shard), dtype=torch.bool)

    @property
    def columns(self) -> dict[str, Column]:
        return {"centres": Column((1,), torch.int64)}

    def created(self, start: int, stop: int) -> Tensor:
        return self.there_L[start - self.start : stop - self.start].clone()

    def read(self, classes: Tensor | range) -> dict[str, Tensor]:
        if isinstance(classes, range):
            return {"centres": self.row_L[classes.start - self.start : classes.stop - self.start]}
        return {"centres": self.row_L[classes - self.start]}

    def write(self, start: int, stop: int, class_M: Tensor, rows: dict[str, Tensor]) -> None:
        self.there_L[start - self.start : stop - self.start] = False
        self.row_L[class_M - self.start] = rows["centres"]
        self.there_L[class_M - self.start] = True

    def begin_copy(self) -> None:
        """They are copied at once."""

    def move(self, number: int, step: int) -> None:
        for i, c in enumerate(range(self.start, self.stop)):
            if step > c % 4:
                self.row_L[i], self.there_L[i] = mix(number, c), True

    def by_class(self) -> dict[int, int]:
        return {self.start + i: int(self.row_L[i]) for i in range(len(self.row_L)) if self.there_L[i]}


class Head(PartialFC):
    """The rows, and how many steps moved them."""

    rows: Rows = None  # type: ignore[assignment]
    centres = property(lambda self: self.rows.row_L)

    def __init__(self, world: Any):
        self.world, self.num_classes, self.embedding_size, self.sub_centres = world, NUM_CLASSES, 1, 1
        self.shard = Shard.of(NUM_CLASSES, world.rank, world.size)
        self.rows = Rows(self.shard)
        self.hard_negatives, self.margin_state, self.optimizer, self.num_steps = None, {}, "adding", 0
        self.name, self.last_step = "", {}

    def facts(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps, "row_seed": 1, "margin": {}, "schedule": {}}

    def load_facts(self, facts: dict[str, Any]) -> None:
        self.num_steps = facts["num_steps"]

    def discard(self) -> None:
        pass


class Recipe:
    """train_here, and the arithmetic of a step."""

    def __init__(self, cluster: Cluster, step_s: float):
        self._cluster, self._step_s = cluster, step_s

    def train_here(self, run: Run) -> int:
        oracle = self._cluster.oracle
        source = run.open_data(Numbers)  # type: ignore[type-var]
        backbone, head = Backbone(run.world), Head(run.world)

        def resumed(start: RunState) -> None:
            oracle.resumed(
                run.world.rank, start.step, start.position, backbone.number, head.rows.by_class(), backbone.own
            )
            assert head.num_steps == start.step
            assert len(head.rows.by_class()) == sum(start.step > c % 4 for c in range(head.rows.start, head.rows.stop))

        def line(frequent: int, total_steps: int, num_samples: int) -> StepLine:
            oracle.agree("the number of steps", -2, total_steps)
            return StepLine(1000, total_steps, num_samples)

        loader = run.loader(source, _transform, InOrder(NUM_SAMPLES, 0), num_workers=0)
        status = run.train(backbone, head, loader, start_from=resumed, line=line)  # type: ignore[arg-type]
        if status:
            oracle.stopped(head.num_steps)
        else:
            oracle.finished = backbone.number
        return status

    def update(self, job: Any, batches: Sequence[Any], lr: float, watch: object) -> float:
        """In place of the update of backbone and head."""
        world, clock, oracle = job.world, self._cluster.clock, self._cluster.oracle
        step, begin = job.at.step + 1, job.at.position
        oracle.begins(step)
        clock.sleep(self._step_s * clock.random.uniform(0.5, 1.0))
        keys = [key for batch in batches for key in batch.key_B.tolist()]
        total = world.all_reduce(torch.tensor([sum(mix(key) for key in keys) % (1 << 40)]), name="sim/images").item()
        clock.sleep(self._step_s * clock.random.uniform(0.0, 0.5))
        before = job.backbone.number
        job.backbone.number = mix(before, step, total)
        job.head.rows.move(job.backbone.number, step)
        job.head.num_steps = step
        loss = job.backbone.number % 1_000_003 / 1000.0
        oracle.step(step, begin, batches[-1].position, keys, before, job.backbone.number, loss)
        return loss


def _transform(sample: Sample, rng: object, out: Any = None) -> Any:
    if out is None:
        return sample.image
    out[...] = sample.image
    return out


def write_results(run: Any, job: Any, outcome: Any, models: dict[str, dict[str, Tensor]], more: object) -> None:
    checkpoint.write_json(
        {"state": int(models["model"]["number"]), "configuration": flags.flat(run.config)}, run.root / "result.json"
    )

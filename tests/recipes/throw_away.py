"""A recipe of its own in fifty lines, of the shared parts alone: class folders, ResNet-18, cross-entropy.

python -m tests.recipes.throw_away --folder DIR --models-root DIR --max-steps 8
"""

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from partial_fc import checkpoint, models
from partial_fc.data import ImageFolder
from partial_fc.data.transform import SquareImage
from partial_fc.evaluate import Classification
from partial_fc.flags import ExchangeFlags, Flags, GuardFlags, LaunchFlags, OptimFlags, RunFlags, ScheduleFlags
from partial_fc.head import CrossEntropy
from partial_fc.models.inputs import FACE
from partial_fc.train.begin.start import launch
from partial_fc.train.loop import train
from partial_fc.train.record.log import StepLine
from partial_fc.train.run import Run, run_in_worlds
from partial_fc.verbs.train import exit_now


@dataclass(frozen=True, kw_only=True)
class Config:
    """Trains ResNet-18 on a folder of class folders."""

    folder: Path
    run: Flags[RunFlags] = RunFlags(models_root=Path("runs/throw-away"))
    optim: Flags[OptimFlags] = OptimFlags(batch_size=8, precision="fp32", weight_decay=0.0)
    schedule: Flags[ScheduleFlags] = ScheduleFlags(lr=0.01, lr_scaling="none")
    guards: Flags[GuardFlags] = GuardFlags()
    exchange: Flags[ExchangeFlags] = ExchangeFlags()
    launch: Flags[LaunchFlags] = LaunchFlags()


def train_here(run: Run) -> int:
    config = run.config
    source = run.open_data(lambda: ImageFolder(config.folder))
    test = Classification("train", source, SquareImage(16), batch_size=16)
    with ExitStack() as parts:
        torch.manual_seed(config.run.seed)
        backbone = run.backbone(models.build("r18", source.num_classes, 16), FACE, {"network": "r18"})
        head = CrossEntropy(source.num_classes, run.world)
        saver = parts.enter_context(run.saver(checkpoint.Saver))
        start = run.resume(backbone, head, source)
        loader = parts.enter_context(run.loader(source, SquareImage(16), start))
        schedule = run.schedule(start, loader.order)
        if run.is_finished(start, schedule):
            return 0
        line = StepLine(config.run.frequent, schedule.total_steps, len(source))
        job = run.job(loader, backbone, head, schedule, [test], saver, start, line)
        return run.finish(job, train(job), {})


def main(arguments: list[str]) -> int:
    config = tyro.cli(Config, args=arguments)
    status = launch(config)
    return run_in_worlds("throw-away", config, [], train_here) if status is None else status


if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))

"""A recipe of its own, of the shared parts alone: class folders, ResNet-18, cross-entropy.

python -m tests.recipes.throw_away --folder DIR --models-root DIR --max-steps 8
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from partial_fc import models
from partial_fc.recipe import (
    FACE,
    Classification,
    CrossEntropy,
    Flags,
    ImageFolder,
    OptimFlags,
    Run,
    RunFlags,
    ScheduleFlags,
    SharedFlags,
    SquareImage,
    parse,
    start,
)
from partial_fc.verbs.train import exit_now


@dataclass(frozen=True, kw_only=True)
class Config(SharedFlags):
    """Trains ResNet-18 on a folder of class folders."""

    folder: Path
    run: Flags[RunFlags] = RunFlags(models_root=Path("runs/throw-away"))
    optim: Flags[OptimFlags] = OptimFlags(batch_size=8, precision="fp32", weight_decay=0.0)
    schedule: Flags[ScheduleFlags] = ScheduleFlags(lr=0.01, lr_scaling="none")


def train_here(run: Run) -> int:
    config = run.config
    source = run.open_data(lambda: ImageFolder(config.folder))
    loader = run.loader(source, SquareImage(16))
    test = Classification("train", source, SquareImage(16), batch_size=16)
    torch.manual_seed(config.run.seed)
    backbone = run.backbone(models.build("r18", source.num_classes, 16), FACE, {"network": "r18"})
    return run.train(backbone, CrossEntropy(source.num_classes, run.world), loader, [test])


def main(arguments: list[str]) -> int:
    return start("throw-away", train_here, parse(Config, arguments, "throw_away.py"))


if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))

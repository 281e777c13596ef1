"""A small training that is killed and stopped."""

import shlex
from pathlib import Path

from partial_fc.verbs import train as train_command

# 20,000 classes: a checkpoint is some megabytes in each rank's file, so that there is time to be killed in the middle.
JOB = shlex.split(
    "--dataset synthetic --num-classes 20000 --num-images 256 --image-size 24 --batch-size 4 --backbone tiny "
    "--embedding-size 32 --scale 16 --optimizer adamw --weight-decay 0.05 --lr 0.003 --lr-scaling none "
    "--sample-rate 0.1 --warmup-epochs 0 --warmup-steps 2 --num-workers 1 --precision fp32 --frequent 10 --verbose 0 "
    "--keep-checkpoints 2 --comm-timeout 60 --start-timeout 15"
)


def flags(models_root: Path, num_steps: int, every: int) -> list[str]:
    """Of the job: how long it is, steps from one checkpoint to the next."""
    words = f"--max-steps {num_steps} --checkpoint-every {every}"
    return [*JOB, "--models-root", str(models_root), *words.split()]


def train(flags: list[str]) -> None:
    train_command.exit_now(train_command.main(["face", *flags], "train.py"))

"""A small training that is killed and stopped."""

import shlex
from pathlib import Path

from partial_fc.verbs import train as train_command
from partial_fc.verbs.checkpoint.verify import findings

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


def complete(models_root: Path) -> list[Path]:
    """The checkpoints that count, oldest first."""
    return sorted(marker.parent for marker in (models_root / "checkpoints").glob("step-*/COMPLETE"))


def check_whole(models_root: Path) -> None:
    for folder in complete(models_root):
        bad = [text for kind, text in findings([folder]) if kind == "bad"]
        assert not bad, f"{folder} counts, but: {bad}"

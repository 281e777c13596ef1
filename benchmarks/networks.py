"""Throughput of whole training, one process: this program, with --compile, and a plain PyTorch loop.

    python -m benchmarks.networks --networks mini vit_t timm:vit_tiny_patch16_224 r18 --rounds 3

All sides train the same network from the same JPEGs of a .rec file (--data device: from images that are there already),
with the same classes, CosFace, optimizer, precision and threads, on a GPU where there is one. The plain loop is what
one writes without this program: a DataLoader whose workers decode with OpenCV, autocast, channels-last convolutions, a
head of all class centres in fp32, one fused optimizer; no checks, no log.
Sides take turns, as a machine's speed drifts; the table has the median round and the smallest and largest ratio.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import cv2
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from partial_fc import models
from partial_fc.comm.device import device_type
from partial_fc.data import RecordSource
from partial_fc.data.recordio import RecordWriter, pack
from partial_fc.machine import has_bf16
from partial_fc.models import encoders

ROOT = Path(__file__).parents[1]
WARM_UP = 10  # steps that count for nothing
EMBEDDING_SIZE, SCALE, MARGIN, LR, WEIGHT_DECAY = 128, 32.0, 0.3, 5e-4, 0.05
SIDES = {"partial-fc": (), "compiled": ("--compile",), "plain PyTorch": None}
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


@dataclass(frozen=True)
class Options:
    """Trains networks for some steps on each side in turn; prints a table."""

    networks: tuple[str, ...] = ("mini", "vit_t", "timm:vit_tiny_patch16_224", "r18")
    """Values of --network."""
    sides: tuple[str, ...] = tuple(SIDES)
    """Of partial-fc, compiled (--compile) and "plain PyTorch"."""
    image_size: int = 64
    """Pixels of a side; mini's are the demo's 40."""
    batch_size: int = 64
    """Images of a step."""
    classes: int = 4000
    """Classes, of two images each."""
    steps: int = 40
    """Steps of each run; all but the first 10 are timed."""
    rounds: int = 3
    """Runs of each side."""
    threads: int = len(os.sched_getaffinity(0))
    """OMP_NUM_THREADS of all sides."""
    workers: int = 1
    """Threads or processes of each side that decode images."""
    data: Literal["rec", "device"] = "rec"
    """device: images that no side decodes."""
    plain: str = ""
    """(Of this script itself: the network of the plain loop.)"""
    images: str = ""
    """(Likewise: the folder of the images.)"""

    def __post_init__(self) -> None:
        if self.steps < 2 * WARM_UP or self.rounds < 1 or self.classes * 2 < self.batch_size:
            raise ValueError(f"--steps {self.steps} --rounds {self.rounds}: expected at least {2 * WARM_UP} and 1")


def main() -> None:
    options = tyro.cli(Options)
    if options.plain:
        print(json.dumps(plain(options, Path(options.images))))
        return
    found: dict[tuple[str, str], list[float]] = {}
    for network in options.networks:
        size = 40 if network == "mini" else options.image_size
        with tempfile.TemporaryDirectory(prefix="networks-") as folder:
            draw(Path(folder, "images"), options.classes, size)
            for number in range(options.rounds):
                for side in options.sides:
                    rate = _rate(options, network, side, size, Path(folder))
                    found.setdefault((network, side), []).append(rate)
                    print(f"[{time.strftime('%H:%M:%S')}] {network} {number + 1}/{options.rounds} {side}: {rate:.1f}/s",
                          file=sys.stderr, flush=True)  # fmt: skip
    with open("/proc/cpuinfo") as info:
        has = next((line.split() for line in info if line.startswith("flags")), [])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(
        f"{device}; {options.threads} threads, {options.workers} workers; "
        f"{', '.join(name for name in INSTRUCTIONS if name in has)}; torch {torch.__version__}; "
        f"batch {options.batch_size}, {options.rounds} rounds\n"
    )
    print("| network | pixels | side | images/s | times partial-fc | smallest | largest |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for (network, side), rates in found.items():
        size = 40 if network == "mini" else options.image_size
        ratios = [rate / ours for rate, ours in zip(rates, found[network, options.sides[0]], strict=True)]
        print(f"| {network} | {size} | {side} | {median(rates):.1f} | {median(ratios):.2f} | {min(ratios):.2f} | "
              f"{max(ratios):.2f} |")  # fmt: skip


def draw(folder: Path, num_classes: int, size: int) -> None:
    """Writes a set of two JPEGs of each class."""
    random = np.random.default_rng(0)
    folder.mkdir()
    (folder / "property").write_text(f"{num_classes},{size},{size}\n")
    with RecordWriter(folder / "train.rec") as records:
        for key in range(2 * num_classes):
            coarse = random.integers(0, 256, (8, 8, 3), np.uint8)
            jpeg = cv2.imencode(".jpg", cv2.resize(coarse, (size, size)))[1].tobytes()
            records.write(key, pack(key // 2, jpeg, key))


def _rate(options: Options, network: str, side: str, size: int, folder: Path) -> float:
    """Returns the images a second of one run. Raises ValueError with the end of what it printed, if it fails."""
    images, more = folder / "images", SIDES[side]
    root = Path(tempfile.mkdtemp(dir=folder))
    shared = ["--image-size", str(size), "--batch-size", str(options.batch_size)]
    if more is None:
        command = ["-m", "benchmarks.networks", "--plain", network, "--images", str(images), *shared]
        command += ["--classes", str(options.classes), "--steps", str(options.steps)]
        command += ["--workers", str(options.workers), "--data", options.data]
    else:
        data = ["--rec", str(images)] if options.data == "rec" else ["--dataset", "synthetic", "--num-classes"]
        data += [str(options.classes)] * (options.data == "device")
        said = (
            f"--models-root {root} --network {network} --embedding-size {EMBEDDING_SIZE} --loss combined "
            f"--scale {SCALE} --margins 1 0 {MARGIN} --optimizer adamw --lr {LR} --lr-scaling none "
            f"--weight-decay {WEIGHT_DECAY} "
            f"--lr-scheduler constant --max-steps {options.steps} --frequent {WARM_UP} --verbose 0 --check-data off "
            f"--checkpoint-every 0 --resume never --num-workers {options.workers}"
        )
        command = ["train.py", "face", *data, *shared, *said.split(), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, text=True, capture_output=True)
    if done.returncode or "is not compiled" in done.stdout:
        raise ValueError(f"{' '.join(command)}: exit status {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    if more is None:
        return json.loads(done.stdout.splitlines()[-1])
    return json.loads((root / "result.json").read_text())["images_per_s"]


# ---- the plain loop


class Images(Dataset):
    """The decoded images of a set, mirrored at random."""

    def __init__(self, folder: Path):
        self.source = RecordSource(folder)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        sample = self.source.read(index)
        image: Any = cv2.imdecode(np.frombuffer(sample.data, np.uint8), cv2.IMREAD_COLOR_RGB)
        image = np.ascontiguousarray(image[:, ::-1]) if np.random.rand() < 0.5 else image
        return torch.from_numpy(image), sample.label


def plain(options: Options, folder: Path) -> float:
    """Trains with a plain loop; returns images a second."""
    torch.manual_seed(0)
    device = torch.device(device_type("auto"))
    module = models.build(options.plain, EMBEDDING_SIZE, options.image_size)
    to_input = encoders.input_of(module)
    module.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    centre_CD = torch.nn.Parameter(torch.randn(options.classes, EMBEDDING_SIZE, device=device) * 0.01)
    parameters = [*module.parameters(), centre_CD]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    loader: Any = DataLoader(
        Images(folder),
        options.batch_size,
        shuffle=True,
        num_workers=options.workers,
        drop_last=True,
        pin_memory=device.type == "cuda",
        persistent_workers=True,
    )
    if options.data == "device":
        loader = [[t.to(device) for t in next(iter(loader))]]
    step, began = 0, 0.0
    while step < options.steps:
        for pixel_BHWC, label_B in loader:
            image_B = to_input(pixel_BHWC.to(device, non_blocking=True).movedim(-1, 1))
            label_B = label_B.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=has_bf16(device)):
                feat_BD = module(image_B)
                cosine_BC = F.linear(F.normalize(feat_BD), F.normalize(centre_CD))
            logit_BC = SCALE * (cosine_BC.float() - MARGIN * F.one_hot(label_B, options.classes))
            loss = F.cross_entropy(logit_BC, label_B)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
            step += 1
            if step == WARM_UP:
                began = time.perf_counter()
            if step == options.steps:
                break
    return (options.steps - WARM_UP) * options.batch_size / (time.perf_counter() - began)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"networks: {error}")

"""`make bench-gpu`, second part: a whole step of the last layer, update included, beside what others offer.

    python -m benchmarks.gpu_versus --classes 1000000 --batch 1024 --dims 512 1024

Ours is PartialFC with a margin and normalised centres. The others are F.linear with F.cross_entropy, torch's
F.linear_cross_entropy (with the logits as a whole, and in chunks), QuACK's chunked_linear_cross_entropy and Liger's
fused one, where they are installed, each with torch.optim.SGD: without margin, on centres as they are, so they have
less to do. All start from the same centres and features, and run in turn in one process, step by step, since a device's
clock drifts; medians over the rounds. Work is counted as 6 * G * C * D. A test runs it on the CPU.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional

from partial_fc.head import Compute, CosFace, PartialFC, RowSGD, Storage

MOMENTUM, WEIGHT_DECAY, SCALE, LR = 0.9, 5e-4, 64.0, 0.01
MATMUL_SIZE = {"cuda": 8192, "cpu": 512}
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # (features, centres, labels) -> mean loss


@dataclass(frozen=True)
class VersusOptions:
    """Measures a step of the last layer beside others, and prints a table and one JSON line for each side."""

    classes: int = 1_000_000
    """Classes: all take part."""
    batch: int = 1024
    """Batch."""
    dims: tuple[int, ...] = (512, 1024)
    """Widths of a feature, one after the other."""
    rounds: int = 10
    """Timed rounds, after two that are not."""
    device: str = "cuda"
    """cuda; cpu is for trying out the program."""


@dataclass
class Side:
    """One way to train the last layer. step: forward, backward and update; returns the loss."""

    name: str
    operands: str  # dtypes: of the products' operands,
    storage: str  # of centres and momentum between steps,
    sums: str  # of logits and of the centres' gradient
    step: Callable[[], Tensor] | None
    problem: str = ""  # why it cannot be measured


def versus(options: VersusOptions) -> list[dict[str, Any]]:
    """The lines that were printed. ValueError where there is no such device."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"torch {torch.__version__} finds no CUDA device; this benchmark needs one (PyTorch for CUDA, a driver)"
        )
    lines = []
    for dim in options.dims:
        sides = _sides(options, dim)
        seconds = _measure(sides, options)
        lines += [_line(side, seconds, dim, options) for side in sides]
        print(_table(lines[-len(sides) :]), flush=True)
    for line in lines:
        print(json.dumps(line))
    return lines


def _sides(options: VersusOptions, dim: int) -> list[Side]:
    """Bfloat16 operands and centres for all on a GPU; on a CPU float32, which every side has."""
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    name = _NAMES[dtype]
    generator = torch.Generator(options.device).manual_seed(0)
    feat_GD = torch.randn(options.batch, dim, generator=generator, device=options.device).to(dtype)
    label_G = torch.randint(0, options.classes, (options.batch,), generator=generator, device=options.device)
    head = PartialFC(
        options.classes,
        dim,
        CosFace(SCALE),
        optimizer=RowSGD(MOMENTUM, WEIGHT_DECAY),
        device=Compute(options.device, precision="bf16" if dtype == torch.bfloat16 else "fp32"),
        storage=Storage(dtype),
    )
    start_CD = head.centres.clone()

    def ours() -> Tensor:
        loss = head(feat_GD.detach().requires_grad_(), label_G)
        loss.backward()
        head.step(LR)
        return loss.detach()

    def other(side: str, loss_of: Callable[[], Loss], sums: str) -> Side:
        """A loss of somebody else with SGD."""
        try:
            step = _with_sgd(loss_of(), start_CD.clone(), feat_GD, label_G)
        except ImportError as error:
            return Side(side, name, name, sums, None, f"not measured: {error}")
        return Side(side, name, name, sums, step)

    return [
        Side(f"PartialFC ({head.kernel.name})", name, name, "fp32", ours),
        other("F.linear, F.cross_entropy", lambda: _dense, name),
        other("F.linear_cross_entropy, whole", lambda: _of_torch(chunked=False), name),
        other("F.linear_cross_entropy, chunks", lambda: _of_torch(chunked=True), name),
        other("QuACK chunked_linear_cross_entropy", _of_quack, f"{name} logits"),
        other("Liger fused linear cross entropy", _of_liger, name),
    ]


def _with_sgd(loss: Loss, centre_CD: Tensor, feat_GD: Tensor, label_G: Tensor) -> Callable[[], Tensor]:
    parameter = nn.Parameter(centre_CD)
    # Not of bf16 on a CPU: torch 2.13 makes wrong centres so.
    optimizer = torch.optim.SGD(
        [parameter], lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, fused=centre_CD.is_cuda
    )

    def step() -> Tensor:
        leaf_GD = feat_GD.detach().requires_grad_()
        found = loss(functional.normalize(leaf_GD) * SCALE, parameter, label_G)
        found.backward()
        optimizer.step()
        parameter.grad = None
        return found.detach()

    return step


def _dense(x: Tensor, weight: Tensor, label: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(x, weight), label)


def _of_torch(chunked: bool) -> Loss:
    if not hasattr(functional, "linear_cross_entropy"):
        raise ImportError(f"torch {torch.__version__} has no F.linear_cross_entropy; it came with 2.13")
    options = nn.LinearCrossEntropyOptions() if chunked else None
    return lambda x, weight, label: functional.linear_cross_entropy(x, weight, label, options=options)


def _of_quack() -> Loss:
    function = _installed("quack.linear_cross_entropy", "quack-kernels").chunked_linear_cross_entropy
    return lambda x, weight, label: function(x, weight, label)


def _of_liger() -> Loss:
    module = _installed("liger_kernel.transformers", "liger-kernel").LigerFusedLinearCrossEntropyLoss()
    return lambda x, weight, label: module(weight, x, label)


def _installed(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{error} (`pip install {package}`)") from error


def _measure(sides: list[Side], options: VersusOptions) -> dict[str, list[float]]:
    """Seconds of the rounds by side, and of a matrix product."""
    size = MATMUL_SIZE[options.device]
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=options.device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    seconds: dict[str, list[float]] = {"matmul": [], **{side.name: [] for side in sides}}
    for turn in range(options.rounds + 2):
        elapsed = {"matmul": _seconds(lambda: torch.mm(a, b, out=out), options.device)}
        for side in sides:
            if side.step is None:
                continue
            try:
                elapsed[side.name] = _seconds(side.step, options.device)
            except torch.OutOfMemoryError as error:
                side.step, side.problem = None, f"not measured: {str(error).splitlines()[0]}"
        if turn >= 2:
            for name, value in elapsed.items():
                seconds[name].append(value)
    return seconds


def _line(side: Side, seconds: dict[str, list[float]], dim: int, options: VersusOptions) -> dict[str, Any]:
    line: dict[str, Any] = {
        "side": side.name,
        "classes": options.classes,
        "batch": options.batch,
        "dim": dim,
        "operands": side.operands,
        "storage": side.storage,
        "sums": side.sums,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
    }
    if side.step is None:
        return {**line, "problem": side.problem}
    step_s, matmul_s = median(seconds[side.name]), median(seconds["matmul"])
    rate, matmul_rate = 6 * options.batch * options.classes * dim / step_s, 2 * MATMUL_SIZE[options.device] ** 3
    return {
        **line,
        "step_ms": round(step_s * 1e3, 4),
        "tflops": round(rate / 1e12, 3),
        "share_of_matmul": round(rate / (matmul_rate / matmul_s), 3),
    }


def _table(lines: list[dict[str, Any]]) -> str:
    first = lines[0]
    rows = [f"\n{first['classes']:,} classes, batch {first['batch']:,}, D {first['dim']}, {first['device']}"]
    rows.append(
        f"{'side':36}{'operands':>10}{'centres':>9}{'sums':>13}{'step ms':>10}{'TFLOP/s':>9}{'of torch.mm':>13}"
    )
    for line in lines:
        start = f"{line['side']:36}{line['operands']:>10}{line['storage']:>9}{line['sums']:>13}"
        if "problem" in line:
            rows.append(f"{start}  {line['problem']}")
        else:
            rows.append(f"{start}{line['step_ms']:>10.2f}{line['tflops']:>9.2f}{line['share_of_matmul']:>13.0%}")
    return "\n".join(rows)


def _seconds(run: Callable[[], object], device: str) -> float:
    if device != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000.0


if __name__ == "__main__":
    try:
        versus(tyro.cli(VersusOptions))
    except ValueError as error:
        sys.exit(f"bench-gpu: {error}")

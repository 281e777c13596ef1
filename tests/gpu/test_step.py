"""A whole step of the head with the Triton kernel: what the host launches, and how often it waits for the device.

On a CUDA device, or, with TRITON_INTERPRET=1, on the CPU (tests/unit/kernels/test_triton.py does that).
"""

import warnings
from typing import Literal

import pytest
import torch

pytest.importorskip("triton")

from partial_fc.head import CosFace, PartialFC, Storage
from partial_fc.head.kernels import triton_kernels, triton_pass
from tests.flat import flat_head
from tests.gpu.test_triton import DEVICE, INTERPRETED, on_gpu, pytestmark  # noqa: F401
from tests.unit.operations import Operations

D = 32


def head_of(num_classes: int, rate: float, catch_up: Literal["exact", "none"] = "none") -> PartialFC:
    head = flat_head(
        num_classes,
        D,
        CosFace(),
        rate,
        device=DEVICE,
        impl="triton",
        precision="bf16",
        storage=Storage(torch.bfloat16),
        catch_up=catch_up,
        ignore_index=None,
    )
    head.store.all_rows()
    return head


def step(head: PartialFC, number: int) -> float:
    generator = torch.Generator().manual_seed(number)
    feat = torch.randn(32, D, generator=generator).to(head.store.device).requires_grad_()
    loss = head(feat, torch.randint(0, head.num_classes, (32,), generator=generator).to(head.store.device))
    loss.backward()
    head.step(0.1)
    return loss.item()


class Launches:
    """What is launched, while no counter of operations looks inside."""

    def __init__(self, monkeypatch, operations: Operations):
        self.seen: list[str] = []
        kind = type(triton_kernels.weigh)
        get = kind.__getitem__

        def launcher(kernel, grid):
            def launch(*args, **named):
                self.seen.append(kernel.fn.__name__)
                with operations.pause():
                    return get(kernel, grid)(*args, **named)

            return launch

        monkeypatch.setattr(kind, "__getitem__", launcher)


# Of everything that a step launches. It was 98, 108 and 115 before what lies between the passes had kernels of its own.
# (verbs/plan/counts.py: `_LAUNCHES_S`.)
@pytest.mark.parametrize(("rate", "chunks", "most"), [(1.0, 1, 28), (1.0, 3, 38), (0.1, 1, 30)])
def test_the_host_launches_few_operations(rate, chunks, most, monkeypatch):
    monkeypatch.setattr(triton_pass, "CHUNK_ROWS", 64)
    head, operations = head_of(64 * chunks if rate == 1 else 200, rate), Operations()
    launches = Launches(monkeypatch, operations)
    step(head, 0)  # which sends the walks of 32 steps
    launches.seen.clear()
    feat, label = torch.randn(32, D, device=DEVICE, requires_grad=True), torch.arange(32, device=DEVICE)
    with operations:
        head(feat, label).backward()
        head.step(0.1)
    copies = 0 if INTERPRETED else 1  # of the tensor that is read: from a GPU it is copied first
    assert operations.count - copies + len(launches.seen) <= most, (operations.names, launches.seen)
    assert operations.waits == {"tolist": 1}


@on_gpu
@pytest.mark.parametrize(("rate", "catch_up"), [(1.0, "none"), (0.1, "none"), (0.1, "exact")])
def test_the_host_waits_once(rate, catch_up):
    """As CUDA itself sees it: PyTorch warns of each operation that makes the host wait."""
    head = head_of(20_000, rate, catch_up)
    for number in range(3):
        step(head, number)
    feat = torch.randn(32, D, device=DEVICE, requires_grad=True)
    label = torch.randint(0, 20_000, (32,), device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            head(feat, label).backward()
            head.step(0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in found if "synchroniz" in str(w.message)]) == 1, [str(w.message) for w in found]


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_it_trains_like_the_plain_kernel_on_the_host(rate):
    """The same rows, chosen in another way, and the same losses but for bf16's rounding."""
    ours, plain = head_of(600, rate), flat_head(600, D, CosFace(), rate, impl="plain")
    for number in range(3):
        rows = [each.active_rows(torch.arange(7, device=each.store.device)).rows for each in (ours, plain)]
        assert rows[0] is rows[1] or torch.equal(rows[0].cpu(), rows[1])
        assert step(ours, number) == pytest.approx(step(plain, number), rel=0.02)

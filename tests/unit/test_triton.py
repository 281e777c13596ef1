"""The Triton kernel on a machine without a GPU: in Triton's interpreter, and through its compiler."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from partial_fc.head.kernels import LogitGrad, Logits, triton_kernels, triton_pass
from partial_fc.head.margin import Negatives

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_the_tests_of_the_gpu_pass_in_the_interpreter():
    """In a process of its own: what is defined while TRITON_INTERPRET is set stays interpreted."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "--color=no", "tests/gpu/test_triton.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    skipped = re.findall(r"SKIPPED .*: (.*)", done.stdout)
    assert set(skipped) == {"no CUDA device"}, done.stdout
    assert re.search(r"\b\d+ passed", done.stdout), done.stdout


class Recorder:
    """Stands in for a kernel: remembers what it was launched with."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.launches: list[tuple[tuple, dict]] = []

    def __getitem__(self, grid):
        assert all(programs > 0 for programs in grid)
        return lambda *args, **named: self.launches.append((args, named))

    def compiled(self, launch: tuple[tuple, dict], capability: int):
        """The launch, compiled for a device of this capability, with what the launcher would know of its arguments."""
        args, named = launch
        types = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
        types |= {torch.int8: "*i8", torch.int32: "*i32", torch.int64: "*i64"}
        signature, constants, facts = {}, {}, {}
        for i, (parameter, value) in enumerate(zip(self.kernel.params, args, strict=False)):
            if value is None:
                signature[parameter.name], constants[parameter.name] = "constexpr", None
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = types[value.dtype]
                facts[(i,)] = [["tt.divisibility", 16]]
            elif isinstance(value, int):
                signature[parameter.name] = "i32"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    facts[(i,)] = [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "fp32"
        options = {name: named[name] for name in ("num_warps", "num_stages") if name in named}
        for name in named.keys() - options:
            signature[name], constants[name] = "constexpr", named[name]
        source = ASTSource(self.kernel, signature, constants, facts)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


# Shared memory that a program can have, from NVIDIA's table: H100, and the least of all that take AMPERE's tiles (8.6).
SHARED_BYTES = {9: 227 << 10, 8: 99 << 10}
PRODUCT = {9: "wgmma.mma_async", 8: "mma.sync"}


NAMES = ("inverse_lengths", "sum_units", "nearest_sub_centres", "weigh", "weighted_sum", "centre_gradient")


@pytest.fixture
def recorders(monkeypatch, tmp_path) -> dict[str, Recorder]:
    """In the place of all kernels; nothing compiled stays."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    recorders = {name: Recorder(getattr(triton_kernels, name)) for name in NAMES}
    for name, recorder in recorders.items():
        monkeypatch.setattr(triton_kernels, name, recorder)
    return recorders


def launch_everything(over: triton_pass.Pass) -> None:
    """What TritonKernel launches for a chunk."""
    shift_G = over.zero_G
    (chunk,) = over.chunks()
    over.weigh(chunk, triton_kernels.MOST.value, shift_G)
    over.weigh(chunk, triton_kernels.SUMS.value, shift_G, over.weight_GK)
    over.weighted_sum(chunk, over.new_splits())
    over.centre_sum(chunk, over.new_totals())
    along = over.weigh(chunk, triton_kernels.SLOPES.value, shift_G, over.weight_GK, over.zero_G, over.zero_G)
    over.gradient(chunk, along, torch.zeros(chunk.size, over.width))


@pytest.mark.parametrize(
    ("generation", "operands", "stored"),
    [
        (9, torch.bfloat16, torch.bfloat16),
        (9, torch.bfloat16, torch.float16),
        (9, torch.bfloat16, torch.float32),
        (8, torch.bfloat16, torch.bfloat16),
        (8, torch.bfloat16, torch.float32),
        (8, torch.float32, torch.float32),
    ],
    ids=str,
)
def test_the_compiler_takes_it_and_uses_tensor_cores(generation, operands, stored, recorders):
    G, S, D = 1024, 1000, 512
    target_G = torch.zeros(G, dtype=torch.int64)
    centre_LD = torch.zeros(2 * S, D, dtype=stored)
    logits = Logits(torch.zeros(G, D), centre_LD, torch.arange(S), target_G, 64.0, Negatives())
    tiles = triton_pass.tiles_for(generation, operands, stored)
    launch_everything(triton_pass.Pass(logits, None, operands, tiles))
    for name in ("weigh", "weighted_sum", "centre_gradient"):
        for launch in recorders[name].launches:
            compiled = recorders[name].compiled(launch, 10 * generation)
            assert compiled.metadata.shared <= SHARED_BYTES[generation], name
            if operands == torch.bfloat16:
                assert PRODUCT[generation] in compiled.asm["ptx"], name
                assert "cp.async" in compiled.asm["ptx"], f"{name} does not read ahead while it multiplies"


def test_the_compiler_takes_every_rule(recorders):
    """At an odd width, without row_S: everything else that a launch can leave out is there."""
    G, S, D = 33, 300, 100
    negatives = Negatives(filter_above=0.4, hard_G=torch.zeros(G), hard_t=0.5)
    target_G = torch.zeros(G, dtype=torch.int64)
    logits = Logits(
        torch.zeros(G, D), torch.zeros(S, D), None, target_G, 64.0, negatives, torch.zeros(S), sub_centres=3
    )
    logit_grad = LogitGrad(torch.zeros(G, dtype=torch.float64), torch.zeros(G), uniform_D=torch.zeros(D))
    tiles = triton_pass.tiles_for(8, torch.bfloat16, torch.float32)
    launch_everything(triton_pass.Pass(logits, logit_grad, torch.bfloat16, tiles))
    for name, recorder in recorders.items():
        assert recorder.launches, name
        for launch in recorder.launches:
            assert recorder.compiled(launch, 80).metadata.shared <= SHARED_BYTES[8], name

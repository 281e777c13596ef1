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

from partial_fc.head.kernels import Logits, triton_kernels, triton_pass
from partial_fc.head.margin import Negatives

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
        types |= {torch.int32: "*i32", torch.int64: "*i64"}
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
def test_the_compiler_takes_it_and_uses_tensor_cores(generation, operands, stored, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    recorders = {}
    for name in ("inverse_lengths", "weigh", "pull", "centre_gradient"):
        recorders[name] = Recorder(getattr(triton_kernels, name))
        monkeypatch.setattr(triton_kernels, name, recorders[name])
    G, S, D = 1024, 1000, 512
    own_G = torch.zeros(G, dtype=torch.int64)
    centre_LD = torch.zeros(2 * S, D, dtype=stored)
    logits = Logits(torch.zeros(G, D), centre_LD, torch.arange(S), own_G, 64.0, Negatives())
    tiles = triton_pass.tiles_for(generation, operands, stored)
    over = triton_pass.Pass(logits, None, operands, tiles)
    (chunk,) = over.chunks()
    over.weigh(chunk, triton_kernels.SUMS.value, over.zero_G, over.weight_GK)
    over.pull(chunk, over.new_splits())
    along = over.weigh(
        chunk, triton_kernels.SLOPES.value, over.zero_G, over.weight_GK, over.zero_G, over.zero_G
    )
    over.gradient(chunk, along, torch.zeros(S, D))

    for name, recorder in recorders.items():
        assert recorder.launches
        for launch in recorder.launches:
            compiled = recorder.compiled(launch, 10 * generation)
            assert compiled.metadata.shared <= SHARED_BYTES[generation], name
            if name != "inverse_lengths" and operands == torch.bfloat16:
                assert PRODUCT[generation] in compiled.asm["ptx"], name
                assert "cp.async" in compiled.asm["ptx"], f"{name} does not read ahead while it multiplies"

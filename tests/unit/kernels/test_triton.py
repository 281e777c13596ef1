"""The Triton kernel on a machine without a GPU: in Triton's interpreter, and through its compiler."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from partial_fc.head.kernels import (
    LogitGrad,
    Logits,
    Sums,
    triton_catch_up,
    triton_choice,
    triton_kernels,
    triton_rows,
    triton_update,
)
from partial_fc.head.kernels.triton import TritonKernel
from partial_fc.head.kernels.triton_choice import DeviceChoice
from partial_fc.head.kernels.triton_pass import tiles_for
from partial_fc.head.margin import ArcFace, Negatives
from partial_fc.head.rows import RowAdagrad, RowAdamW, RowOptimizer, RowSGD, RowTable, Storage
from partial_fc.head.rows import catch_up as rows_catch_up
from partial_fc.head.selection.active_rows import ActiveRows
from partial_fc.head.selection.sampling import BLOCK, Draw
from partial_fc.head.shard import Shard

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "names", [("catch_up",), pytest.param(("triton", "triton_update", "row_math", "step"), marks=pytest.mark.long)]
)  # long: make test-old runs it
def test_the_tests_of_the_gpu_pass_in_the_interpreter(names):
    """In a process of its own: what is defined while TRITON_INTERPRET is set stays interpreted."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "--color=no", *(f"tests/gpu/test_{name}.py" for name in names)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    skipped = re.findall(r"SKIPPED .*: (.*)", done.stdout)
    assert set(skipped) <= {"no CUDA device"}, done.stdout
    assert re.search(r"\b\d+ passed", done.stdout), done.stdout


class Recorder:
    """Stands in for a kernel: remembers what it was launched with, and computes nothing."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid):
        assert all(programs > 0 for programs in grid)
        names = self.kernel.arg_names
        return lambda *args, **named: self.launches.append({**dict(zip(names, args, strict=False)), **named})

    def compiled(self, launch: dict[str, Any], capability: int):
        """The launch, compiled for a device of this capability, with what the launcher would know of its arguments."""
        types = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
        types |= {torch.int8: "*i8", torch.int32: "*i32", torch.int64: "*i64"}
        types |= {torch.uint8: "*u8", torch.float64: "*fp64"}
        signature, constants, facts = {}, {}, {}
        for i, parameter in enumerate(self.kernel.params):
            value = launch[parameter.name]
            if value is None or parameter.is_constexpr:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, TensorDescriptor):
                signature[parameter.name] = f"tensordesc<{types[value.base.dtype][1:]}{value.block_shape}>"
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = types[value.dtype]
                facts[(i,)] = [["tt.divisibility", 16]]
            elif isinstance(value, int):
                signature[parameter.name] = "i32" if abs(value) < 1 << 31 else "i64"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    facts[(i,)] = [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "fp32"
        options = {name: launch[name] for name in ("num_warps", "num_stages") if name in launch}
        source = ASTSource(self.kernel, signature, constants, facts)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def spilled_bytes(compiled, folder: Path) -> int:
    """Bytes of a thread's numbers that did not fit its registers and go through memory, by `cuobjdump -res-usage`."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    return sum(int(number) for number in re.findall(r"\b(?:STACK|LOCAL):(\d+)", usage))


def check_fit(recorders, names, generation: int, folder: Path, **spilled: int) -> None:
    """Of each kernel's last launch: it has room in shared memory and registers, but for `spilled` bytes."""
    for name in names:
        compiled = recorders[name].compiled(recorders[name].launches[-1], 10 * generation)
        assert compiled.metadata.shared <= SHARED_BYTES[generation], name
        assert spilled_bytes(compiled, folder) <= spilled.get(name, 0), name


# Shared memory that a program can have, from NVIDIA's tables: the least of all that take a generation's tiles (8.6).
SHARED_BYTES = {10: 227 << 10, 9: 227 << 10, 8: 99 << 10}
PRODUCT = {10: "tcgen05.mma", 9: "wgmma.mma_async", 8: "mma.sync"}
PRODUCTS = ("weigh", "weighted_sum", "pull")
OTHERS = ("read_centres", "read_features", "add_up", "nearest_sub_centres")
ROW_MATH = ("targets", "margin_of", "terms", "finish")
CHOICE = ("look_at_labels", "draw", "write_down")


@pytest.fixture
def recorders(monkeypatch, tmp_path) -> dict[str, Recorder]:
    """In the place of all kernels; nothing compiled stays."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    recorders = {}
    kernels = {triton_kernels: PRODUCTS + OTHERS, triton_update: ("finish_rows",), triton_catch_up: ("catch_up_rows",)}
    for module, names in {**kernels, triton_rows: ROW_MATH, triton_choice: CHOICE}.items():
        for name in names:
            recorders[name] = Recorder(getattr(module, name))
            monkeypatch.setattr(module, name, recorders[name])
    return recorders


def launch_everything(logits: Logits, kernel: TritonKernel, optimizer: RowOptimizer, storage: Storage) -> None:
    """What a step launches, and what it does where the gradient is asked for."""
    store = RowTable(0, len(logits.centre_LD), logits.centre_LD.shape[1], 3, optimizer, storage, "cpu")
    logits = replace(logits, centre_LD=store.fetch(None, 0)[0])
    kernel.sums(logits, num_nearest=5)
    sums = kernel.sums(logits)
    logit_grad = LogitGrad(sums.denominator_G, torch.zeros(logits.target_G.shape), sums.cache)
    list(kernel.centre_gradients(logits, logit_grad))
    assert kernel.update(logits, logit_grad, store, 0.1, 0)


@pytest.mark.parametrize(
    ("generation", "precision", "stored", "optimizer"),
    [
        pytest.param(10, "bf16", torch.float32, RowAdamW(), marks=pytest.mark.long),
        pytest.param(9, "bf16", torch.bfloat16, RowAdamW(), marks=pytest.mark.long),
        pytest.param(8, "bf16", torch.float16, RowSGD(nesterov=True), marks=pytest.mark.long),
        pytest.param(8, "fp32", torch.float32, RowAdagrad(), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_compiler_takes_it_with_tensor_cores_and_registers(
    generation, precision, stored, optimizer, recorders, tmp_path
):
    """The products are the same for every storage: they read copies, or centres that are stored as operands."""
    G, S, D = 1024, 1000, 512
    target_G = torch.zeros(G, dtype=torch.int64)
    logits = Logits(torch.zeros(G, D), torch.zeros(2 * S, D), torch.arange(S), target_G, 64.0, Negatives())
    operands = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    launch_everything(logits, TritonKernel(precision, tiles_for(generation, operands)), optimizer, Storage(stored))
    with_nearest = recorders["weigh"].launches[0]
    assert with_nearest["largest_ptr"] is not None
    assert spilled_bytes(recorders["weigh"].compiled(with_nearest, 10 * generation), tmp_path) <= 24
    for name in (*PRODUCTS, "read_centres", "read_features", "add_up", "finish_rows"):
        compiled = recorders[name].compiled(recorders[name].launches[-1], 10 * generation)
        assert compiled.metadata.shared <= SHARED_BYTES[generation], name
        assert spilled_bytes(compiled, tmp_path) <= (8 if name == "finish_rows" else 0), name
        if name in PRODUCTS and precision == "bf16":
            assert PRODUCT[generation] in compiled.asm["ptx"], name
            assert "cp.async" in compiled.asm["ptx"], f"{name} does not read ahead while it multiplies"
        if name == "weigh":
            assert "st.global.v4" in compiled.asm["ptx"], "weights are not stored 16 bytes at a time"


@pytest.mark.long
@pytest.mark.parametrize(
    ("labels", "generation", "names"),
    [
        (8, 9, ("weigh", "read_features", "finish_rows")),
        (8, 10, ("weigh", "read_features", "finish_rows")),
        (1, 8, PRODUCTS + OTHERS),
        (1, 10, ("weigh", "nearest_sub_centres")),
    ],
)
def test_the_compiler_takes_several_labels_and_every_rule(labels, generation, names, recorders, tmp_path):
    """Several labels in the tiles of one: few numbers leave the registers. One, at an odd width, without row_S: all
    else that a launch can leave out is there."""
    G, S, D, sub_centres, above = (1024, 1000, 512, 1, None) if labels > 1 else (333, 300, 500, 3, 0.4)
    target_G = torch.zeros(G, labels, dtype=torch.int64).squeeze(1)
    negatives = Negatives(above)
    logits = Logits(torch.zeros(G, D), torch.zeros(S, D), None, target_G, 64.0, negatives, sub_centres=sub_centres)
    kernel = TritonKernel("bf16", tiles_for(generation, torch.bfloat16))
    how = (RowSGD(), Storage(torch.bfloat16)) if labels > 1 else (RowAdamW(), Storage())
    launch_everything(logits, kernel, *how)
    check_fit(recorders, names, generation, tmp_path, weigh=160 if labels > 1 else 0)


@pytest.mark.long
@pytest.mark.parametrize(("generation", "sub_centres", "L"), [(8, 1, 5000), (10, 3, 2 * BLOCK)])
def test_the_compiler_takes_what_lies_between_the_passes(generation, sub_centres, L, recorders, tmp_path):
    """Of 2 * BLOCK classes the last block is as large as the others, and its positions are left out."""
    G, D = 33, 500
    label_G, origin_G = torch.arange(G), torch.zeros(G, dtype=torch.int32)
    shard = Shard.of(L, 0, 1)
    choice = DeviceChoice(Draw(L, 0.1, 0), shard, torch.device("cpu"))
    _, class_P = choice.choose(label_G, origin_G, origin_G, None if sub_centres > 1 else label_G, 0)
    active = ActiveRows(class_P, torch.zeros(L * sub_centres, D, dtype=torch.bfloat16), class_P)
    rows = triton_rows.FusedRowMath()
    targets = rows.find_targets(torch.zeros(G, D).half(), label_G, shard, sub_centres, active, torch.float32)
    sums = Sums(torch.ones(G, dtype=torch.float64), torch.ones(G, D))
    rows.with_margin(ArcFace(), targets, {})
    terms = rows.local_terms(targets, targets.cos_G, sums)
    rows.finish(terms, targets, targets.cos_G, sums, 64.0, training=True)
    check_fit(recorders, ROW_MATH + CHOICE, generation, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("generation", "optimizer"), [(8, RowAdamW()), (9, RowAdamW()), (9, RowSGD())], ids=str)
def test_the_compiler_takes_the_catch_up(optimizer, generation, recorders, tmp_path):
    store = RowTable(0, 300, 512, 3, optimizer, Storage(), "cpu")
    past = rows_catch_up.make(optimizer, torch.device("cpu"), [0.1, 0.1])
    form = {**past.closed_form(), "first_step": 0, "touched_step": 2}
    wide = [name for name, width in optimizer.state_widths().items() if width == "row"]
    triton_catch_up.catch_up(form, store.row_state(), wide, torch.arange(300), None, 0, {})
    check_fit(recorders, ("catch_up_rows",), generation, tmp_path, catch_up_rows=8)

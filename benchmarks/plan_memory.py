"""Whether a head takes the memory that `partial-fc plan` says, as docs/benchmarks.md claims: one line a case.

    python -m benchmarks.plan_memory

Ends with status 1 where plan and measurement are more than a quarter apart. A minute on two idle cores.
"""

import sys

from benchmarks.head import HeadOptions, measure
from partial_fc.verbs.plan import report as plan_report
from partial_fc.verbs.plan.options import PlanOptions

# Each says its dtypes: the memory depends on them, and auto on the machine.
CASES = (
    HeadOptions(
        num_processes=1,
        steps=2,
        impl="cpu",
        classes=150_000,
        dim=128,
        sample_rate=0.3,
        precision="bf16",
        dtype="bf16",
        state_dtype="fp32",
    ),
    # where what a step works in outweighs what is kept
    HeadOptions(
        num_processes=1,
        steps=2,
        impl="cpu",
        classes=30_000,
        dim=256,
        batch=512,
        optimizer="adamw",
        precision="bf16",
        dtype="fp32",
        state_dtype="bf16",
    ),
)


def planned_bytes(case: HeadOptions) -> int:
    """Bytes of the head that a case measures, as planned."""
    assert case.dtype != "auto"
    options = PlanOptions(
        case.classes,
        dim=case.dim,
        batch=case.batch,
        sample_rate=case.sample_rate,
        dtype=case.dtype,
        state_dtype=case.dtype if case.state_dtype == "same" else case.state_dtype,
        optimizer=case.optimizer,
        device="cpu",
        tflops=1,
        bandwidth=1,
        precision="bf16" if case.precision == "bf16" else "fp32",
    )
    return plan_report.make(options)["memory_total"]


def main() -> int:
    fits = True
    for case in CASES:
        planned, measured = planned_bytes(case), measure(case)["added_bytes"]
        fits &= abs(planned / measured - 1) <= 0.25
        print(f"{case.impl} {case.optimizer} {case.classes:,} x {case.dim}: {planned:,} planned, {measured:,} measured")
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())

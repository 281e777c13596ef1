"""The demo's training, cut short, for benchmarks of whole steps."""

from pathlib import Path

from recipes.face import presets

DEMO = Path(__file__).parents[1] / "demo" / "glyphs"


def demo_job(steps: int, report_every: int) -> list[str]:
    """Flags for config.sh: no verification, no checkpoint on the way, no warm-up longer than all of it. Where the
    demo's data is not there, made-up images of the same size and number of classes."""
    short = ["--max-steps", str(steps), "--frequent", str(report_every), "--warmup-epochs", "0"]
    short += ["--verbose", "0", "--checkpoint-every", "0", "--val-targets"]
    if DEMO.exists():
        return short
    made_up = ["--dataset", "synthetic", "--num-classes", "4000", "--num-images", "56000"]
    for name, value in presets.PRESETS["glyphs"].items():
        if name == "mirror":
            made_up += ["--no-mirror"]
        elif name not in ("epochs", "val_targets"):
            values = value if isinstance(value, tuple) else (value,)
            made_up += [f"--{'backbone' if name == 'network' else name}", *map(str, values)]
    return [*made_up, *short]

"""The demo's training, cut short, for benchmarks of whole steps."""

import dataclasses
from pathlib import Path

from recipes import face_presets as presets

DEMO = Path(__file__).parents[1] / "demo" / "glyphs"


def demo_job(steps: int, report_every: int) -> list[str]:
    """Flags for config.sh: no verification, no checkpoint on the way, no warm-up longer than all of it. Where the
    demo's data is not there, made-up images of the same size and number of classes."""
    short = ["--max-steps", str(steps), "--frequent", str(report_every), "--warmup-epochs", "0"]
    short += ["--verbose", "0", "--checkpoint-every", "0", "--val-targets"]
    if DEMO.exists():
        return short
    preset = presets.get("glyphs")
    made_up = ["--dataset", "synthetic", "--num-classes", "4000", "--num-images", "56000", "--no-mirror"]
    of_demo = {
        field.name: getattr(preset, field.name)
        for field in dataclasses.fields(preset)
        if field.name in ("image_size", "lr", "base_batch_size", "lr_scheduler", "augment")
    }
    more = {"backbone" if name == "network" else name: value for name, value in preset.more.items()}
    for name, value in {**of_demo, **more}.items():
        made_up += [f"--{name}", *(str(v) for v in (value if isinstance(value, tuple) else (value,)))]
    return [*made_up, *short]

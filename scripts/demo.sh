#!/usr/bin/env bash
# The main job on real images: builds the glyph set, trains on it with two processes under horovodrun, shows what came out.
# Repeating it finds data and checkpoints there and only verifies. Flags go to the trainer; the last line is JSON.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"
started=$SECONDS
models_root=${MODELS_ROOT:-runs/demo}

say() { printf '[demo %4ds] %s\n' $((SECONDS - started)) "$*"; }

say "data: 1,500 characters in seven typefaces; 6,000 pairs of each verification set"
python -m demo glyphs --out demo/glyphs
[ -e demo/glyphs.png ] || partial-fc data show demo/glyphs --out demo/glyphs.png --images 14

say "training: horovodrun -np 2 -H localhost:2 bash config.sh"
MODELS_ROOT=$models_root horovodrun -np 2 -H localhost:2 bash config.sh "$@"

say "done"
minutes=$(python -c "print(round(($SECONDS - $started) / 60, 1))")
python - "$models_root" "$minutes" <<'PYTHON'
import json
import sys
from pathlib import Path

models_root, minutes = Path(sys.argv[1]), float(sys.argv[2])
result = json.loads((models_root / "result.json").read_text())
accuracy = {name: result["evaluations"][f"{name}/accuracy"] for name in ("unseen", "unseen_font", "lookalike")}
print(f"""
characters never seen in training        {accuracy["unseen"]:.2%}   (same character or not? 6,000 pairs)
... and in a typeface never seen         {accuracy["unseen_font"]:.2%}
... against the most similar characters  {accuracy["lookalike"]:.2%}
speed                                    {result["images_per_s"]:.0f} images/s over 2 processes

look at    demo/glyphs.png (the data), {models_root / "roc.png"} (ROC curves)
model      {models_root / "model.safetensors"}
curves     .venv/bin/tensorboard --logdir {models_root / "tensorboard"}
""")
figures = {"images_per_s": round(result["images_per_s"]), "minutes": minutes, "models_root": str(models_root)}
print(json.dumps({**{name: round(value, 5) for name, value in accuracy.items()}, **figures}))
PYTHON

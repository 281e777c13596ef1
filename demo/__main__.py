"""`python -m demo glyphs --out FOLDER`: writes a made set: glyphs (characters in many typefaces), digits (handwritten
ones, as MNIST), motion (videos of moving characters)."""

import importlib
import sys

from partial_fc.cli import call

SETS = {"glyphs": "make_glyphs:build", "digits": "make_digits:write_digits", "motion": "make_motion:make_motion"}

if __name__ == "__main__":
    name, *arguments = sys.argv[1:] or ["--help"]
    if name not in SETS:
        print(f"{__doc__}\n\nusage: python -m demo {{{','.join(SETS)}}} [--help]", file=sys.stderr)
        sys.exit(0 if name in ("-h", "--help") else 2)
    module, _, function = SETS[name].partition(":")
    sys.exit(call(getattr(importlib.import_module(f"demo.{module}"), function), arguments, f"python -m demo {name}"))

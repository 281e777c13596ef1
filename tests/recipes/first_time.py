"""What takes longer in a process the first time, done when this is imported: by the process that ranks are forked from.
No tensor is computed with: what has gone backward once may not be forked."""

import tempfile
from pathlib import Path

from partial_fc.train.record import curve
from recipes.face import main as face

face.parse(["--dataset", "synthetic", "--num-classes", "2"])
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "loss.csv").write_text("step,loss,lr\n1,2.0,0.1\n2,1.0,0.1\n")
    curve.draw(Path(folder))
# Their pictures are seen by nobody, and cost as much as some steps. (Runs that a launcher starts draw theirs.)
curve.draw = lambda models_root: None

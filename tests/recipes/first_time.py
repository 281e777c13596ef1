"""What takes longer in a process the first time, done when this is imported: by the process that ranks are forked from.
No tensor is computed with: what has gone backward once may not be forked."""

from recipes.face import main as face

face.parse(["--dataset", "synthetic", "--num-classes", "2"])

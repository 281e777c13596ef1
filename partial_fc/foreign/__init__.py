"""Files of other programs, in and out: weights, class centres, Apex checkpoints."""

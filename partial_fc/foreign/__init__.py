"""Readers and writers of other programs' files: weights, class centres, Apex checkpoints."""

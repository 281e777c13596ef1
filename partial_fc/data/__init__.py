"""Bytes to batches: one file a format. Nothing here knows about ranks except as two numbers of the loader."""

"""Time and memory of the head: measured (`partial-fc bench`), or predicted (`partial-fc plan`)."""

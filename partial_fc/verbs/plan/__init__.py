"""Time and memory of the head: measured (`partial-fc plan`), or predicted (`partial-fc plan`)."""

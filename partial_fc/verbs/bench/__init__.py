"""Time and memory of the head: measured (`partial-fc bench`), or computed beforehand (`partial-fc plan`)."""

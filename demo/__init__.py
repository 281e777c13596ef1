"""Generated data sets, to try everything without a download."""

"""The report of a run: one HTML page that a browser opens without a server."""

"""Ends the processes of a run whose collective hangs, with a report of where all ranks are."""

"""What a run finds out before it starts: where it writes, and how it differs from the one that it goes on with."""

"""What rank 0 writes down of a run besides its log, for people and programs that look at it later."""

"""Detection of hanging collectives: ends the processes of the run, with a report on all ranks."""

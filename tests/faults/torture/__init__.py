"""`python -m tests.faults.torture`: training under injected faults, compared with an undisturbed run."""

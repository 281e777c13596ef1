"""`partial-fc torture`: training under injected faults, compared with an undisturbed run."""

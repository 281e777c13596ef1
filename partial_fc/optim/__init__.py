"""Schedules, the backbone's optimiser and gradient exchange, the row optimisers of the centres."""

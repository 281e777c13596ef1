"""Schedules, the backbone's optimizer, and its gradient exchange."""

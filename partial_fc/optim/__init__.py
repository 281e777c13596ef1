"""Schedules, the backbone's optimizer, and the exchange of its gradients."""

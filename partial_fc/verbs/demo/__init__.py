"""Data that this project makes itself, so that everything can be tried without a download."""

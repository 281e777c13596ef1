"""Settings of every test."""

from hypothesis import settings

# No deadline: nothing is said about time by tests whose cores are shared. Derandomised: a failure repeats.
settings.register_profile("partial_fc", deadline=None, derandomize=True)
settings.load_profile("partial_fc")

"""Settings of every test."""

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# No deadline: nothing is said about time by tests whose cores are shared. Derandomised: a failure repeats.
settings.register_profile("partial_fc", deadline=None, derandomize=True)
settings.load_profile("partial_fc")


@pytest.fixture(autouse=True)
def _sigpipe_as_it_was() -> Iterator[None]:
    """partial-fc lets a closed pipe end its process. Where a test calls it, a later test's socket must not."""
    before = signal.getsignal(signal.SIGPIPE)
    yield
    signal.signal(signal.SIGPIPE, before)

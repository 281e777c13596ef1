"""Settings of every test."""

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# No deadline: nothing is said about time by tests whose cores are shared. Derandomised: a failure repeats.
settings.register_profile("partial_fc", deadline=None, derandomize=True)
settings.load_profile("partial_fc")

# `nohup make test`, or a shell's background job, ignores signals, and what a test starts would ignore them, too: there
# they are to mean what they mean in a terminal.
for _number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _sigpipe_as_it_was() -> Iterator[None]:
    """partial-fc lets a closed pipe end its process. Where a test calls it, a later test's socket must not."""
    before = signal.getsignal(signal.SIGPIPE)
    yield
    signal.signal(signal.SIGPIPE, before)

"""Two hosts on this machine (benchmarks/two_hosts.py), reached over ssh, and a small job to start on them."""

import shlex
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from benchmarks.two_hosts import TwoHosts, Unavailable, two_hosts
from tests.recipes.conftest import SMALL, environment, glyphs  # noqa: F401 (a fixture)

# Made-up images, since all that counts is who computes what with whom.
JOB = [*SMALL, *shlex.split("--dataset synthetic --num-classes 100 --image-size 32 --batch-size 8")]


@pytest.fixture(scope="session")
def hosts() -> Iterator[TwoHosts]:
    """Skips, with the reason, where this machine or this user cannot have them."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(two_hosts())
        except Unavailable as reason:
            pytest.skip(str(reason))
        yield made


@pytest.fixture(scope="session")
def env() -> dict[str, str]:
    """The environment of every process on the hosts."""
    return environment()

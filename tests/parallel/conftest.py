"""The same tests in every rank:  horovodrun -np 2 -H localhost:2 python -m pytest tests/parallel -x

Rank 0 reports as pytest does; another rank prints nothing but its failures. With -x a rank that fails ends at once, and
the launcher then ends the others: after a failure they would wait in a collective that it no longer calls.
"""

from collections.abc import Iterator

import pytest

from partial_fc import comm


class OnlyFailures:
    """Stands in for pytest's terminal report on the ranks above 0."""

    def __init__(self, rank: int):
        self.rank = rank

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.show(f"{report.nodeid} ({report.when})", report.longreprtext)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.show(f"{report.nodeid} (collecting)", report.longreprtext)

    def pytest_internalerror(self, excrepr: object) -> None:
        self.show("pytest itself", str(excrepr))

    def show(self, what: str, text: str) -> None:
        print(f"\nrank {self.rank} FAILED {what}\n{text}", flush=True)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    launch = comm.detect()
    if launch.rank > 0:
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(OnlyFailures(launch.rank))


@pytest.fixture(scope="session")
def world() -> Iterator[comm.World]:
    """The ranks of this launch; without a launcher the one process, for which every collective is the identity."""
    world = comm.init()
    yield world
    world.close()

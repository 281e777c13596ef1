"""The order of the files."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: of two processes that share the files none is left alone with a dear one at the
    end. (With xdist's --no-loadscope-reorder; else the files with the fewest tests, which are dear ones, come last.)"""
    dear = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in dear)

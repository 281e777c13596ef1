"""A cache of LevelDBs of each test's own."""

from pathlib import Path

import pytest

from recipes.imagenet.databases import leveldb


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("leveldb")
    monkeypatch.setattr(leveldb, "in_cache", lambda _, name: folder / name)
    return folder

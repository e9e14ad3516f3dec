from __future__ import annotations

from pathlib import Path

import pytest

from .runs import recorded_run


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps of which every row is recorded; nobody changes it."""
    return recorded_run(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="session")
def one_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run after its first step, to be copied and resumed."""
    return recorded_run(tmp_path_factory.mktemp("one"), "train.steps=1")

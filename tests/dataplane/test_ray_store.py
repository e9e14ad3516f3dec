"""The ray store: the rules of every store, and what Ray has to do with it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest

from practicum.dataplane.ray_store.client import IndexClient
from practicum.dataplane.ray_store.index import start_index
from practicum.dataplane.ray_store.store import RayStoreHandle
from practicum.dataplane.store import Store

from ..cluster import local_ray
from .conformance import MakeStore, StoreConformance
from .conformance_shared import SharedStoreConformance
from .threads import PATIENCE

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_ray():
        yield


@pytest.fixture(scope="module")
def indexes(cluster: None) -> list[Any]:
    return [start_index() for _ in range(2)]


def empty(index: Any, inline_bytes: int) -> Store:
    IndexClient(index, PATIENCE).replace([])
    return RayStoreHandle(index, inline_bytes).connect(PATIENCE)


class TestPutsHeldByTheIndex(StoreConformance, SharedStoreConformance):
    @pytest.fixture
    def make_store(self, indexes: list[Any]) -> MakeStore:
        # No test has more than two stores at the same time.
        turns = cycle(indexes)
        return lambda: empty(next(turns), inline_bytes=2**30)


class TestPutsInTheObjectStore(StoreConformance, SharedStoreConformance):
    @pytest.fixture
    def make_store(self, indexes: list[Any]) -> MakeStore:
        turns = cycle(indexes)
        return lambda: empty(next(turns), inline_bytes=0)

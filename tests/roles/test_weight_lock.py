"""Turns on one engine: weights stay until all who sample by them are done, and the line is kept."""

from __future__ import annotations

import threading

import pytest

from practicum.errors import DeadlineError
from practicum.roles.sync import WeightLock

_S = 30.0


def test_whoever_needs_the_same_weights_shares_them_and_others_wait_in_line():
    turns, told = WeightLock(_S, held=0), []
    inside, leave = threading.Event(), threading.Event()

    def sample(step: int) -> None:
        with turns.use(step, lambda: told.append(("load", step))):
            told.append(("sample", step))
            inside.set()
            leave.wait(_S)

    first = threading.Thread(target=sample, args=(0,))
    first.start()
    assert inside.wait(_S)
    with turns.use(0, lambda: told.append(("load", 0))):
        told.append(("beside", 0))
    others = []
    for step in (3, 1):
        others.append(threading.Thread(target=sample, args=(step,)))
        others[-1].start()
        while len(turns._line) < len(others):
            threading.Event().wait(0.01)
    assert told == [("sample", 0), ("beside", 0)], "weights that are in use stay"
    leave.set()
    for thread in (first, *others):
        thread.join(_S)
    assert told[2:] == [("load", 3), ("sample", 3), ("load", 1), ("sample", 1)]
    assert turns.held == 1


def test_weights_that_could_not_be_loaded_are_loaded_again():
    turns = WeightLock(_S, held=0)

    def fails() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"), turns.use(1, fails):
        pass
    loaded: list[int] = []
    with turns.use(0, lambda: loaded.append(0)):
        pass
    assert loaded == [0], "nobody knows what the engine has after a load that failed"


def test_who_waits_too_long_is_told_for_what():
    turns = WeightLock(0.05, held=2)
    with (
        turns.use(2, lambda: None),
        pytest.raises(DeadlineError, match=r"weights of step 5 wait .*with the weights of step 2"),
        turns.use(5, lambda: None),
    ):
        pass
    with turns.use(2, lambda: None):  # whoever gave up is not in line any more
        pass

"""The thread that writes the rows of finished sessions."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

from practicum.dataplane.keys import Key, Tags
from practicum.roles.rollout import SessionRow, SessionRunner
from practicum.runtime.ray.rollout_worker import RowWriter


class Slow:
    """Sessions whose first put waits until it is let go."""

    def __init__(self) -> None:
        self.plan = {"rollout": SimpleNamespace(writes=())}
        self.began, self.go, self.written = threading.Event(), threading.Event(), list[int]()

    def put(self, partition: str, rows: list[SessionRow], fields: Any) -> None:
        self.began.set()
        assert self.go.wait(10)
        self.written += [row.key.prompt for row in rows]


def test_rows_of_a_cancelled_order_are_left_out_and_the_others_are_written():
    slow, writer = Slow(), RowWriter()
    sessions = cast(SessionRunner, slow)
    rows = [[SessionRow(Key(prompt, 0), Tags(), None)] for prompt in range(4)]
    under_way = writer.put(sessions, "train", rows[0])
    assert slow.began.wait(10)
    waiting = [writer.put(sessions, "train", one) for one in rows[1:]]
    assert waiting[0].cancel()
    assert not under_way.cancel()  # it is being written
    slow.go.set()
    assert under_way.result(10).keys == (Key(0, 0),)
    assert [one.result(10).keys[0].prompt for one in waiting[1:]] == [2, 3]
    assert slow.written == [0, 2, 3]

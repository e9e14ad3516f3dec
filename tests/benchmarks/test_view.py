"""The benchmark of the viewer: its run folder is one, and its report tells goals."""

import time
from contextlib import contextmanager
from pathlib import Path

from benchmarks.record_cost import CLOCKED, Clocks
from benchmarks.report_view import WHAT, record_cost, view_page
from benchmarks.view_page import make_run

from practicum.records.read_record import Record
from practicum.view.run_view import RunView


def test_the_made_up_run_is_read_like_a_real_one(tmp_path: Path):
    run = make_run(tmp_path / "large", steps=3, rows=10)
    view = RunView(run, "large")
    assert view.info()["step"] == 3
    assert view.rows("samples")["total"] == 30
    assert view.info()["problems"] == []
    assert len(Record(run).rows()) == 30
    key = (2 * 3, 4, 0)
    assert view.tokens(3, key)["columns"]["advantages"] == [1] * 12


def test_the_report_tells_whether_the_goals_are_reached():
    rounds = [dict.fromkeys(WHAT, 0.2) for _ in range(3)]
    found = {
        "goals": {"first_paint": 0.5, "filter": 0.1},
        "settings": {"steps": 10_000, "rows": 100_000},
        "reading": {"seconds": 4.0},
        "megabytes": 200.0,
        "rounds": rounds,
        "machine": {"processor": "x", "cores": 2},
    }
    told = view_page(found)
    assert "under 0.5 s reached" in told
    assert "under 0.1 s missed" in told


class Worker:
    """Something whose parts are clocked."""

    def inner(self) -> None:
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass

    def outer(self) -> None:
        self.inner()

    @contextmanager
    def span(self):
        self.inner()
        yield


def test_clocked_code_counts_once_and_without_what_runs_inside_of_a_span():
    clocks, first, second = Clocks(), *list(CLOCKED)[:2]
    for name, part in (("inner", first), ("outer", first), ("span", second)):
        clocks.watch(Worker, name, part)
    worker = Worker()
    worker.outer()
    with worker.span():
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
    spent = clocks.take()
    assert 0.01 <= spent[first] < 0.05
    assert 0.01 <= spent[second] < 0.05
    assert sum(clocks.take().values()) == 0


def test_the_report_tells_what_recording_costs_at_the_default():
    def measured(seconds: float) -> list[dict[str, float]]:
        return [dict.fromkeys(CLOCKED, seconds) | {"cpu_seconds": 2.0, "seconds": 2.0}]

    found = {
        "settings": {"goal": 0.02, "parts": list(CLOCKED)},
        "raced": {"GRPO": {"none": measured(0.0), "default": measured(0.004), "all": measured(0.02)}},
        "machine": {"processor": "x", "cores": 2},
    }
    told = record_cost(found)
    assert "1.00% (1.00% to 1.00%) · goal under 2% reached" in told
    assert "5.00%" in told

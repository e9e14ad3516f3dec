"""The benchmark of the viewer: its run folder is one, and its report tells goals."""

from pathlib import Path

from benchmarks.report_view import WHAT, view_page
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

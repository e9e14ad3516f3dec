from __future__ import annotations

import pytest
from benchmarks.harness import Channel, Contender, Measured, paired_ratio, race

from benchmarks import harness, report


def echo(channel: Channel, factor: int) -> None:
    """A contender whose measurement is its turn times a factor; what it prints must not matter."""
    print("noise on standard output", flush=True)
    channel.serve(lambda turn: {"seconds": float(turn * factor)})


def broken(channel: Channel) -> None:
    channel.ready()
    raise ValueError("out of digits")


@pytest.fixture(autouse=True)
def _logs_aside(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr(harness, "LOGS", tmp_path_factory.mktemp("logs"))


def test_contenders_take_turns_on_the_same_work_and_the_warmup_does_not_count() -> None:
    contenders = [Contender(f"x{k}", f"{__name__}:echo", {"factor": k}) for k in (1, 10)]
    found = race(contenders, rounds=3, warmup=1)
    assert [m["seconds"] for m in found["x1"]] == [1, 2, 3]
    assert [m["seconds"] for m in found["x10"]] == [10, 20, 30]


def test_a_contender_that_dies_is_named_with_its_last_words() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)contender frail died.*out of digits"):
        race([Contender("frail", f"{__name__}:broken")], rounds=1)


def test_ratios_are_taken_round_by_round() -> None:
    slow: list[Measured] = [{"s": 10.0}, {"s": 60.0}, {"s": 15.0}]
    fast: list[Measured] = [{"s": 2.0}, {"s": 10.0}, {"s": 5.0}]
    assert paired_ratio(slow, fast, "s") == (5.0, 3.0, 6.0)


def test_results_replace_what_is_between_the_markers_only() -> None:
    document = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    once = report.insert(document, "new")
    assert once == f"before\n{report.BEGIN}\n\nnew\n\n{report.END}\nafter\n"
    assert report.insert(once, "new") == once


def test_a_readme_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="markers"):
        report.insert("no markers here", "new")


def test_a_setting_that_did_not_get_its_cores_is_marked() -> None:
    calm: list[Measured] = [{"seconds": 2.0, "cpu_seconds": 1.9}]
    starved: list[Measured] = [{"seconds": 2.0, "cpu_seconds": 2.0}]
    assert report.busy({"1 thread": {"a": calm}}) == []
    (warning,) = report.busy({"1 thread": {"a": calm}, "2 threads": {"a": starved}})
    assert "2 threads" in warning
    assert "1.0 cores" in warning

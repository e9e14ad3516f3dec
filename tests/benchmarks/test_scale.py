from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.clusters import in_turn
from benchmarks.controller_memory import REPEATS, TIMES, times_of
from benchmarks.harness import Measured
from benchmarks.pipeline import IMAGES, PARTITION, STAGES, Load, StageWorker, reads_of
from benchmarks.ray_step import LOCAL, RAY, check_same
from benchmarks.routes import require_same
from benchmarks.rows import FORMS, Shape, column_bytes, draw_lengths, make_batch, make_columns
from benchmarks.store_keys import OPERATIONS, Holder, MemoryHandle, fill
from benchmarks.ways import ADAPTER, BARE, LEARNER, MEMCPY, OURS, PLAIN, THROUGH

from benchmarks import report_scale
from practicum.dataplane.memory_store import MemoryStore
from practicum.dataplane.ragged import Column, Ragged

MACHINE = {"processor": "a processor", "cores": 2}
LOAD = Load(4, (3, 9), patches=2)


def test_contenders_begin_in_turn_and_the_warmup_does_not_count() -> None:
    log: list[str] = []

    def contender(name: str) -> Any:
        return lambda turn: log.append(f"{name}{turn}") or {"seconds": float(turn)}

    found = in_turn({name: contender(name) for name in "abc"}, rounds=2, warmup=1)
    assert found["b"] == [{"seconds": 0.0}, {"seconds": 1.0}]
    assert log == ["c-1", "a-1", "b-1", "a0", "b0", "c0", "b1", "c1", "a1"]


def test_the_ragged_rows_have_44_bytes_for_a_token_and_fit_the_table_of_fields() -> None:
    shape = Shape(6, (2, 9))
    columns = make_columns(shape)
    assert column_bytes(columns) == 44 * sum(draw_lengths(6, (2, 9)))
    assert len(columns) == 8
    batch = make_batch("p", draw_lengths(6, (2, 9)))
    MemoryStore().put(batch, columns)


@pytest.mark.parametrize("form", FORMS.values())
def test_columns_arrive_as_they_were_sent(form: Any) -> None:
    sent: dict[str, Column] = dict(
        make_columns(Shape(5, (1, 4), ("response_ids", "teacher_hidden"), {"H": 3}))
    )
    sent = {name: column.select(range(1, 4)) for name, column in sent.items() if isinstance(column, Ragged)}
    sent["reward"] = torch.arange(5.0)[1:4]
    sent[IMAGES] = [{"pixel_values": torch.full((2, 2), float(i))} for i in range(3)]
    found = form.unwrap(form.wrap(sent))
    assert set(found) == set(sent)
    require_same("it", {n: c for n, c in sent.items() if isinstance(c, Ragged)}, found)
    assert torch.equal(found["reward"], sent["reward"])
    assert [float(one["pixel_values"].mean()) for one in found[IMAGES]] == [0, 1, 2]


def test_other_values_than_were_sent_give_no_result() -> None:
    columns = make_columns(Shape(2, (2, 4)))
    ids = columns["response_ids"]
    wrong = columns | {"response_ids": Ragged.packed(ids.values + 1, ids.lengths)}
    with pytest.raises(ValueError, match="bare brought other values of response_ids"):
        require_same("bare", columns, wrong)


@pytest.mark.parametrize("form", FORMS)
def test_a_stage_computes_the_same_whichever_way_its_columns_take(form: str) -> None:
    store = MemoryStore()
    by_store, by_call = StageWorker(_Handle(store)), StageWorker(_Handle(MemoryStore()))
    batch = make_batch(PARTITION, draw_lengths(LOAD.rows, LOAD.tokens))
    held: dict[str, Column] = {}
    for worker in (by_store, by_call):
        worker.prepare(LOAD)
    for name, stage in STAGES.items():
        by_store.by_store(name, batch, LOAD)
        reads = {field: held[field] for field in reads_of(name, LOAD)}
        _, sent = by_call.by_call(name, FORMS[form].wrap(reads) if reads else None, LOAD, form)
        held |= FORMS[form].unwrap(sent) if sent else {}
        assert set(stage.writes) <= set(held)
    assert IMAGES in held
    found = store.get(batch, ["old_logprobs", "advantages"])
    require_same(form, {name: _ragged(held[name]) for name in found}, found)
    for mine, theirs in zip(by_store.brain.weights(), by_call.brain.weights(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)
        assert mine.grad.abs().sum() > 0


def test_costs_of_a_row_are_measured_beside_held_rows_and_nothing_is_left() -> None:
    found = Holder(MemoryHandle()).measure(held=1500, repeats=2)
    assert set(found) == set(OPERATIONS)
    assert all(seconds > 0 for seconds in found.values())
    store = MemoryStore()
    fill(store, 1500)
    assert store.size() == 1500


def test_responses_grow_from_turn_to_turn_after_the_warmup() -> None:
    turns = [times_of(turn) for turn in range(1 + REPEATS * len(TIMES))]
    assert turns == [TIMES[0], *(times for times in TIMES for _ in range(REPEATS))]


def test_runtimes_that_sampled_other_tokens_give_no_result() -> None:
    check_same({LOCAL: [{"tokens": 5.0}], RAY: [{"tokens": 5.0}]})
    with pytest.raises(ValueError, match="not the same steps"):
        check_same({LOCAL: [{"tokens": 5.0}], RAY: [{"tokens": 6.0}]})


def moved(put: float, get: float) -> list[Measured]:
    return [{"put": put, "get": get, "moved": put + get, "whole": put + get + 0.002}]


def test_the_report_judges_the_stores_by_what_was_measured() -> None:
    raced = {
        OURS: moved(0.01, 0.01),
        LEARNER: moved(0.005, 0.005),
        ADAPTER: moved(0.1, 0.1),
        PLAIN: moved(0.1, 0.1),
        BARE: moved(0.004, 0.001),
    }
    raced |= {name: [{"whole": 0.1}] for name in THROUGH.values()} | {
        MEMCPY: [{"moved": 0.001, "whole": 0.001}]
    }
    goals = {"of_plain": 5.0, "adapter_of_plain": 2.0, "of_bare": 3.0}
    small = {name: [{**one, "whole": 0.2} for one in rounds] for name, rounds in raced.items()}
    found = {"goals": goals, "judged": "512 rows", "bytes": {"512 rows": 26e6, "8 rows": 1e5}}
    told = report_scale.data_plane(
        found | {"raced": {"512 rows": raced, "8 rows": small}, "machine": MACHINE}
    )
    assert f"*{OURS}* is 10.0× (10.0 to 10.0) as fast as {PLAIN} · goal 5× reached" in told
    assert f"*{ADAPTER}* is 1.0× (1.0 to 1.0) as fast as {PLAIN} · goal 2× missed" in told
    assert f"*{OURS}* takes 4.0× (4.0 to 4.0) the time of {BARE} · goal 3× missed" in told
    assert f"*{LEARNER}* takes 2.0× (2.0 to 2.0) the time of {BARE} · goal 3× reached" in told
    assert "at least (8 rows) · goal faster at every size missed" in told


def test_the_report_says_how_much_longer_a_step_on_ray_takes_and_where() -> None:
    local: list[Measured] = [
        {"seconds": 1.0, "cpu_seconds": 1.0, "start": 1.0, "rollout": 0.4, "clear": 0.001}
    ]
    ray: list[Measured] = [
        {"seconds": 1.1, "cpu_seconds": 0.1, "start": 9.0, "rollout": 0.48, "clear": 0.009}
    ]
    raced = {"1 thread, student": {LOCAL: local, RAY: ray}}
    told = report_scale.ray_step({"goal": 0.15, "raced": raced, "machine": MACHINE})
    assert "+10.0% (+10.0% to +10.0%) · goal 15% reached" in told
    assert "| 1 thread, student | 400 → 480 | 1 → 9 |" in told
    assert "busy" not in told


def test_the_report_names_the_operation_that_grows_most_with_the_keys() -> None:
    cheap: Measured = {"put": 1e-6, "get": 1e-6}
    sizes = {"1000": [cheap], "100000": [{"put": 1.5e-6, "get": 3e-6}]}
    told = report_scale.store_keys({"goal": 2.0, "stores": {"ray": sizes}, "machine": MACHINE})
    assert "ray: get grows most, 3.00× · goal 2× missed." in told


def test_the_report_sets_gains_of_a_step_beside_the_published_ones() -> None:
    way = next(iter(THROUGH.values()))
    step: Measured = {"seconds": 1.0, "computing": 0.9, "moving": 0.1}
    raced = {"text": {OURS: [step], way: [{**step, "seconds": 1.25}]}}
    told = report_scale.routed_step({"published": [0.07, 0.492], "raced": raced, "machine": MACHINE})
    assert "| 0.900 | 0.100 | +25% (+25% to +25%) |" in told
    assert "7% to 49.2%" in told


def test_the_report_judges_growth_of_memory_where_the_controller_holds_no_columns() -> None:
    way = next(iter(THROUGH.values()))
    most = {OURS: 1.01e8, way: 2e8}
    peaks = {name: {"1": {"bytes": 1e8}, "16": {"bytes": size}} for name, size in most.items()}
    told = report_scale.controller_memory({"goal": 5e6, "peaks": peaks, "machine": MACHINE})
    assert "| 100 | 101 | +1 MB · goal 5 MB reached |" in told
    assert f"| {way} | 100 | 200 | +100 MB |" in told


class _Handle:
    """A store of this process, as workers are given one."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def connect(self, timeout_s: float) -> MemoryStore:
        return self._store


def _ragged(column: Column) -> Ragged:
    assert isinstance(column, Ragged)
    return column

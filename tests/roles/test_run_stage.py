"""Stages: what is declared is what is read and written."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.dataplane.rows import TOKENS, make_batch, make_columns, same

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.columns import padding_batch
from practicum.dataplane.keys import Tags
from practicum.dataplane.memory_store import MemoryStore
from practicum.dataplane.ragged import Column, Columns, Ragged
from practicum.dataplane.stages import Plan, StageSpec
from practicum.errors import StoreError
from practicum.observe.records.recorder import NOT_RECORDED
from practicum.roles.run_stage import StepInfo, stage, stage_method

BATCH = make_batch(4)
PLAN = Plan(
    stages=(
        StageSpec("old_logprobs", ("response_ids", "reward"), ("old_logprobs", "ref_logprobs")),
        StageSpec("update", ("old_logprobs",), ()),
    )
)


class Learner:
    """Doubles its response ids; `returned` replaces what old_logprobs returns."""

    def __init__(self) -> None:
        self.store, self.plan, self.recorder = MemoryStore(), PLAN, NOT_RECORDED
        self.parallel: object | None = None
        self.seen: list[str] = []
        self.returned: Mapping[str, Column] | None = None
        self.scale, self.ask = 2.0, "old_logprobs"
        self.store.put(BATCH, make_columns(BATCH) | {"reward": torch.zeros(4)})

    @stage("old_logprobs")
    def old_logprobs(self, batch: BatchRef, columns: Columns, step: StepInfo) -> Any:
        """Ids times scale."""
        self.seen = list(columns)
        if self.returned is not None:
            return self.returned
        ids = columns.ragged("response_ids")
        column = Ragged.packed(ids.values.float() * self.scale, ids.lengths)
        return {"old_logprobs": column, "ref_logprobs": column}

    @stage("update")
    def update(self, batch: BatchRef, columns: Columns, step: StepInfo) -> tuple[dict[str, Column], float]:
        values = columns[self.ask]
        assert isinstance(values, Ragged)
        return {}, values.values.sum().item()

    @stage("retired")
    def retired(self, batch: BatchRef, columns: Columns, step: StepInfo) -> dict[str, Column]:
        return {}


@pytest.fixture
def learner() -> Learner:
    return Learner()


def ids_times(scale: float) -> Column:
    ids = make_columns(BATCH)["response_ids"]
    assert isinstance(ids, Ragged)
    return Ragged.packed(ids.values.float() * scale, ids.lengths)


def test_a_stage_reads_and_writes_what_the_plan_says(learner: Learner) -> None:
    assert learner.old_logprobs(StepInfo(BATCH)) is None
    assert learner.seen == ["response_ids", "reward"]
    got = learner.store.get(BATCH, ["old_logprobs", "ref_logprobs"])
    assert same(got, {"old_logprobs": ids_times(2), "ref_logprobs": ids_times(2)})


def test_the_report_reaches_the_caller(learner: Learner) -> None:
    learner.scale = 0.5
    learner.old_logprobs(StepInfo(BATCH))
    half = ids_times(0.5)
    assert isinstance(half, Ragged)
    assert learner.update(StepInfo(BATCH)) == half.values.sum().item()


def test_a_rank_takes_its_own_rows_and_sees_the_whole_batch() -> None:
    class Rank(Learner):
        """Takes the rows after the step's number."""

        @stage("old_logprobs", rows=lambda self, step: step.batch.take(range(step.number, len(step.batch))))
        def logprobs(self, batch: BatchRef, columns: Columns, step: StepInfo) -> Any:
            self.whole = len(step.batch)
            ids = columns.ragged("response_ids")
            column = Ragged.packed(ids.values.float(), ids.lengths)
            return {"old_logprobs": column, "ref_logprobs": column}

    rank = Rank()
    rank.logprobs(StepInfo(BATCH, number=3))
    assert rank.whole == 4
    assert len(rank.store.get(BATCH.take([3]), ["ref_logprobs"])["ref_logprobs"]) == 1
    with pytest.raises(StoreError, match=r"3 of 4"):
        rank.store.get(BATCH, ["ref_logprobs"])


def test_the_method_of_a_stage_is_found_by_its_name(learner: Learner) -> None:
    assert stage_method(learner, "update") == learner.update
    with pytest.raises(TypeError, match=r"Learner has no method decorated with @stage\('pad'\)"):
        stage_method(learner, "pad")


def test_only_the_rows_of_the_batch_are_written(learner: Learner) -> None:
    learner.old_logprobs(StepInfo(BATCH.take([3, 1])))
    with pytest.raises(StoreError, match=r"old_logprobs .*2 of 4 .*prompt 0/.*prompt 2/"):
        learner.store.get(BATCH, ["old_logprobs"])
    rows = BATCH.take([1, 3])
    expected = ids_times(2)
    assert isinstance(expected, Ragged)
    assert same(learner.store.get(rows, ["ref_logprobs"])["ref_logprobs"], expected.select([1, 3]))


def test_a_stage_leaves_the_tags_that_the_store_has(learner: Learner) -> None:
    learner.store.tag("train", {BATCH.keys[0]: Tags(reward=1.0)})
    learner.old_logprobs(StepInfo(BATCH))
    assert learner.store.batch("train").tags == (Tags(reward=1.0), *BATCH.tags[1:])


def test_an_empty_batch_is_not_computed(learner: Learner) -> None:
    learner.seen = ["untouched"]
    assert learner.old_logprobs(StepInfo(BATCH.take([]))) is None
    assert learner.update(StepInfo(BATCH.take([]))) is None
    assert learner.seen == ["untouched"]


def test_a_rank_with_padding_alone_takes_part_and_writes_nothing(learner: Learner) -> None:
    fields = [*TOKENS, "reward", "old_logprobs", "ref_logprobs"]
    filler, columns = padding_batch("train", 2, fields, end_id=7, widths={})
    learner.store.put(filler, columns)
    learner.seen = ["untouched"]
    learner.old_logprobs(StepInfo(filler))
    assert learner.seen == ["untouched"], "one process has nothing to do"
    learner.parallel = object()
    learner.old_logprobs(StepInfo(filler))
    assert learner.seen == ["response_ids", "reward"]
    assert learner.update(StepInfo(filler)) == 0.0, "a row was computed, with the fields that padding has"
    assert learner.old_logprobs(StepInfo(filler.take([]))) is None
    learner.old_logprobs(StepInfo(BatchRef.concat([BATCH, filler])))
    assert same(learner.store.get(BATCH, ["ref_logprobs"])["ref_logprobs"], ids_times(2)), "real rows as ever"


@pytest.mark.parametrize("names", [["ref_logprobs"], ["ref_logprobs", "old_logprobs", "values"], []])
def test_writing_other_columns_than_declared_is_an_error(learner: Learner, names: list[str]) -> None:
    learner.returned = make_columns(BATCH, names)
    with pytest.raises(StoreError, match="stage 'old_logprobs' declares the writes"):
        learner.old_logprobs(StepInfo(BATCH))
    with pytest.raises(StoreError, match="ref_logprobs"):
        learner.store.get(BATCH, ["ref_logprobs"])


def test_asking_for_a_column_that_is_not_declared_names_stage_and_field(learner: Learner) -> None:
    learner.old_logprobs(StepInfo(BATCH))
    learner.ask = "reward"
    with pytest.raises(StoreError, match=r"stage 'update' asked for 'reward'.*: old_logprobs"):
        learner.update(StepInfo(BATCH))


def test_errors_say_in_which_stage_they_happened(learner: Learner) -> None:
    with pytest.raises(StoreError, match=r"old_logprobs .*is missing") as caught:
        learner.update(StepInfo(BATCH))
    assert caught.value.__notes__ == ["in stage 'update' on 4 rows of partition 'train'"]


def test_a_row_cleared_under_a_stage_is_not_made_again(learner: Learner) -> None:
    learner.returned = make_columns(BATCH, ["old_logprobs", "ref_logprobs"])
    absent = make_batch(1, start=9)
    with pytest.raises(StoreError, match="prompt 9/"):
        learner.old_logprobs(StepInfo(absent))
    assert learner.store.size() == 4


def test_a_stage_that_the_plan_left_out_is_an_error(learner: Learner) -> None:
    with pytest.raises(KeyError, match="retired"):
        learner.retired(StepInfo(BATCH))


def test_a_coroutine_is_a_stage_that_is_awaited_or_run_by_its_name() -> None:
    class Slow(Learner):
        stage_s = 30.0

        @stage("old_logprobs")
        async def old_logprobs(self, batch: BatchRef, columns: Columns, step: StepInfo) -> Any:
            await asyncio.sleep(0)
            ids = columns.ragged("response_ids")
            column = Ragged.packed(ids.values.float() * self.scale, ids.lengths)
            return {"old_logprobs": column, "ref_logprobs": column}

    for scale, run in (
        (2.0, lambda role: asyncio.run(role.old_logprobs(StepInfo(BATCH)))),
        (3.0, lambda role: stage_method(role, "old_logprobs")(StepInfo(BATCH))),
    ):
        role = Slow()
        role.scale = scale
        run(role)
        assert same(role.store.get(BATCH, ["old_logprobs"])["old_logprobs"], ids_times(scale))

"""The prompt stream: pure, resumable anywhere, exact in its shares and epochs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.errors import PracticumError
from practicum.recipe.schema.recipe import Task
from practicum.tasks.procedural import split_of
from practicum.tasks.stream import Mixture, eval_prompts, make_stream, share_places, shuffled


def rows_file(folder: Path, rows: int, name: str = "rows.jsonl", **columns: object) -> str:
    path = folder / name
    lines = [json.dumps({"prompt": f"p{n}", "answer": n, **columns}) for n in range(rows)]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> dict[str, Task]:
    folder = tmp_path_factory.mktemp("data")
    return {
        "digits": Task(kind="sort", weight=2.0),
        "rows": Task(file=rows_file(folder, 7)),
        "more": Task(file=rows_file(folder, 11, "more.jsonl"), weight=0.5, domain="maths"),
    }


@given(st.integers(0, 500), st.integers(0, 60), st.integers(0, 60), st.integers(0, 5))
def test_resuming_anywhere_equals_never_stopping(tasks, start, first, second, seed):
    unbroken = make_stream(tasks, seed)
    unbroken.take(start)
    resumed = make_stream(tasks, seed)
    saved = json.loads(json.dumps(unbroken.state_dict()))
    assert saved["position"] == start
    resumed.load_state_dict(saved)
    assert resumed.take(first) + resumed.take(second) == unbroken.take(first + second)


@given(st.integers(0, 10**15), st.integers(0, 5))
def test_a_prompt_is_a_pure_function_of_its_position(tasks, position, seed):
    stream = make_stream(tasks, seed)
    prompt = stream.prompt(position)
    assert prompt.uid == position
    assert stream.position == 0
    assert make_stream(tasks, seed).prompt(position) == prompt


@given(st.integers(0, 1000), st.integers(1, 4))
def test_every_row_is_seen_once_per_epoch(tasks, seed, epochs):
    stream = make_stream(tasks, seed)
    prompts = [p for p in stream.take(4 * 11 * epochs) if p.task == "rows"]
    for epoch in range(len(prompts) // 7):
        seen = prompts[7 * epoch : 7 * (epoch + 1)]
        assert {p.epoch for p in seen} == {epoch}
        assert sorted(p.index for p in seen) == list(range(7))
        assert all(p.content == f"p{p.index}" and p.answer == p.index for p in seen)


def test_shares_follow_the_weights_in_every_batch(tasks):
    stream = make_stream(tasks, seed=3)
    for _ in range(20):
        counts = Counter(p.task for p in stream.take(14))
        assert abs(counts["digits"] - 8) <= 1
        assert abs(counts["rows"] - 4) <= 1
        assert abs(counts["more"] - 2) <= 1
    assert Counter(p.task for p in stream.take(700)) == {"digits": 400, "rows": 200, "more": 100}


def test_the_seed_changes_rows_and_turns(tasks):
    streams = [make_stream(tasks, seed).take(40) for seed in range(5)]
    assert len({tuple(p.task for p in prompts) for prompts in streams}) > 1
    assert len({tuple(p.content for p in prompts) for prompts in streams}) == 5


def test_train_prompts_are_never_eval_prompts(tasks):
    assert all(
        split_of(str(p.content)) == "train" for p in make_stream(tasks, 0).take(100) if p.task == "digits"
    )
    held_out = eval_prompts({"digits": tasks["digits"]}, 100, seed=0)
    assert all(split_of(str(p.content)) == "eval" for p in held_out)


def test_domain_is_the_tasks_then_the_rows_then_the_name(tmp_path):
    own = rows_file(tmp_path, 2, domain="algebra")
    plain = rows_file(tmp_path, 2, "plain.jsonl")

    def domain(task: Task) -> str:
        return make_stream({"name": task}, 0).prompt(0).domain

    assert domain(Task(file=own)) == "algebra"
    assert domain(Task(file=own, domain="maths")) == "maths"
    assert domain(Task(file=plain)) == "name"
    assert domain(Task(kind="sort")) == "name"


def test_rows_keep_all_their_columns(tmp_path):
    prompt = make_stream({"t": Task(file=rows_file(tmp_path, 1, level=4))}, 0).prompt(5)
    assert prompt.row == {"prompt": "p0", "answer": 0, "level": 4}
    assert str(prompt) == "prompt 5 (task t, epoch 5, row 0)"


@pytest.mark.parametrize(
    "change",
    [
        lambda tasks: {**tasks, "digits": Task(kind="sort", weight=3.0)},
        lambda tasks: {**tasks, "digits": Task(kind="sort", weight=2.0, options={"length": 5})},
        lambda tasks: {**tasks, "rows": Task(file=tasks["more"].file)},
    ],
)
def test_resuming_with_other_prompts_is_an_error(tasks, change):
    stream = make_stream(tasks, 0)
    stream.take(5)
    with pytest.raises(PracticumError, match=r"differ from the checkpoint.*position 5"):
        make_stream(change(tasks), 0).load_state_dict(stream.state_dict())
    with pytest.raises(PracticumError, match="differ from the checkpoint"):
        make_stream(tasks, 1).load_state_dict(stream.state_dict())


def test_a_moved_file_is_the_same_file(tasks, tmp_path):
    stream = make_stream({"t": Task(file=rows_file(tmp_path, 3))}, 0)
    copy = make_stream({"t": Task(file=rows_file(tmp_path, 3, "copy.jsonl"))}, 0)
    copy.load_state_dict(stream.state_dict())
    assert copy.take(9) == stream.take(9)


def test_eval_set_is_fixed_distinct_and_numbered(tasks, tmp_path):
    held_out = {
        **tasks,
        "rows": Task(file=rows_file(tmp_path, 3), eval_file=rows_file(tmp_path, 5, "e.jsonl")),
    }
    prompts = eval_prompts(held_out, 4, seed=0)
    assert prompts == eval_prompts(held_out, 4, seed=0)
    assert [p.uid for p in prompts] == list(range(8))
    assert [p.task for p in prompts] == ["digits"] * 4 + ["rows"] * 4
    assert [p.content for p in prompts[4:]] == ["p0", "p1", "p2", "p3"]
    assert len({str(p.content) for p in prompts}) == 8
    assert len(eval_prompts({"rows": held_out["rows"]}, 100, seed=0)) == 5


def test_eval_set_is_smaller_where_options_leave_less():
    prompts = eval_prompts({"t": Task(kind="compare", options={"digits": 1})}, 128, seed=0)
    assert 0 < len(prompts) < 40
    assert len({str(p.content) for p in prompts}) == len(prompts)


def test_file_tasks_without_eval_file_are_not_evaluated(tasks):
    assert {p.task for p in eval_prompts(tasks, 3, seed=0)} == {"digits"}
    assert eval_prompts({"rows": tasks["rows"]}, 3, seed=0) == []


weights = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8)


@given(weights)
def test_no_task_is_left_without_a_place(weights):
    counts = share_places(weights)
    assert min(counts) >= 1
    assert sum(counts) <= 1000
    for weight, count in zip(weights, counts, strict=True):
        # within one place of the exact share, but for places given to tasks that had none
        assert abs(count / sum(counts) - weight / sum(weights)) <= len(weights) / 1000


@pytest.mark.parametrize(
    ("weights", "counts"),
    [([1, 1, 1], [1, 1, 1]), ([0.1, 0.2], [1, 2]), ([2.5], [1]), ([1, 10_000], [1, 999])],
)
def test_simple_shares_are_exact(weights, counts):
    assert share_places(weights) == counts


@given(weights, st.integers(0, 100), st.integers(0, 5000))
def test_indices_within_a_task_have_no_gaps(weights, seed, start):
    mixture = Mixture([f"t{i}" for i in range(len(weights))], weights, seed)
    before = Counter()
    places = [mixture.place(position) for position in range(start + 50)]
    for task, index in places:
        assert index == before[task]
        before[task] += 1


def test_every_epoch_has_its_own_order_of_all_rows():
    orders = [[shuffled(i, 200, 7, "task", epoch) for i in range(200)] for epoch in range(3)]
    assert [sorted(order) for order in orders] == [list(range(200))] * 3
    assert orders[0] != orders[1] != orders[2]


@given(st.integers(10**9, 10**15), st.integers(0, 2**40), st.data())
def test_huge_ranges_are_shuffled_without_collisions(size, seed, data):
    some = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=50))
    images = {shuffled(i, size, seed) for i in some}
    assert len(images) == len(some)
    assert all(0 <= image < size for image in images)


def test_every_place_gets_every_value_about_equally_often():
    counts = Counter(shuffled(i, 5, seed) * 5 + i for seed in range(5000) for i in range(5))
    assert all(850 < counts[cell] < 1150 for cell in range(25))

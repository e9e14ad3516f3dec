from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.dataplane.fields import FIELDS
from practicum.dataplane.stages import Plan, StageSpec, chain, draw, resolve
from practicum.errors import RecipeError
from practicum.recipe.derived import Traits
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.stage_table import make_plan, ratio_source

ROWS = ("prompt_ids", "response_ids", "response_mask")
SAMPLED = (*ROWS, "rollout_logprobs", "plain_logprobs")


def recipe(**sections: Any) -> Recipe:
    base = {"name": "run", "model": {"random_init": {}}, "tasks": {"sort": {"kind": "sort"}}}
    return Recipe.model_validate(base | sections)


def names(plan: Plan) -> list[str]:
    return [stage.name for stage in plan.stages]


def reason(plan: Plan, name: str) -> str:
    return next(why for stage, why in plan.skipped if stage.name == name)


def test_ppo_with_kl_in_the_reward_runs_everything_but_demonstrations() -> None:
    plan = make_plan(
        recipe(algorithm={"advantage": "gae", "kl": {"place": "reward"}}, critic={}, train={"epochs": 2})
    )
    assert names(plan) == [
        *("rollout", "reward", "old_logprobs", "ref_logprobs", "values", "advantages"),
        *("update_critic", "update_student", "sync", "clear"),
    ]
    assert plan["advantages"].writes == ("advantages", "returns")
    assert set(plan["advantages"].reads) == {
        *("response_mask", "reward_tokens", "values", "ref_logprobs", "old_logprobs")
    }
    assert plan["update_critic"].reads == (*ROWS, "values", "returns")
    assert "old_logprobs" in plan["update_student"].reads
    assert "ref_logprobs" not in plan["update_student"].reads
    assert [stage.name for stage, _ in plan.skipped] == ["demonstrate", "teachers", "pad"]


@pytest.mark.parametrize(
    ("algorithm", "train", "source", "runs", "update_reads", "advantage_reads"),
    [
        ({}, {}, "own", False, False, False),
        ({}, {"minibatches": 2}, "old_logprobs", True, True, False),
        ({}, {"epochs": 2}, "old_logprobs", True, True, False),
        ({"old_logprobs": "recompute"}, {}, "old_logprobs", True, True, False),
        ({"old_logprobs": "rollout"}, {}, "rollout_logprobs", False, False, False),
        ({"old_logprobs": "rollout"}, {"epochs": 4}, "rollout_logprobs", False, False, False),
        ({"kl": {"place": "reward"}}, {}, "old_logprobs", True, True, True),
        (
            {"kl": {"place": "reward"}, "old_logprobs": "rollout"},
            *({}, "rollout_logprobs", False, False, False),
        ),
        ({"loss": "reinforce"}, {"epochs": 2}, "own", False, False, False),
        ({"loss": "reinforce", "old_logprobs": "recompute"}, {}, "own", False, False, False),
        ({"loss": "reinforce", "kl": {"place": "reward"}}, *({}, "own", True, False, True)),
        ({"loss": "gspo"}, {"epochs": 2}, "old_logprobs", True, True, False),
        ({"mismatch": "token"}, {}, "old_logprobs", True, True, True),
        ({"loss": "reinforce", "mismatch": "sequence"}, *({"epochs": 2}, "own", True, False, True)),
    ],
)
def test_old_logprobs_are_computed_just_when_they_are_read(
    algorithm: dict[str, Any],
    train: dict[str, Any],
    source: str,
    runs: bool,
    update_reads: bool,
    advantage_reads: bool,
) -> None:
    asked = recipe(algorithm=algorithm, train=train)
    plan = make_plan(asked)
    assert ratio_source(asked) == source
    assert ("old_logprobs" in plan) == runs
    assert ("old_logprobs" in plan["update_student"].reads) == update_reads
    assert ("old_logprobs" in plan["advantages"].reads) == advantage_reads


def test_every_plan_uses_fields_of_the_table_and_writes_before_it_reads() -> None:
    for advantage, loss, place, old, epochs in itertools.product(
        ("gae", "grpo", "remax"),
        ("supervised", "ppo_clip", "reinforce"),
        ("off", "reward", "loss"),
        ("auto", "recompute", "rollout"),
        (1, 2),
    ):
        algorithm = {"loss": loss, "old_logprobs": old, "kl": {"place": place}}
        algorithm["advantage"] = "none" if loss == "supervised" else advantage
        plan = make_plan(recipe(algorithm=algorithm, train={"epochs": epochs}))
        written: set[str] = set()
        for stage in plan:
            assert set(stage.reads) | set(stage.writes) <= set(FIELDS)
            assert len(set(stage.reads)) == len(stage.reads)
            assert set(stage.reads) <= written
            written |= set(stage.writes)


def test_stages_whose_writes_nobody_reads_are_not_run_however_deep() -> None:
    stages = [
        StageSpec("a", (), ("x",)),
        StageSpec("b", ("x",), ("y",)),
        StageSpec("c", ("y",), ("z",)),
        StageSpec("end", (), (), effect=True),
    ]
    plan = resolve(stages, {"z": "because"})
    assert names(plan) == ["end"]
    assert [(stage.name, why) for stage, why in plan.skipped] == [
        ("a", "nobody reads x: b would, but is not run"),
        ("b", "nobody reads y: c would, but is not run"),
        ("c", "nobody reads z: because"),
    ]


def test_a_field_that_is_read_and_rewritten_is_made_twice() -> None:
    stages = [
        StageSpec("make", (), ("x",)),
        StageSpec("better", ("x",), ("x",)),
        StageSpec("end", ("x",), effect=True),
    ]
    plan = resolve(stages)
    assert names(plan) == ["make", "better", "end"]
    assert plan.writer("better", "x") == "make"
    assert plan.writer("end", "x") == "better"


def test_reading_what_nobody_writes_is_an_error_that_names_both() -> None:
    with pytest.raises(RecipeError, match=r"stage end: found that it reads missing"):
        resolve([StageSpec("end", ("missing",), effect=True)])


def test_reading_what_is_written_too_late_names_the_late_one() -> None:
    stages = [StageSpec("end", ("x",), effect=True), StageSpec("late", (), ("x",), effect=True)]
    with pytest.raises(RecipeError, match="late would, but not before it"):
        resolve(stages)


@st.composite
def stage_lists(draw_value: st.DrawFn) -> list[StageSpec]:
    fields = ["u", "v", "w", "x", "y", "z"]
    stages: list[StageSpec] = []
    written: list[str] = []
    for number in range(draw_value(st.integers(1, 7))):
        reads = draw_value(st.lists(st.sampled_from(written), unique=True)) if written else []
        writes = draw_value(st.lists(st.sampled_from(fields), unique=True, max_size=2))
        effect = draw_value(st.booleans())
        stages.append(StageSpec(f"s{number}", tuple(reads), tuple(writes), effect=effect))
        written += writes
    return stages


@given(stage_lists())
def test_a_plan_is_complete_and_holds_nothing_it_could_do_without(stages: list[StageSpec]) -> None:
    plan = resolve(stages)
    kept = list(plan.stages)
    assert [s for s in stages if s in kept] == kept
    assert {s.name for s in kept} | {s.name for s, _ in plan.skipped} == {s.name for s in stages}
    assert all(stage in kept for stage in stages if stage.effect)

    def writer(reader: StageSpec, name: str) -> StageSpec:
        before = stages[: stages.index(reader)]
        return next(stage for stage in reversed(before) if name in stage.writes)

    # What a stage reads comes from the same stage as if all of them ran.
    for stage in kept:
        for name in stage.reads:
            assert plan.writer(stage.name, name) == writer(stage, name).name
    used = {writer(stage, name).name for stage in kept for name in stage.reads}
    assert all(stage.effect or stage.name in used for stage in kept)


def test_the_drawing_shows_who_wrote_what_is_read_and_what_is_left_out() -> None:
    plan = make_plan(recipe(algorithm={"kl": {"place": "loss"}}, train={"minibatches": 4}))
    text = draw(plan)
    for words in (
        "1. rollout",
        "← ref_logprobs   (from ref_logprobs)",
        "← advantages   (from advantages)",
        "→ reward",
        "– values",
        "32 prompts × 8 samples = 256 sessions",
        "4 optimizer steps per step, on 64 sessions each",
    ):
        assert words in text
    assert chain(plan).startswith("rollout → reward → pad → old_logprobs → ref_logprobs → advantages")


def test_only_a_batch_that_is_cut_needs_padding() -> None:
    assert "pad" not in make_plan(recipe())
    assert "takes a batch" in reason(make_plan(recipe()), "pad")
    for train in ({"minibatches": 2}, {"minibatch_size": 16}):
        plan = make_plan(recipe(train=train))
        assert names(plan).index("pad") < names(plan).index("old_logprobs")


def test_rows_of_models_that_see_carry_pictures_and_positions_to_whoever_runs_the_model() -> None:
    asked = recipe(algorithm={"kl": {"place": "loss"}}, train={"minibatches": 2})
    plan = make_plan(asked, Traits(vision=True))
    assert {"position_ids", "multi_modal_inputs"} <= set(plan["rollout"].writes)
    for stage in ("old_logprobs", "ref_logprobs", "update_student"):
        assert {"position_ids", "multi_modal_inputs"} <= set(plan[stage].reads)
    assert not {"position_ids", "multi_modal_inputs"} & set(make_plan(asked)["rollout"].writes)


def test_recorded_experts_are_replayed_by_the_student_alone_and_only_if_reported() -> None:
    asked = recipe(algorithm={"kl": {"place": "loss"}}, train={"minibatches": 2})
    plan = make_plan(asked, Traits(moe=True))
    assert "routed_experts" in plan["rollout"].writes
    assert "routed_experts" in plan["old_logprobs"].reads
    assert "routed_experts" in plan["update_student"].reads
    assert "routed_experts" not in plan["ref_logprobs"].reads
    off = make_plan(recipe(rollout={"engine": "vllm"}), Traits(moe=True))
    assert all("routed_experts" not in (*stage.reads, *stage.writes) for stage in off)

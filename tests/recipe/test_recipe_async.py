"""What a recipe may and may not do with rollout.lag."""

from typing import Any

import pytest

from practicum.dataplane.stages import Plan, StageSpec, check_sides
from practicum.errors import RecipeError, RecipeErrors
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.stage_table import make_plan, ratio_source, student_source

BASE: dict[str, Any] = {"name": "run", "model": {"random_init": {}}, "tasks": {"sort": {"kind": "sort"}}}
LAG = {"rollout": {"lag": 2}}
TEACHER = {"teachers": {"t": {"model": "t"}}, "reward": {"weight": 0.0}}


def recipe(**sections: Any) -> Recipe:
    return load_recipe(BASE | LAG | sections).recipe


@pytest.mark.parametrize(
    ("sections", "path"),
    [
        ({"algorithm": {"loss": "supervised", "advantage": "none"}}, "rollout.lag"),
        ({"algorithm": {"loss": "reinforce"}}, "algorithm.loss"),
        ({"algorithm": {"old_logprobs": "recompute"}}, "algorithm.old_logprobs"),
        ({"rollout": {"lag": 2, "top_p": 0.9}}, "rollout"),
        ({"algorithm": {"old_logprobs": "rollout", "kl": {"place": "reward"}}}, "algorithm.old_logprobs"),
        ({"algorithm": {"loss": "dppo", "mismatch": "token"}}, "algorithm.mismatch"),
        ({"algorithm": {"loss": "dppo", "old_logprobs": "recompute"}}, "algorithm.old_logprobs"),
        (TEACHER | {"distill": {"divergence": "k1_straight", "signal": "sampled"}}, "distill.signal"),
        (
            {
                **{
                    "teachers": {"t": {"student": {"every": 2}, "placement": "own"}},
                    "reward": {"weight": 0.0},
                },
                "distill": {"signal": "top_k"},
            },
            "teachers.t.placement",
        ),
        ({"runtime": {"kind": "ray"}}, "pools.rollout"),
    ],
)
def test_what_is_wrong_with_stale_rows_is_refused(sections: dict[str, Any], path: str):
    with pytest.raises(RecipeErrors) as found:
        recipe(**sections)
    assert path in [error.path for error in found.value.errors]


@pytest.mark.parametrize(
    ("algorithm", "denominator"),
    [
        ({}, "rollout_logprobs"),
        ({"loss": "gspo"}, "rollout_logprobs"),
        ({"loss": "dppo"}, "rollout_logprobs"),
        ({"mismatch": "token"}, "old_logprobs"),
        ({"mismatch": "token", "loss": "reinforce"}, "own"),
        ({"kl": {"place": "reward"}}, "rollout_logprobs"),
    ],
)
def test_a_ratio_knows_who_sampled(algorithm: dict[str, Any], denominator: str):
    asked = recipe(algorithm=algorithm)
    assert ratio_source(asked) == denominator
    needs_now = "kl" in algorithm or "mismatch" in algorithm
    assert (student_source(asked.algorithm) in make_plan(asked)["advantages"].reads) == needs_now


def test_the_plan_has_two_sides():
    plan = make_plan(recipe(**TEACHER, distill={"signal": "top_k"}))
    assert {stage.name: stage.side for stage in plan} == {
        **{"rollout": "sampling", "teachers": "learning"},
        **dict.fromkeys(("update_student", "sync", "clear"), "learning"),
    }
    own = {"t": {"model": "t", "placement": "own"}}
    ahead = make_plan(recipe(**(TEACHER | {"teachers": own}), distill={"signal": "top_k"}))
    assert ahead["teachers"].side == "sampling"


def test_a_stage_that_would_read_the_learners_field_of_another_step_is_refused():
    early = StageSpec("early", ("old_logprobs",), side="sampling")
    with pytest.raises(RecipeError, match="reads or writes old_logprobs on the sampling side"):
        check_sides(Plan((early,), lag=1))
    check_sides(Plan((early,)))

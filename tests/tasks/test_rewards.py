"""Judging: sums of weighted functions, bounded in time, and no failure becomes a silent zero."""

from __future__ import annotations

import asyncio
import re
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from practicum.errors import MissingExtraError, RecipeError, RecipeErrors, RewardError
from practicum.recipe.schema.recipe import Reward, RewardFunction, Task
from practicum.rewards.score_functions import RewardFunctions, RewardResult, RewardSample
from practicum.tasks.builtin import bind

HERE = "reward_functions"


@pytest.fixture(autouse=True)
def _functions_are_in_the_current_folder(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(Path(__file__).parent)])


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """What the reward functions noted down."""
    made: list[str] = []
    judge_for("length")  # puts the folder on sys.path
    import reward_functions  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr(reward_functions, "calls", made)
    return made


def sample(
    response: str, answer: Any = "1249", task: str = "t", row: dict[str, Any] | None = None
) -> RewardSample:
    return RewardSample(
        "sort:4291=", response, answer, row or {}, task, task, "stop", "prompt 7/session 1", 4
    )


def judge_for(*uses: str, on_error: Any = "stop", timeout_s: float = 30.0, **options: Any) -> RewardFunctions:
    functions = [RewardFunction(use=f"{HERE}:{use}", timeout_s=timeout_s, **options) for use in uses]
    return RewardFunctions({"t": Task(kind="sort")}, Reward(functions=functions, on_error=on_error))


def score(judge: RewardFunctions, *samples: RewardSample) -> list[RewardResult]:
    return asyncio.run(judge.score(samples))


def built_in(use: str, response: str, answer: Any, task: Task | None = None, row: Any = None) -> float:
    judge = RewardFunctions(
        {"t": task or Task(file="rows.jsonl")}, Reward(functions=[RewardFunction(use=use)])
    )
    (judged,) = score(judge, sample(response, answer, row=row))
    assert judged.reward is not None
    assert judged.parts == {use: judged.reward}
    return judged.reward


def test_checker_of_a_built_in_task():
    example = bind("t", "sort", {}).example(0, "train", 0)
    assert built_in("checker", f"{example.answer}\n", example.answer, Task(kind="sort")) == 1.0
    assert built_in("checker", example.answer + "0", example.answer, Task(kind="sort")) == 0.0


@pytest.mark.parametrize("use", ["checker", "exact"])
def test_exact_text_of_file_tasks(use):
    assert built_in(use, " 42\n", 42) == 1.0
    assert built_in(use, "42!", "42") == 0.0


def test_contains():
    assert built_in("contains", "it is 42.", " 42 ") == 1.0
    assert built_in("contains", "it is 4 2.", "42") == 0.0


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("He pays $72.", "48+24 = 72\n#### 72", 1.0),
        ("so 24 + 48 = 72\n#### 72", "#### 72", 1.0),
        ("He pays 71.", "48+24 = 72\n#### 72", 0.0),
        ("48 or 24", "48+24 = 72\n#### 72", 0.0),
        ("#### 1000", "#### 1,000", 1.0),
        (r"The answer is \boxed{\frac{2}{4}}.", r"\frac{1}{2}", 1.0),
        (r"$x^2 + 2x + 1$", "(x+1)^2", 1.0),
        (r"$1$", "(x+1)^2", 0.0),
        ("no idea", "3", 0.0),
        ("it is 3", 3, 1.0),
    ],
)
def test_math_verify(response, answer, reward):
    assert built_in("math_verify", response, answer) == reward


def test_math_verify_refuses_an_answer_that_it_cannot_read():
    with pytest.raises(RewardError, match=r"can't read the answer"):
        built_in("math_verify", "3", "#### ")


def test_reasoning_gym_scores_its_own_entries():
    import reasoning_gym

    entry = reasoning_gym.create_dataset("leg_counting", size=1, seed=1)[0]
    for row in (entry, {"dataset": "leg_counting", "entry": entry}):
        assert built_in("reasoning_gym", f" {entry['answer']} ", None, row=row) == 1.0
        tagged = f"let me see... <answer>{entry['answer']}</answer>"
        assert built_in("reasoning_gym", tagged, None, row=row) == 1.0
        assert built_in("reasoning_gym", "no legs", None, row=row) < 0.5


def test_reasoning_gym_needs_to_know_the_dataset():
    with pytest.raises(RewardError, match="needs columns answer and metadata"):
        built_in("reasoning_gym", "4", None, row={"answer": "4"})


@pytest.mark.parametrize(
    ("use", "module", "extra"),
    [("math_verify", "math_verify", "math"), ("reasoning_gym", "reasoning_gym", "reasoning-gym")],
)
def test_missing_extras_are_named_before_the_run(monkeypatch, use, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"practicum\[{extra}\]"):
        built_in(use, "1", "1")


@pytest.mark.parametrize("use", ["length", "slow_length", "around_async"])
def test_sync_and_async_functions_of_one_sample(use):
    judged = score(judge_for(use), *(sample("a" * n) for n in range(9)))
    assert [j.reward for j in judged] == [n / 10 for n in range(9)]
    assert judged[3].parts == {use: 0.3}


def test_batch_functions_are_called_once_for_all(calls):
    judged = score(judge_for("batch_length", batch=True), sample("a"), sample("bbb"))
    assert [j.reward for j in judged] == [1.0, 3.0]
    assert calls == ["batch of 2"]
    judged = score(judge_for("async_batch", batch=True), sample("a"), sample("b"))
    assert [j.reward for j in judged] == [2.0, 2.0]


def test_functions_are_added_with_their_weights():
    functions = [
        RewardFunction(use="checker", weight=2.0),
        RewardFunction(use=f"{HERE}:length", weight=-0.5),
        RewardFunction(use=f"{HERE}:length"),
    ]
    judge = RewardFunctions({"t": Task(kind="sort")}, Reward(functions=functions))
    (judged,) = score(judge, sample("1249"))
    assert judged.parts == {"checker": 1.0, "length": 0.4, "length#2": 0.4}
    assert judged.reward == pytest.approx(2.0 - 0.2 + 0.4)


def test_tasks_have_rewards_of_their_own(calls):
    own = Task(file="x.jsonl", rewards=[RewardFunction(use="contains")])
    shared = RewardFunction(use=f"{HERE}:batch_length", batch=True)
    judge = RewardFunctions(
        {"a": Task(kind="sort"), "b": own, "c": Task(kind="add")}, Reward(functions=[shared])
    )
    judged = score(judge, sample("aa", task="a"), sample("has 1249", task="b"), sample("ccc", task="c"))
    assert [j.parts for j in judged] == [{"batch_length": 2.0}, {"contains": 1.0}, {"batch_length": 3.0}]
    assert calls == ["batch of 2"]


def test_an_attribute_that_a_sample_lacks_names_those_that_it_has():
    with pytest.raises(RewardError) as caught:
        score(judge_for("misnames"), sample("good"))
    assert "response_text" in str(caught.value)
    assert "on_error" not in str(caught.value)


@pytest.mark.parametrize("use", ["picky", "picky_async"])
def test_a_raising_function_stops_the_run_with_its_sample(use):
    with pytest.raises(RewardError) as caught:
        score(judge_for(use), sample("good"), sample("bad"))
    text = str(caught.value)
    assert f"reward {HERE}:{use} raised ValueError: I do not like it" in text
    assert "prompt 7/session 1" in text
    assert "'sort:4291='" in text
    assert "'bad'" in text
    assert "1249" in text
    assert "on_error: skip" in text
    for told in (text, caught.value.details):
        assert re.search(r'File ".*tests/tasks/reward_functions.py", line \d+, in picky\n', told)
        assert 'raise ValueError("I do not like it")' in told
    assert caught.value.details.endswith("ValueError: I do not like it")


@pytest.mark.parametrize("use", ["picky", "picky_async"])
def test_or_the_sample_is_left_out_and_counted_never_zero(use):
    judged = score(judge_for(use, on_error="skip"), sample("a"), sample("bad"), sample("b"))
    assert [j.reward for j in judged] == [1.0, None, 1.0]
    told = f"reward {use} raised ValueError: I do not like it (reward_functions.py, line "
    assert (judged[1].failure or "").startswith(told)
    assert (judged[1].trace or "").endswith("ValueError: I do not like it")
    assert judged[0].failure is None


def test_a_function_that_exits_does_not_take_the_run_with_it():
    with pytest.raises(RewardError, match="raised SystemExit: bye"):
        score(judge_for("leaves"), sample("a"))


@pytest.mark.parametrize("use", ["stuck", "stuck_async"])
def test_a_late_function_is_given_up_and_the_others_still_judged(use, calls):
    judge = judge_for(use, on_error="skip", timeout_s=0.2)
    judged = score(judge, sample("a"), sample("bad"), sample("b"))
    assert [j.reward for j in judged] == [1.0, None, 1.0]
    assert judged[1].failure == f"reward {use} did not answer within 0.2 s"
    with pytest.raises(RewardError, match=r"did not answer within 0\.2 s"):
        score(judge_for(use, timeout_s=0.2), sample("bad"))


def test_threads_of_stuck_functions_do_not_keep_the_process_alive():
    score(judge_for("stuck", on_error="skip", timeout_s=0.05), sample("bad"))
    left = [t for t in threading.enumerate() if t.name == "practicum-reward"]
    assert left
    assert all(thread.daemon for thread in left)


def test_a_function_that_swallows_its_cancellation_is_left_behind(calls):
    (judged,) = score(judge_for("deaf", on_error="skip", timeout_s=0.05), sample("a"))
    assert judged.failure == "reward deaf did not answer within 0.05 s"
    assert "cancelled" in calls


def test_scoring_can_be_cancelled():
    async def cancel() -> None:
        task = asyncio.ensure_future(judge_for("stuck_async").score([sample("bad")]))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(cancel())


@pytest.mark.parametrize(
    ("response", "reward"),
    [("true", 1.0), ("int", 2.0), ("numpy", 0.5), ("numpy bool", 1.0), ("torch", 0.25)],
)
def test_numbers_of_all_kinds_are_rewards(response, reward):
    (judged,) = score(judge_for("value"), sample(response))
    assert type(judged.reward) is float
    assert judged.reward == reward


@pytest.mark.parametrize(
    "response", ["nan", "inf", "huge", "huge int", "none", "text", "list", "complex", "vector"]
)
def test_what_is_no_finite_number_is_a_failure(response):
    with pytest.raises(RewardError, match=r"value returned .*, expected a finite number"):
        score(judge_for("value"), sample(response))
    (judged,) = score(judge_for("value", on_error="skip"), sample(response))
    assert judged.reward is None
    assert judged.failure is not None


def test_a_batch_of_the_wrong_size_fails_as_a_whole():
    with pytest.raises(RewardError, match=r"returned 1 values, .* \(for a batch of 2 samples\)"):
        score(judge_for("batch_too_few", batch=True), sample("a"), sample("b"))
    judged = score(judge_for("batch_too_few", batch=True, on_error="skip"), sample("a"), sample("b"))
    assert [j.reward for j in judged] == [None, None]


def test_one_bad_value_of_a_batch_fails_its_sample_only():
    judge = judge_for("batch_with_nan", batch=True, on_error="skip")
    assert [j.reward for j in score(judge, sample("a"), sample("bad"))] == [1.0, None]


def refuse(use: str, **options: Any) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        RewardFunctions({"t": Task(kind="sort")}, Reward(functions=[RewardFunction(use=use, **options)]))
    return caught.value


def test_names_that_lead_nowhere_are_recipe_errors():
    assert refuse("exakt").suggestion == "did you mean exact?"
    assert "package.module:function" in str(refuse("some.module"))
    missing = refuse("no_such_module:f")
    assert missing.path == "reward.functions[0].use"
    assert f"no module no_such_module exists in {Path.cwd()}" in str(missing)
    assert refuse(f"{HERE}:lenght").suggestion == f"did you mean {HERE}:length?"
    assert "a str" in str(refuse(f"{HERE}:BUILT_AT"))
    assert "a type" in str(refuse(f"{HERE}:Weigher"))


def test_a_module_that_raises_is_a_recipe_error(tmp_path, monkeypatch):
    (tmp_path / "broken_rewards.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.chdir(tmp_path)
    assert "RuntimeError: no licence" in str(refuse("broken_rewards:f"))


def test_a_misspelt_module_and_one_that_misses_another_are_reported_apart(tmp_path, monkeypatch):
    (tmp_path / "my_scores.py").write_text("import no_such_package")
    monkeypatch.chdir(tmp_path)
    assert "did you mean my_scores:f?" in refuse("my_score:f").suggestion
    assert "No module named 'no_such_package'" in refuse("my_scores:f").suggestion


def test_built_in_rewards_take_no_batches():
    assert refuse("exact", batch=True).path == "reward.functions[0].batch"


def test_all_bad_names_are_shown_together():
    own = Task(kind="sort", rewards=[RewardFunction(use="contain")])
    with pytest.raises(RecipeErrors) as caught:
        RewardFunctions({"t": own}, Reward(functions=[RewardFunction(use="exakt")]))
    assert [e.path for e in caught.value.errors] == ["reward.functions[0].use", "tasks.t.rewards[0].use"]


def test_trls_signature_is_refused_with_the_lines_that_adapt_it():
    with pytest.raises(RecipeError) as caught:
        judge_for("trl_reward")
    assert caught.value.path == "reward.functions[0].use"
    _, *wrapper = caught.value.suggestion.splitlines()
    from reward_functions import trl_reward  # pyright: ignore[reportMissingImports]

    names: dict[str, Any] = {"trl_reward": trl_reward}
    exec(textwrap.dedent("\n".join(wrapper)), names)
    assert names["trl_reward_reward"](sample("7", row={"solution": "7"})) == 1.0
    assert names["trl_reward_reward"](sample("8", row={"solution": "7"})) == 0.0


def test_a_function_of_two_arguments_is_refused_before_it_is_called():
    with pytest.raises(RecipeError) as caught:
        judge_for("two_arguments", on_error="skip")
    assert caught.value.path == "reward.functions[0].use"
    assert "on_error" not in str(caught.value)

"""What users' own code does wrong is described with their frames, whatever it is made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from practicum.cli import app
from practicum.concurrency.event_loop import run_async
from practicum.errors import RecipeError, RewardError
from practicum.recipe.schema.recipe import Reward, RewardFunction, Task
from practicum.recipe.schema.rollout_sections import ToolSection
from practicum.sessions.tools.toolbox import Toolbox
from practicum.tasks.rewards import RewardFunctions, RewardSample
from practicum.trainer.run import summary, train_loaded
from practicum.user_code import error_line, frames, repr_of, text_of, trace
from tests.hostile import ERRORS, ZOO
from tests.trainer.recipes import TINY, tiny


def sample(text: str) -> RewardSample:
    return RewardSample("p", text, "a", {}, "t", "t", "stop", "prompt 3/session 1/trajectory 0", 1)


@pytest.mark.parametrize("use", ["judge", "judge_async", "judge_batch"])
def test_no_reward_passes_through_or_becomes_a_number(use: str):
    function = RewardFunction(use=f"tests.hostile:{use}", batch=use == "judge_batch")
    task = {"t": Task(kind="copy", rewards=[function])}
    for what in ZOO:
        (judged,) = run_async(
            RewardFunctions(task, Reward(on_error="skip")).score([sample(what)]), timeout=30, owner="test"
        )
        assert judged.reward is None, what
        assert len((judged.failure or "").encode().splitlines()) == 1, what
        assert judged.trace is not None or what.startswith("return"), what
        with pytest.raises(RewardError) as caught:
            run_async(RewardFunctions(task, Reward()).score([sample(what)]), timeout=30, owner="test")
        shown = str(caught.value)
        assert (shown + caught.value.details).encode()
        assert len(shown.splitlines()) < 25
        assert f"reward tests.hostile:{use} " in shown
        assert "prompt 3/session 1" in shown
        assert "hostile.py" in shown or what.startswith("return"), what


def test_a_masked_value_is_named():
    task = {"t": Task(kind="copy", rewards=[RewardFunction(use="tests.hostile:judge")])}
    with pytest.raises(RewardError, match="returned masked, expected a finite number"):
        run_async(RewardFunctions(task, Reward()).score([sample("return:masked")]), timeout=30, owner="test")
    with pytest.raises(RewardError, match=r"device='meta'.*, expected a finite number"):
        run_async(RewardFunctions(task, Reward()).score([sample("return:meta")]), timeout=30, owner="test")


def test_no_tool_passes_through():
    box = Toolbox([ToolSection(use="tests.hostile:tool")])
    for what in ZOO:
        ran = run_async(box.run("tool", {"what": what}), timeout=30, owner="test")
        assert ran.text.encode()
        if what.startswith("raise"):
            assert not ran.ok
            assert ran.trace is not None
            assert "hostile.py" in ran.trace
            assert "raise ERRORS[name]()" in ran.trace


@pytest.mark.parametrize("name", ERRORS)
def test_anything_is_described(name: str):
    try:
        raise ERRORS[name]()
    except BaseException as error:
        texts = [error_line(error), frames(error), trace(error), text_of(error), repr_of(error)]
    assert "".join(texts).encode()
    assert "raise ERRORS[name]()" in texts[1]
    assert "raise ERRORS[name]()" in texts[2]


def test_deep_stacks_and_syntax_errors_fit_on_the_screen(tmp_path: Path):
    def deeper(n: int) -> int:
        return 1 // 0 if n == 0 else [shallow, deeper][n % 2](n - 1)

    def shallow(n: int) -> int:
        return deeper(n)

    with pytest.raises(ZeroDivisionError) as raised:
        deeper(60)
    shown, whole = frames(raised.value), trace(raised.value)
    assert shown.count("File ") == 8
    assert "more" in shown
    assert whole.count("File ") > 60
    (tmp_path / "b.py").write_text("x = (1,\n")
    with pytest.raises(SyntaxError) as caught:
        compile((tmp_path / "b.py").read_text(), str(tmp_path / "b.py"), "exec")
    assert 'b.py", line 1' in frames(caught.value)
    assert "x = (1," in frames(caught.value)


SCORE = """
def helper(row):
    return row["missing"]

def score(sample):
    return helper(sample.row)
"""


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data and a reward that raises, as a stranger has it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / f"myreward_{tmp_path.name}.py".replace("-", "_")).write_text(SCORE)
    return tmp_path


def module(folder: Path) -> str:
    return f"myreward_{folder.name}".replace("-", "_")


def test_check_calls_a_reward_once_and_shows_where_it_raised(own_folder: Path):
    tiny(own_folder, tasks={"mine": {"file": "rows.jsonl"}})
    use = f"reward.functions=[{{use: '{module(own_folder)}:score'}}]"
    ran = CliRunner().invoke(app, ["check", "recipe.yaml", "--set", use])
    assert ran.exit_code == 2
    assert "raised KeyError: 'missing'" in ran.output
    assert 'line 3, in helper\n      return row["missing"]' in ran.output
    assert "practicum/tasks" not in ran.output


def test_an_import_error_shows_the_line(own_folder: Path):
    (own_folder / f"{module(own_folder)}.py").write_text("\n\nimport nowhere_at_all\n")
    tiny(own_folder, tasks={"mine": {"file": "rows.jsonl"}})
    use = f"reward.functions=[{{use: '{module(own_folder)}:score'}}]"
    ran = CliRunner().invoke(app, ["check", "recipe.yaml", "--set", use])
    assert ran.exit_code == 2
    assert f'{module(own_folder)}.py", line 3, in <module>' in ran.output
    assert "import nowhere_at_all" in ran.output
    assert "importlib" not in ran.output


ONE_STEP = TINY["train"] | {"steps": 1, "prompts": 2}


def test_a_reward_that_raises_in_a_run_is_in_the_log_with_its_frames(tmp_path: Path):
    loaded = tiny(
        tmp_path, "reward.functions=[{use: 'tests.hostile:always'}]", "eval.greedy=false", train=ONE_STEP
    )
    with pytest.raises(RewardError, match=r"hostile\.py"):
        train_loaded(loaded, tmp_path / "run")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert 'raise ERRORS["surrogate"]() from Mute()' in log
    assert "direct cause" in log
    assert "tests.hostile.Mute" in log


def test_loops_and_tools_that_raise_are_told_once_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    agent = {"loop": "tests.hostile:hostile_loop"}
    loaded = tiny(tmp_path, "eval.greedy=false", agent=agent, train=ONE_STEP)
    outcome = train_loaded(loaded, tmp_path / "run")
    log, screen = (tmp_path / "run" / "log.txt").read_text(), capsys.readouterr().out
    assert log.count("in meet") == 1
    assert screen.count("in meet") == 1
    text = summary(outcome, None)
    assert "failed 2×: agent loop tests.hostile:hostile_loop raised Mute" in text
    assert "failed 2×: agent loop tests.hostile:hostile_loop returned" in text

    agent = {"loop": "tests.hostile:uses_a_tool", "tools": [{"use": "tests.hostile:tool"}]}
    loaded = tiny(tmp_path, "eval.greedy=false", agent=agent, train=ONE_STEP)
    outcome = train_loaded(loaded, tmp_path / "tools")
    assert "in meet" in (tmp_path / "tools" / "log.txt").read_text()
    assert "a tool in prompt 0" in capsys.readouterr().out
    assert outcome.failures == ()


def test_a_loop_that_calls_a_tool_without_any_stops_the_run(tmp_path: Path):
    loaded = tiny(tmp_path, agent={"loop": "tests.hostile:needs_a_tool"}, train=ONE_STEP)
    with pytest.raises(RecipeError, match=r"agent.tools: found none, and agent.loop .* calls 'search'"):
        train_loaded(loaded, tmp_path / "run")

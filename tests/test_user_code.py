"""What users' own code does wrong is described with their frames, whatever it is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from practicum.cli import app
from practicum.errors import RecipeError, RewardError
from practicum.trainer.run import summary, train_loaded
from practicum.user_code import frames, raised_at, trace
from tests.trainer.recipes import TINY, tiny


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


def test_an_error_inside_a_library_names_the_user_s_line(tmp_path: Path):
    file = tmp_path / "agent.py"
    file.write_text("import json\n\ndef read(text):\n    return json.loads(text)\n")
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    with pytest.raises(ValueError, match="Expecting") as raised:
        names["read"]("{")
    assert raised_at(raised.value) == " (agent.py, line 4)"


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
    loaded = tiny(tmp_path, "reward.functions=[{use: 'tests.hostile:always'}]", "eval.rows=0", train=ONE_STEP)
    with pytest.raises(RewardError, match=r"hostile\.py"):
        train_loaded(loaded, tmp_path / "run")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert 'raise ValueError("always") from KeyError' in log
    assert "direct cause" in log


def test_loops_and_tools_that_raise_are_reported_once_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    agent = {"loop": "tests.hostile:hostile_loop"}
    loaded = tiny(tmp_path, "eval.rows=0", agent=agent, train=ONE_STEP)
    outcome = train_loaded(loaded, tmp_path / "run")
    log, screen = (tmp_path / "run" / "log.txt").read_text(), capsys.readouterr().out
    assert log.count("in meet") == 1
    assert screen.count("in meet") == 1
    text = summary(outcome)
    assert "failed 2×: agent loop tests.hostile:hostile_loop raised ValueError: a b" in text
    assert "failed 2×: agent loop tests.hostile:hostile_loop returned" in text

    agent = {"loop": "tests.hostile:uses_a_tool", "tools": [{"use": "tests.hostile:tool"}]}
    loaded = tiny(tmp_path, "eval.rows=0", agent=agent, train=ONE_STEP)
    outcome = train_loaded(loaded, tmp_path / "tools")
    assert "in meet" in (tmp_path / "tools" / "log.txt").read_text()
    screen = capsys.readouterr().out
    assert "a tool in prompt 0" in screen
    assert "src/practicum" not in screen, "frames of practicum are only in the log"
    assert outcome.failures == ()


def test_a_loop_that_calls_a_tool_without_any_stops_the_run(tmp_path: Path):
    loaded = tiny(tmp_path, agent={"loop": "tests.hostile:needs_a_tool"}, train=ONE_STEP)
    with pytest.raises(RecipeError, match=r"agent.tools: found none, and agent.loop .* calls 'search'"):
        train_loaded(loaded, tmp_path / "run")

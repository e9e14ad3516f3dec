"""Functions as values of recipes: of modules, scripts and notebook cells, locally and on Ray."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import practicum as pr
from practicum.recipe.user_functions import import_object, name_function
from tests.trainer.recipes import TINY

SCRIPT = '''
import sys
import practicum as pr
from practicum.parts import AdvantageResult, advantage, session_scores, to_tokens
from practicum.parts import policy_terms, token_log_ratios

SCALE = 0.5

def letters(sample):
    return SCALE * (len(sample.response_text) % 3)

@advantage(compares_groups=True, reads=[])
def centred(inputs):
    score_S, _ = session_scores(inputs)
    return AdvantageResult(to_tokens(score_S - score_S.mean(), inputs))

def reinforce(inputs):
    log_ratio_N = token_log_ratios(inputs)
    return policy_terms(inputs, -inputs.advantages_N * log_ratio_N.exp(), log_ratio_N)

def echo(text: str) -> str:
    """Return the text."""
    return text

async def turn(session):
    await session.generate()

recipe = RECIPE
recipe["algorithm"] = {"advantage": centred, "loss": reinforce}
recipe["reward"] = {"functions": [letters, {"use": lambda sample: 0.0, "weight": 0.5}]}
recipe["agent"] = {"loop": turn, "tools": [echo]}
loaded = pr.load_recipe(recipe, set={"runtime.kind": sys.argv[1], **SET})
run = pr.train(loaded, out=sys.argv[1], quiet=True)
print(*sorted(name for name in run.metrics[-1] if name.startswith("reward/part/")))
'''


def reward(sample: Any) -> float:
    return float(len(sample.response_text))


def make_reward(value: float) -> Any:
    def constant(sample: Any) -> float:
        return value

    return constant


def test_a_function_of_a_module_is_named_by_its_file():
    use = name_function(reward)
    assert use == f"{Path(__file__).parents[1]}/tests.test_api_functions:reward"
    assert import_object(use, "reward") is reward
    assert name_function(json.dumps) == "json:dumps"


def test_other_functions_are_kept_and_never_mixed_up():
    ones = [make_reward(1.0), make_reward(2.0), lambda sample: 3.0, functools.partial(pow, 2)]
    uses = [name_function(function) for function in ones]
    assert len(set(uses)) == len(ones)
    assert [import_object(use, "reward") for use in uses] == ones
    assert uses == [name_function(function) for function in ones]


def test_a_cell_that_runs_again_names_the_same_function():
    cell, names = "def scored(sample):\n    return 1.0\n", {"__name__": "__main__"}
    exec(cell, names)
    first = name_function(names["scored"])
    exec(cell, names)
    assert name_function(names["scored"]) == first == "__main__:scored"
    exec(cell.replace("1.0", "2.0"), names)
    assert name_function(names["scored"]) == "__main__:scored_2"


def test_a_recipe_takes_functions_wherever_it_takes_names():
    loaded = pr.load_recipe(TINY | {"reward": make_reward(1.0)}, set={"agent.loop": make_reward, "seed": 1})
    assert loaded.recipe.reward.functions[0].use.startswith("__main__:constant")
    assert loaded.recipe.agent.loop == name_function(make_reward)


def test_a_function_of_a_script_that_is_not_running_is_refused():
    with pytest.raises(pr.PracticumError) as raised:
        pr.check(TINY | {"reward": "__main__:nowhere"})
    assert "reward.functions[0].use" in str(raised.value)


def test_functions_of_a_script_train_here(tmp_path: Path):
    assert run_script(tmp_path, "local") == ["reward/part/lambda", "reward/part/letters"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_functions_of_a_script_train_on_ray(tmp_path: Path):
    assert run_script(tmp_path, "ray", **{"runtime.cpus": 4}) == ["reward/part/lambda", "reward/part/letters"]


def run_script(folder: Path, kind: str, **changes: Any) -> list[str]:
    recipe = TINY | {"train": TINY["train"] | {"steps": 1}, "eval": {"rows": 2}}
    text = SCRIPT.replace("RECIPE", repr(recipe)).replace("SET", repr(changes))
    (folder / "script.py").write_text(text)
    command = [sys.executable, "script.py", kind]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "__main__:letters" in (folder / kind / "recipe.yaml").read_text()
    return done.stdout.split()


def test_what_ray_s_workers_cannot_be_passed_is_refused():
    lock = threading.Lock()

    def held(sample: Any) -> float:
        return float(lock.locked())

    with pytest.raises(pr.PracticumError) as raised:
        pr.check(TINY | {"runtime": {"kind": "ray", "cpus": 4}, "reward": held})
    assert "runtime.kind" in str(raised.value)
    assert "held" in str(raised.value)


def test_rewards_of_a_loop_that_replace_the_recipe_s_are_said(tmp_path: Path):
    async def paid(session: Any) -> Any:
        await session.generate()
        return None, 1.0

    short = TINY | {"train": TINY["train"] | {"steps": 1}, "eval": {"rows": 0}}
    for name, loop in (("paid", paid), ("plain", "single_turn")):
        pr.train(short | {"agent": {"loop": loop}}, out=tmp_path / name, quiet=True)
        said = "agent.loop" in (tmp_path / name / "log.txt").read_text()
        assert said == (name == "paid")

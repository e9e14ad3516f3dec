"""Hostile code and rows: what fails is named by function, prompt and session, and the rest continues."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from practicum.concurrency import event_loop as events
from practicum.concurrency.event_loop import run_async
from practicum.concurrency.gather import gather_all
from practicum.errors import DeadlineError, PracticumError
from practicum.recipe.schema.recipe import Reward, RewardFunction, Task
from practicum.recipe.schema.rollout_sections import ToolSection
from practicum.recipe.text.show_recipe import resolved_yaml
from practicum.rewards.score_functions import RewardFunctions, RewardSample
from practicum.sessions.tools.toolbox import Toolbox, ToolOutcome
from practicum.trainer.run import train_loaded
from practicum.trainer.run_folder import RunFolder, choose_folder
from tests import hostile
from tests.cluster import local_ray
from tests.hostile import CASES, FAULTS, SESSIONS
from tests.trainer.recipes import TINY, tiny

ZOO_RUN: dict[str, Any] = {
    "agent": {"loop": "tests.hostile:zoo_loop", "tools": [{"use": "tests.hostile:tool"}]},
    "reward": {
        "functions": [{"use": "tests.hostile:zoo_reward"}, {"use": "tests.hostile:zoo_reward_async"}],
        "on_error": "skip",
    },
    "rollout": {"samples": SESSIONS, "max_new_tokens": 4, "max_num_seqs": 64},
    "train": {"steps": 1, "prompts": 1, "lr": 1e-3},
    "eval": {"rows": 0},
    "track": {"record": 1000},
}
ON_RAY = {"kind": "ray", "threads": 1}
ONE_STEP = TINY["train"] | {"steps": 1, "prompts": 2}


def assert_named(run: Path) -> None:
    """Each session of the zoo failed with a line that names whose fault it is; the others have rewards."""
    answers = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [answer["session"] for answer in answers] == list(range(SESSIONS))
    log = (run / "log.txt").read_text()
    for answer, (where, what) in zip(answers, CASES, strict=False):
        failure = answer["failure"]
        assert failure is not None, (where, what)
        assert len(failure.splitlines()) == 1
        whose = {"reward": "reward zoo_reward ", "async reward": "reward zoo_reward_async "}
        assert failure.startswith(whose.get(where, "agent loop tests.hostile:zoo_loop ")), (where, what)
        assert where != "fault" or re.search(FAULTS[what][1], failure), failure
        assert f"failed: prompt 0/session {answer['session']}/trajectory 0: {failure}" in log
    assert [answer["reward"] for answer in answers[len(CASES) :]] == [2.0] * 4
    assert all(answer["tool_errors"] for answer in answers[len(CASES) :])


def test_nothing_of_the_zoo_ends_a_run(tmp_path: Path):
    train_loaded(tiny(tmp_path, **ZOO_RUN), tmp_path / "run")
    assert_named(tmp_path / "run")


@pytest.mark.long
def test_nothing_of_the_zoo_ends_a_run_on_ray(tmp_path: Path):
    pytest.importorskip("ray")
    with local_ray():
        train_loaded(tiny(tmp_path, **ZOO_RUN, runtime=ON_RAY), tmp_path / "run")
        assert_named(tmp_path / "run")
        for name, sections, named in (
            ("loop", {"agent": {"loop": "tests.hostile:blocking_loop"}}, BLOCKED_LOOP),
            ("reward", {"reward": {"functions": [{"use": "tests.hostile:blocking_reward"}]}}, BLOCKED_REWARD),
        ):
            with pytest.raises(DeadlineError, match=named):
                train_loaded(tiny(tmp_path, **blocking(**sections), runtime=ON_RAY), tmp_path / name)


BLOCKED_LOOP = (
    r"rollout \(train\) was not done after 2 s: agent loop tests\.hostile:blocking_loop in prompt \d+/"
    r"session \d+ blocks the event loop\n(.*\n)*.*hostile\.py\", line \d+, in block\n"
)
BLOCKED_REWARD = (
    r"reward tests\.hostile:blocking_reward of prompt \d+/session \d+/trajectory \d blocks the event"
)


def blocking(**sections: Any) -> dict[str, Any]:
    """A recipe with two seconds for a rollout."""
    rollout = {"samples": 2, "max_new_tokens": 4, "deadline_s": 2}
    return {"rollout": rollout, "train": ONE_STEP, "eval": {"rows": 0}, **sections}


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What blocks the event loop is let go at the end."""
    monkeypatch.setattr(events, "_ANSWER_S", 0.5)
    hostile.RELEASED.clear()
    yield
    hostile.RELEASED.set()
    run_async(asyncio.sleep(0.1), timeout=60, owner="the end of what was blocked")


def test_a_loop_that_blocks_the_event_loop_is_named_at_the_deadline(tmp_path: Path, released: None):
    loaded = tiny(tmp_path, **blocking(agent={"loop": "tests.hostile:blocking_loop"}))
    with pytest.raises(DeadlineError, match=BLOCKED_LOOP):
        train_loaded(loaded, tmp_path / "run")


def test_a_reward_that_blocks_the_event_loop_is_named(released: None):
    task = Task(kind="copy", rewards=[RewardFunction(use="tests.hostile:blocking_reward")])
    sample = RewardSample("p", "r", "a", {}, "t", "t", "stop", "prompt 3/session 1/trajectory 0", 1)
    work = RewardFunctions({"t": task}, Reward()).score([sample])
    with pytest.raises(DeadlineError, match=rf"^test was not done after 0.5 s: {BLOCKED_REWARD}"):
        run_async(work, timeout=0.5, owner="test")


def test_a_tool_that_blocks_the_event_loop_is_named_and_work_that_never_began_is_closed(released: None):
    async def loop() -> list[ToolOutcome]:
        return await gather_all([box.run("blocking_tool", {"what": "x"})])

    box = Toolbox([ToolSection(use="tests.hostile:blocking_tool")])
    with pytest.raises(DeadlineError, match="tool blocking_tool, called by a test blocks the event loop"):
        run_async(loop(), timeout=0.5, owner="a test")
    never = loop()
    with pytest.raises(
        DeadlineError, match=r"another was not done after 0.1 s: tool blocking_tool, called by a"
    ):
        run_async(never, timeout=0.1, owner="another")
    assert inspect.getcoroutinestate(never) == inspect.CORO_CLOSED


def killed_at(event: int, folder: Path, recipe: Any) -> bool:
    """Begin a run in another process that is killed at its event number `event`; whether it was."""
    pid = os.fork()
    if pid == 0:
        seen = 0

        def watch(name: str, args: Any) -> None:
            nonlocal seen
            writes = name == "open" and isinstance(args[1], str) and set(args[1]) & set("wax")
            if writes or name in ("os.mkdir", "os.rename", "os.rmdir"):
                seen += 1
                if seen == event:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        RunFolder(folder).replace(resolved_yaml(recipe))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def test_a_run_that_was_killed_as_it_began_is_known_by_its_first_file(tmp_path: Path):
    recipe = tiny(tmp_path).recipe
    event, used = 1, 0
    while killed_at(event, folder := tmp_path / f"run {event}", recipe):
        is_used = (folder / "versions.json").exists()
        used += is_used
        choose_folder(folder, resume=False, fresh=True)
        with pytest.raises(
            PracticumError, match="start again with --fresh" if is_used else "no run to resume"
        ):
            choose_folder(folder, resume=True, fresh=False)
        if is_used:
            with pytest.raises(PracticumError, match="already holds a run"):
                choose_folder(folder, resume=False, fresh=False)
        else:
            choose_folder(folder, resume=False, fresh=False)
        event += 1
    assert event > 4
    assert used >= 2


def test_fresh_that_is_killed_leaves_no_half_of_a_checkpoint(tmp_path: Path):
    recipe = tiny(tmp_path).recipe
    event = 1
    while True:
        folder = tmp_path / f"run {event}"
        RunFolder(folder).replace(resolved_yaml(recipe))
        for name in ("student", "critic"):
            (folder / "checkpoints" / "step-000001" / name).mkdir(parents=True)
        if not killed_at(event, folder, recipe):
            break
        held = list((folder / "checkpoints").glob("step-*/*"))
        assert len(held) in (0, 2)
        choose_folder(folder, resume=False, fresh=True)
        event += 1
    assert event > 4

"""Programs and functions as agents: what they are given, what they return, and what is left of them."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from practicum.concurrency.event_loop import run_async
from practicum.errors import EngineError, RecipeError
from practicum.recipe.schema.rollout_sections import Agent
from practicum.sessions.attempts import AttemptResult, find_loop, run_attempt
from practicum.sessions.endpoint.other_python import close_processes
from practicum.sessions.endpoint.programs import AgentTask
from practicum.sessions.session import Session
from tests.sessions.endpoint.driven import Writer, chat_session

ASK = """
import json, os, sys, urllib.request
def ask(messages, key=os.environ["OPENAI_API_KEY"], url=os.environ["OPENAI_BASE_URL"]):
    body = json.dumps({"messages": messages}).encode()
    request = urllib.request.Request(url + "/chat/completions", body, {"Authorization": "Bearer " + key})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
"""


def attempt(loop: Any, policy: Any = None, deadline_s: float = 60.0) -> AttemptResult:
    agent = Agent.model_validate({"loop": loop})

    def make(number: int) -> Session:
        return chat_session(policy or Writer(texts=["ab"]), agent={"loop": loop}, attempt=number)

    return run_async(run_attempt(find_loop(agent.loop), agent, make, deadline_s), timeout=90, owner="test")


def python(program: str, *arguments: str) -> dict[str, list[str]]:
    return {"command": [sys.executable, "-c", ASK + program, *arguments]}


@pytest.mark.parametrize(
    ("program", "argument"),
    [
        ("prompt = sys.argv[1]", "{prompt}"),
        ("prompt = open(sys.argv[1]).read()", "{prompt_file}"),
        ("prompt = sys.stdin.read()", "-"),
    ],
)
def test_a_program_gets_its_prompt_and_prints_its_reward(program: str, argument: str):
    says = f"\n{program}\nask([{{'role': 'user', 'content': prompt}}])\nprint('{{\"reward\": 0.25}}')"
    ended = attempt(python(says, argument))
    assert ended.failure is None
    assert ended.result is not None
    assert ended.result.reward == 0.25
    (trajectory,) = ended.result.trajectories
    assert trajectory.requests is not None
    assert (trajectory.turns, trajectory.requests["requests"]) == (1, 1)
    assert trajectory.clients[0].startswith("chat/completions Python-urllib")


def test_a_reward_is_posted_or_left_to_the_recipe():
    ask = "\nask([{'role': 'user', 'content': '1+2?'}])"
    ended = attempt(python(ask))
    assert ended.result is not None
    assert ended.result.reward is None
    post = (
        "\nrequest = urllib.request.Request(os.environ['OPENAI_BASE_URL'] + '/reward', b'{\"reward\": 2}', "
        "{'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']})\nurllib.request.urlopen(request)"
    )
    ended = attempt(python(ask + post))
    assert ended.result is not None
    assert ended.result.reward == 2


def test_a_request_with_an_unknown_key_is_counted_in_the_session_that_ends_next():
    says = (
        "\ntry:\n    ask([], key='nobody')\nexcept OSError:\n    ask([{'role': 'user', 'content': '1+2?'}])"
    )
    ended = attempt(python(says))
    assert ended.result is not None
    assert ended.result.trajectories[-1].requests == {"requests": 1, "discarded": 0, "stray": 1}


def test_an_exit_code_is_a_failure_with_the_last_words():
    ended = attempt(python("\nsys.exit('no luck')"))
    assert ended.result is None
    assert ended.failure is not None
    assert "exit code 1: no luck" in ended.failure


def test_a_program_without_turns_or_that_can_not_start_is_reported():
    assert "no trajectory" in str(attempt({"command": ["true"]}).failure)
    with pytest.raises(RecipeError) as raised:
        attempt({"command": ["/no/such/program"]})
    assert raised.value.path == "agent.loop.command"


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks processes up in /proc")
def test_a_session_ends_its_processes_and_those_that_left_its_group(tmp_path: Path):
    pids = tmp_path / "pids"
    child = (
        f"import os, time; os.setsid(); print(os.getpid(), file=open({str(pids)!r}, 'a')); time.sleep(600)"
    )
    program = (
        f"\nimport subprocess, time\nfor _ in range(2): subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"path = {str(pids)!r}\n"
        "while not os.path.exists(path) or len(open(path).readlines()) < 2: time.sleep(0.05)\n"
        "ask([{'role': 'user', 'content': '1+2?'}])"
    )
    assert attempt(python(program)).failure is None
    left = [int(line) for line in pids.read_text().split()]
    assert len(left) == 2
    assert _becomes(lambda: not any(_runs(pid) for pid in left), 10)


def _runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="a program is bound to its parent by setpriv")
def test_a_program_ends_with_a_process_that_is_killed(tmp_path: Path):
    pid_file = tmp_path / "pid"
    child = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    attempts = f"from tests.sessions.endpoint.test_programs import *\nattempt({python(child)!r})"
    parent = subprocess.Popen([sys.executable, "-c", attempts])
    try:
        assert _becomes(lambda: pid_file.exists() and pid_file.read_text() != "", 60)
    finally:
        parent.kill()
        parent.wait()
    pid = int(pid_file.read_text())
    assert _becomes(lambda: not _runs(pid), 10)


def _becomes(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_a_program_that_is_late_is_ended():
    ended = attempt(python("\nimport time\nprint(os.getpid(), flush=True)\ntime.sleep(600)"), deadline_s=1.0)
    assert "deadline_s" in str(ended.failure)
    assert "did not end" not in str(ended.failure)


class Broken:
    async def next(self, *arguments: Any) -> Any:
        raise EngineError("the engine is gone")


def test_trouble_of_the_engine_is_not_the_agents():
    with pytest.raises(EngineError, match="gone"):
        attempt(python("\nask([{'role': 'user', 'content': '1+2?'}])"), Broken())


def posts(task: AgentTask) -> float:
    """An agent in 6 lines, sync."""
    import httpx2

    headers = {"authorization": f"Bearer {task.api_key}"}
    body = {"model": task.model, "messages": task.messages}
    httpx2.post(f"{task.base_url}/chat/completions", json=body, headers=headers).raise_for_status()
    return 0.5


async def posts_async(task: AgentTask) -> None:
    await asyncio.to_thread(posts, task)


async def breaks(task: AgentTask) -> None:
    raise ValueError("odd")


def takes_two(task: AgentTask, more: int) -> None: ...


def test_a_function_returns_the_reward_or_nothing():
    module = "tests.sessions.endpoint.test_programs"
    ended = attempt({"function": f"{module}:posts"})
    assert ended.result is not None
    assert ended.result.reward == 0.5
    ended = attempt({"function": f"{module}:posts_async"})
    assert ended.result is not None
    assert ended.result.reward is None
    assert "ValueError: odd" in str(attempt({"function": f"{module}:breaks"}).failure)
    with pytest.raises(RecipeError) as raised:
        attempt({"function": f"{module}:takes_two"})
    assert raised.value.path == "agent.loop.function"


def test_the_environment_of_a_program_has_both_clients_variables():
    names = ["OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"]
    program = f"\nassert all(os.environ[n] for n in {names})\nask([{{'role': 'user', 'content': '1+2?'}}])"
    assert attempt(python(program)).failure is None
    assert "OPENAI_BASE_URL" not in os.environ


SOLVER = (
    ASK
    + """
import asyncio
print("not a reply")
def ask_for(task):
    print("nor this")
    return ask(task.messages, task.api_key, task.base_url)
def solves(task):
    ask_for(task)
    return {"reward": 0.5, "parts": {"form": 1, "content": 0.0}}
async def waits(task):
    await asyncio.to_thread(ask_for, task)
def raises(task): raise ValueError("odd")
def dies(task): os._exit(3)
def returns_nonsense(task):
    ask_for(task)
    return {"reward": 1.0, "parts": {"form": "x"}}
async def hangs(task):
    try:
        await asyncio.sleep(600)
    finally:
        open("cancelled", "w").close()
"""
)


@pytest.fixture
def solver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], dict[str, str]]]:
    """Loops of functions in a file that only another Python process imports."""
    (tmp_path / "solver.py").write_text(
        SOLVER.replace('key=os.environ["OPENAI_API_KEY"], url=os.environ["OPENAI_BASE_URL"]', "key, url")
    )
    monkeypatch.chdir(tmp_path)
    yield lambda name: {"function": f"{tmp_path}/solver:{name}", "python": sys.executable}
    close_processes()


def test_a_function_runs_in_another_python(solver: Callable[[str], dict[str, str]]):
    ended = attempt(solver("solves"))
    assert ended.result is not None
    assert ended.result.reward == 0.5
    assert ended.result.trajectories[-1].reward_parts == {"form": 1.0, "content": 0.0}
    ended = attempt(solver("waits"))
    assert ended.result is not None
    assert ended.result.reward is None
    assert "solver" not in sys.modules


def test_what_goes_wrong_in_another_python_is_the_sessions_failure(
    solver: Callable[[str], dict[str, str]], tmp_path: Path
):
    assert "ValueError: odd" in str(attempt(solver("raises")).failure)
    assert "exit code 3" in str(attempt(solver("dies")).failure)
    assert "parts" in str(attempt(solver("returns_nonsense")).failure)
    assert "deadline_s" in str(attempt(solver("hangs"), deadline_s=1.0).failure)
    assert _becomes((tmp_path / "cancelled").exists, 10)


def test_another_python_that_can_not_run_the_function_is_refused(solver: Callable[[str], dict[str, str]]):
    for loop, path in (
        (solver("missing"), "function"),
        ({**solver("solves"), "python": "/no/python"}, "python"),
    ):
        with pytest.raises(RecipeError) as raised:
            attempt(loop)
        assert raised.value.path == f"agent.loop.{path}"

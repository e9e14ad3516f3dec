"""Agents behind the endpoint in whole runs: the same update as the built-in loop, lags and failures too."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

from practicum.sessions.endpoint.programs import AgentTask
from practicum.sessions.session import Session
from practicum.trainer.run import train_loaded
from tests.cluster import descendants, still_running
from tests.teachers.tiny_reward_models import save_classifier

from .recipes import TINY, tiny
from .test_run import metrics_of, same_run, stop_after, weights_of
from .test_sessions import samples_of

HERE = "tests.trainer.test_agents"
REWARD = {"functions": [{"use": "tests.trainer.rewards:by_letters"}]}


def asks(task: AgentTask) -> None:
    """An agent of one turn."""
    headers = {"authorization": f"Bearer {task.api_key}"}
    body = {"model": task.model, "messages": task.messages, "temperature": 0.2}
    httpx2.post(f"{task.base_url}/chat/completions", json=body, headers=headers).raise_for_status()


def fails_at_times(task: AgentTask) -> float:
    """An agent that raises for half of the prompts."""
    asks(task)
    if len(task.prompt) % 2:
        raise ValueError("an odd prompt")
    return float(len(task.prompt) % 4)


def numbers(folder: Path) -> list[dict[str, Any]]:
    """The run's metrics without those of time and of requests."""
    kept = [
        {k: v for k, v in row.items() if not k.startswith(("time/", "agent/", "shared/"))}
        for row in metrics_of(folder)
    ]
    return [{k: v for k, v in row.items() if "second" not in k} for row in kept]


RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lag": {"rollout": TINY["rollout"] | {"lag": 1}},
    "reward model": {},
    "lora and a teacher": {
        "model": TINY["model"] | {"lora": {"rank": 4}},
        "teachers": {"old": {"student": {"every": 2}}},
        "distill": {"signal": "sampled", "divergence": "k1_straight"},
    },
}
ASKS = """
import json, urllib.request
def asks(task):
    body = json.dumps({"messages": task.messages, "temperature": 0.2}).encode()
    headers = {"authorization": "Bearer " + task.api_key, "user-agent": "python-httpx2"}
    urllib.request.urlopen(urllib.request.Request(task.base_url + "/chat/completions", body, headers)).read()
"""


@pytest.mark.parametrize(
    "kind", [kind if kind != "lag" else pytest.param(kind, marks=pytest.mark.long) for kind in RUNS]
)
def test_an_agent_of_one_turn_trains_as_the_built_in_loop(kind: str, tmp_path: Path):
    function = {"function": f"{HERE}:asks"}
    if kind == "lora and a teacher":
        (tmp_path / "asking.py").write_text(ASKS)
        function = {"function": f"{tmp_path}/asking:asks", "python": sys.executable}
    before = descendants()
    reward: dict[str, Any] = REWARD
    if kind == "reward model":
        save_classifier(tmp_path / "judge")
        reward = REWARD | {"models": {"judge": {"model": str(tmp_path / "judge"), "label": 1}}}
    for name, loop in (("built_in", "single_turn"), ("agent", function)):
        (tmp_path / name).mkdir()
        sections = {"agent": {"loop": loop}, "reward": reward} | RUNS[kind]
        train_loaded(tiny(tmp_path / name, **sections), tmp_path / name / "run")
    assert not still_running({pid: x for pid, x in descendants().items() if pid not in before})
    runs = [tmp_path / name / "run" for name in ("built_in", "agent")]
    assert numbers(runs[0]) == numbers(runs[1])
    assert any(name.startswith("eval/") for name in numbers(runs[1])[0])
    ours, theirs = (weights_of(run) for run in runs)
    assert all(ours[name].equal(theirs[name]) for name in ours)
    last = metrics_of(runs[1])[-1]
    assert (last["agent/requests"], last["agent/overridden/temperature"]) == (16, 16)
    (client,) = {request for sample in samples_of(tmp_path / "agent") for request in sample["requests"]}
    assert client.startswith("chat/completions python-httpx")


async def calls_a_tool(session: Session) -> tuple[None, float]:
    """A loop that has the MCP server add its prompt's number and one."""
    await session.generate()
    outcome = await session.tool("add", {"a": session.prompt.uid})
    return None, float(outcome.text) - session.prompt.uid + session.index


def test_tools_of_an_mcp_server_end_with_the_run(tmp_path: Path):
    pids = tmp_path / "pids"
    server = [sys.executable, str(Path(__file__).parents[1] / "sessions/tools/mcp_server.py"), str(pids)]
    agent = {"loop": f"{HERE}:calls_a_tool", "tools": [{"mcp": {"command": server}, "timeout_s": 60}]}
    train_loaded(tiny(tmp_path, agent=agent, train=TINY["train"] | {"steps": 2}), tmp_path / "run")
    rows = metrics_of(tmp_path / "run")[1:]
    assert [(row["rollout/tool_calls"], row["rollout/tool_errors"]) for row in rows] == [(1.0, 0.0)] * 2
    assert {row["reward/mean"] for row in rows} == {2.5}
    assert len(pids.read_text().split()) == 2  # one for the list of its tools
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split())


def test_a_resumed_run_of_an_agent_is_the_run_that_was_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sections = {"agent": {"loop": {"function": f"{HERE}:asks"}}, "reward": REWARD}
    train_loaded(tiny(tmp_path, **sections), tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
        train_loaded(tiny(tmp_path, **sections), tmp_path / "cut")
    train_loaded(tiny(tmp_path, **sections), tmp_path / "cut", resume=True)
    same_run(tmp_path / "whole", tmp_path / "cut")


def test_an_agent_that_raises_fails_its_session_alone(tmp_path: Path):
    train_loaded(tiny(tmp_path, agent={"loop": {"function": f"{HERE}:fails_at_times"}}), tmp_path / "run")
    rows = metrics_of(tmp_path / "run")[1:]
    assert any(0 < row["rollout/failed"] < 16 for row in rows)
    assert "raised ValueError: an odd prompt" in (tmp_path / "run" / "log.txt").read_text()
    assert "OPENAI_API_KEY" not in os.environ

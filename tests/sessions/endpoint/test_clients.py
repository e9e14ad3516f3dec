"""Five real clients hold the same conversation and leave the rows of the built-in session, bit for bit."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from practicum.concurrency.event_loop import run_async
from practicum.recipe.schema.rollout_sections import Agent, ToolSection
from practicum.sessions.attempts import SessionResult, find_loop, run_attempt
from practicum.sessions.session import Session, Trajectory
from practicum.sessions.tools.toolbox import Toolbox
from practicum.tasks.messages import Message, tool_result
from tests.sessions.endpoint.driven import CALL, Running, chat_session, rows, user, with_agent
from tests.sessions.endpoint.test_turns import script

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("PRACTICUM_CLIENTS_PYTHON", ROOT / ".venv-clients/bin/python"))
CALCULATOR = Toolbox([ToolSection(use="calculator")])
GIVEN: Any = {"toolbox": CALCULATOR, "tools": CALCULATOR.schemas}
TURNS = (f"so {CALL}", "it is ab a", f"ab {CALL}{CALL}", "<think>hm</think> ab a")
needs_clients = pytest.mark.skipif(
    not PYTHON.exists(), reason="`make test-clients` makes the environment of the clients, .venv-clients"
)


def played(policy: Any) -> list[dict[str, list[Any]]]:
    """Hold the conversation without HTTP."""

    async def loop(session: Session) -> None:
        new: list[Message] | None = None
        for text in TURNS:
            await session.generate(new)
            new = [tool_result("calculator", "3")] * text.count("<tool_call>") or [user("go on")]

    session = chat_session(policy, **GIVEN)
    asyncio.run(loop(session))
    return rows(session.trajectories)


def held_by(client: str, policy: Any, **environment: str) -> list[Trajectory]:
    """Return the trajectories that a client's program leaves."""
    settings = [f"{name}={value}" for name, value in environment.items()]
    return ended_by(
        ["env", *settings, str(PYTHON), f"{Path(__file__).parent}/clients.py", client], policy
    ).trajectories


def ended_by(program: list[str], policy: Any) -> SessionResult:
    """Return what a session of a program leaves."""
    agent = Agent.model_validate({"loop": {"command": program}})

    def make(number: int) -> Session:
        return chat_session(policy, **GIVEN)

    ended = run_async(run_attempt(find_loop(agent.loop), agent, make, 100.0), timeout=110, owner="client")
    assert ended.result is not None, ended.failure
    return ended.result


@needs_clients
@pytest.mark.long
@pytest.mark.parametrize("client", ["http", "openai", "responses", "anthropic", "agents"])
def test_a_client_leaves_the_rows_of_the_session_itself(client: str):
    trajectories = held_by(client, script(*TURNS))
    assert rows(trajectories) == played(script(*TURNS))
    assert trajectories[-1].requests == {"requests": 4, "discarded": 0}


class Slow:
    """The script's turns, each later than its client waits."""

    def __init__(self) -> None:
        self._script = script(*TURNS)

    async def next(self, *arguments: Any) -> Any:
        generation = await self._script.next(*arguments)
        await asyncio.sleep(1.5)
        return generation


@needs_clients
@pytest.mark.long
@pytest.mark.parametrize("client", ["openai", "responses", "anthropic"])
def test_clients_that_lose_patience_and_ask_again_leave_the_same_rows(client: str):
    trajectories = held_by(client, Slow(), CLIENT_TIMEOUT_S="0.5")
    assert rows(trajectories) == played(script(*TURNS))
    assert trajectories[-1].requests is not None
    assert trajectories[-1].requests["retries"] >= 4


@needs_clients
@pytest.mark.long
def test_a_smolagents_agent_leaves_the_rows_of_its_conversation():
    answer = '<tool_call>{"name": "final_answer", "arguments": {"answer": "3"}}</tool_call>'
    turns = (f"so {CALL}", CALL, f"it is 3 {answer}")
    kept: list[Any] = []

    async def replay(running: Running) -> None:
        tools, conversation = kept
        messages: list[Message] = []
        for message in conversation:
            is_turn = message["role"] == "assistant"
            messages.append((await running.chat(messages, tools=tools))["message"] if is_turn else message)

    trajectories = held_by("smolagents", Keeping(turns, kept))
    assert [(t.turns, t.breaks) for t in trajectories] == [(3, 0)]
    assert rows(with_agent(chat_session(script(*turns), **GIVEN), replay)) == rows(trajectories)


class Keeping:
    """A script that keeps the tools and messages that the model saw before the last turn."""

    def __init__(self, turns: tuple[str, ...], kept: list[Any]) -> None:
        self._script, self._kept = script(*turns), kept

    async def next(self, trajectory: Trajectory, sampling: Any, counter: Any, session: Session) -> Any:
        generation = await self._script.next(trajectory, sampling, counter, session)
        self._kept[:] = [
            list(session.start.tools),
            [*trajectory.messages, {"role": "assistant", "content": ""}],
        ]
        return generation


@needs_clients
@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "turns", "rows_left", "reward"),
    [
        ("openai_tools.py", (f"so {CALL}", "it is 3"), 1, 1.0),
        ("anthropic_chat.py", ("ab a", "ab", "a b c", "ab"), 3, None),
    ],
)
def test_the_programs_of_the_docs_run(
    program: str, turns: tuple[str, ...], rows_left: int, reward: float | None
):
    result = ended_by([str(PYTHON), str(ROOT / "examples/agents" / program), "{prompt}"], script(*turns))
    assert len(result.trajectories) == rows_left
    assert sum(t.turns for t in result.trajectories) == len(turns)
    assert result.reward == reward

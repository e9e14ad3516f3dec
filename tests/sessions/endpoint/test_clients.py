"""Five real clients hold the same conversation and leave the rows of the built-in session, bit for bit."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from practicum.concurrency.event_loop import run_async
from practicum.recipe.schema.rollout_sections import Agent, ToolSection
from practicum.sessions.attempts import SessionResult, find_loop, run_attempt
from practicum.sessions.endpoint.endpoint import running_endpoint
from practicum.sessions.session import Session, Trajectory
from practicum.sessions.tools.toolbox import Toolbox
from practicum.tasks.messages import Message, tool_result
from practicum.trainer.run import train_loaded
from tests.sessions.endpoint.driven import CALL, TOKENIZER, chat_session, rows, user
from tests.sessions.endpoint.test_turns import script
from tests.sessions.sessions import session_of
from tests.trainer.recipes import tiny
from tests.trainer.test_agents import REWARD, numbers
from tests.trainer.test_run import weights_of

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
    return ended_by(command(client, **environment), policy).trajectories


def command(client: str, **environment: str) -> list[str]:
    settings = [f"{name}={value}" for name, value in environment.items()]
    return ["env", *settings, str(PYTHON), f"{Path(__file__).parent}/clients.py", client]


def ended_by(program: list[str], policy: Any) -> SessionResult:
    """Return what a session of a program leaves."""
    return run_async(session_by(program, policy), timeout=110, owner="client")


async def session_by(program: list[str], policy: Any) -> SessionResult:
    agent = Agent.model_validate({"loop": {"command": program}})

    def make(number: int) -> Session:
        return chat_session(policy, **GIVEN)

    ended = await run_attempt(find_loop(agent.loop), agent, make, 100.0)
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

    wait_s = 1.5

    def __init__(self, *turns: str) -> None:
        self._script = script(*turns)

    async def next(self, *arguments: Any) -> Any:
        generation = await self._script.next(*arguments)
        await asyncio.sleep(self.wait_s)
        return generation


@needs_clients
@pytest.mark.long
@pytest.mark.parametrize("client", ["openai", "responses", "anthropic"])
def test_clients_that_lose_patience_and_ask_again_leave_the_same_rows(client: str):
    trajectories = held_by(client, Slow(*TURNS), CLIENT_TIMEOUT_S="0.5")
    assert rows(trajectories) == played(script(*TURNS))
    assert trajectories[-1].requests is not None
    assert trajectories[-1].requests["retries"] >= 4


class Slower(Slow):
    """The script's turns, which take a while."""

    wait_s = 0.3


class BadNetwork:
    """Forwards connections to the endpoint. At random it hangs up, before a request or within a reply."""

    def __init__(self, seed: int, url: str) -> None:
        self._draw, self._port, self.cuts = random.Random(seed), int(url.rpartition(":")[2]), 0

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fate, upstream = self._draw.random(), None
        try:
            if fate < 0.3:
                return
            back, upstream = await asyncio.open_connection("127.0.0.1", self._port)
            reply = asyncio.create_task(
                self._copy(back, writer, self._draw.randrange(900) if fate < 0.8 else None)
            )
            request = asyncio.create_task(self._copy(reader, upstream, None))
            _, open_tasks = await asyncio.wait({reply, request}, return_when=asyncio.FIRST_COMPLETED)
            for task in open_tasks:
                task.cancel()
        finally:
            self.cuts += fate < 0.8
            writer.close()
            if upstream is not None:
                upstream.close()

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, most: int | None) -> None:
        """Copy bytes until the source ends, or all but the last of `most` that were to come."""
        with suppress(ConnectionError):
            while data := await source.read(1 << 16):
                sink.write(data if most is None else data[:most])
                await sink.drain()
                if most is not None and (most := most - len(data)) <= 0:
                    return


async def hold_all(
    clients: Sequence[str], turns: Sequence[Any], seed: int
) -> tuple[list[SessionResult], int]:
    """Let clients hold their conversations concurrently on a bad network; also return how often it cut."""
    endpoint = running_endpoint()
    network = BadNetwork(seed, endpoint.url)
    async with await asyncio.start_server(network.forward, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        settings = {
            "OPENAI_BASE_URL": f"{url}/v1",
            "ANTHROPIC_BASE_URL": url,
            "CLIENT_TIMEOUT_S": "1",
            "CLIENT_STREAMS": "",
        }
        work = (session_by(command(c, **settings), policy) for c, policy in zip(clients, turns, strict=True))
        return list(await asyncio.gather(*work)), network.cuts


@needs_clients
@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_concurrent_clients_on_a_bad_network_leave_the_same_rows(seed: int):
    """Five clients and smolagents, retries, disconnects and late replies at random."""
    answer = (
        f"so {CALL}",
        CALL,
        '<tool_call>{"name": "final_answer", "arguments": {"answer": "3"}}</tool_call>',
    )
    expected = [played(script(*TURNS))] * 5 + [rows(held_by("smolagents", script(*answer)))]
    clients = ["http", "openai", "responses", "anthropic", "agents", "smolagents"]
    policies = [Slower(*(answer if client == "smolagents" else TURNS)) for client in clients]
    results, cuts = run_async(hold_all(clients, policies, seed), timeout=200, owner="clients")
    assert cuts >= 4
    assert [rows(result.trajectories) for result in results] == expected
    retries = sum((result.trajectories[-1].requests or {}).get("retries", 0) for result in results)
    assert retries >= 1


@needs_clients
@pytest.mark.long
def test_a_smolagents_agent_leaves_the_rows_of_a_session_with_its_messages():
    """It writes its prompt and the tools' results in its own words, so these are the session's."""
    answer = '<tool_call>{"name": "final_answer", "arguments": {"answer": "3"}}</tool_call>'
    turns = (f"so {CALL}", CALL, f"it is 3 {answer}")
    kept: list[Any] = []
    trajectories = held_by("smolagents", Keeping(turns, kept))
    tools, messages = kept
    by_role = itertools.groupby(messages, lambda message: message["role"] == "assistant")
    opening, *results = [list(group) for is_turn, group in by_role if not is_turn]
    session = session_of(opening, script(*turns), TOKENIZER, chat=True, tools=tools)

    async def loop() -> None:
        for new in (None, *results):
            await session.generate(new)

    asyncio.run(loop())
    assert [(t.turns, t.breaks) for t in trajectories] == [(3, 0)]
    assert rows(trajectories) == rows(session.trajectories)


class Keeping:
    """A script that keeps the tools and messages that the model saw before the last turn."""

    def __init__(self, turns: tuple[str, ...], kept: list[Any]) -> None:
        self._script, self._kept = script(*turns), kept

    async def next(self, trajectory: Trajectory, sampling: Any, counter: Any, session: Session) -> Any:
        generation = await self._script.next(trajectory, sampling, counter, session)
        self._kept[:] = [list(session.start.tools), trajectory.messages]
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


ASKS = """
from contextlib import suppress

from agents import Agent, ModelBehaviorError, OpenAIProvider, RunConfig, Runner
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

async def asks(task):
    kind = sum(task.prompt.encode()) % 3
    with open(f"{__file__}.log", "a") as log:
        log.write(str(kind))
    if kind == 0:
        client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
        await client.chat.completions.create(model=task.model, messages=task.messages)
    elif kind == 1:
        client = AsyncAnthropic(base_url=task.anthropic_url, api_key=task.api_key)
        await client.messages.create(model=task.model, messages=task.messages, max_tokens=100)
    else:
        provider = OpenAIProvider(base_url=task.base_url, api_key=task.api_key)
        config = RunConfig(model=task.model, model_provider=provider)
        with suppress(ModelBehaviorError):  # it takes an answer that was cut for an error
            await Runner.run(Agent(name="a"), task.prompt, run_config=config)
"""


@needs_clients
@pytest.mark.long
def test_an_update_from_real_clients_is_that_of_the_built_in_loop(tmp_path: Path):
    (tmp_path / "asking.py").write_text(ASKS)
    function = {"function": f"{tmp_path}/asking:asks", "python": str(PYTHON)}
    for name, loop in (("built_in", "single_turn"), ("agent", function)):
        (tmp_path / name).mkdir()
        sections = {"agent": {"loop": loop}, "reward": REWARD}
        train_loaded(tiny(tmp_path / name, **sections), tmp_path / name / "run")
    runs = [tmp_path / name / "run" for name in ("built_in", "agent")]
    assert numbers(runs[0]) == numbers(runs[1])
    ours, theirs = (weights_of(run) for run in runs)
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert {*(tmp_path / "asking.py.log").read_text()} == {*"012"}, "each client asked"

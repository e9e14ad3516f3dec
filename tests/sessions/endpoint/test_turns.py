"""Requests become turns: which trajectory they continue, what is a retry, and what is trained."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest

from practicum.recipe.schema.rollout_sections import ToolSection
from practicum.sessions.attempts import LOOPS
from practicum.sessions.endpoint import endpoint as endpoint_module
from practicum.sessions.endpoint.endpoint import running_endpoint
from practicum.sessions.session import EnginePolicy, Session
from practicum.sessions.tools.toolbox import Toolbox
from practicum.tasks.messages import Message
from tests.engines.engines import engine_of, tiny
from tests.sessions.endpoint.driven import (
    CALL,
    TOKENIZER,
    TOOL,
    Running,
    Writer,
    chat_session,
    rows,
    user,
    with_agent,
)
from tests.sessions.sessions import Scripted, one_by_one, session_of

OPENING = [user("1+2?")]


def script(*turns: str) -> Scripted:
    return Scripted([one_by_one(TOKENIZER, turn) + TOKENIZER.encode("<|im_end|>") for turn in turns])


def played(session: Session, loop: str = "tool_use") -> list[dict[str, Any]]:
    """Play a built-in loop; return its rows."""

    async def play() -> None:
        await LOOPS[loop](session)

    asyncio.run(play())
    return rows([t for t in session.trajectories if t.sampled_tokens])


def test_a_tool_using_client_leaves_the_rows_of_the_built_in_loop():
    calculator = Toolbox([ToolSection(use="calculator")])
    turns = (f"so {CALL}", "it is 3")
    given = {"toolbox": calculator, "tools": calculator.schemas}
    expected = played(chat_session(script(*turns), **given))

    async def client(running: Running) -> None:
        messages: list[Message] = list(OPENING)
        choice = await running.chat(messages, tools=calculator.schemas)
        assert choice["finish_reason"] == "tool_calls"
        call = choice["message"]["tool_calls"][0]
        # As clients do: other white space in the arguments, no content, the result by id.
        arguments = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
        said = {
            "role": "assistant",
            "tool_calls": [{**call, "function": {**call["function"], "arguments": arguments}}],
        }
        said["content"] = [{"type": "text", "text": choice["message"]["content"]}]
        messages += [said, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
        choice = await running.chat(messages, tools=calculator.schemas)
        assert choice["message"]["content"] == "it is 3"

    assert rows(with_agent(chat_session(script(*turns), **given), client)) == expected


@pytest.mark.parametrize("chat", [True, False])
def test_an_engine_samples_the_same_rows_through_http(chat: bool):
    async def loop(session: Session) -> None:
        await session.generate()
        await session.generate([user("7")])

    async def client(running: Running) -> None:
        first = await running.chat([user("1+2=")])
        await running.chat([user("1+2="), first["message"], user("7")])

    with engine_of(tiny(), slots=4, context=128) as engine:
        policy = EnginePolicy(engine, keep=True)
        first, second = (
            session_of("1+2=", policy, chat=chat, max_new_tokens=6, seed=5, context=128) for _ in range(2)
        )
        asyncio.run(loop(first))
        assert rows(with_agent(second, client)) == rows(first.trajectories)


def test_siblings_are_forks_whose_prompts_are_not_trained_again():
    writer = Writer(texts=["ab"])

    async def client(running: Running) -> None:
        first = await running.chat(OPENING)
        longer = [*OPENING, first["message"], user("more")]
        await running.chat(longer)
        await running.chat(longer)
        await running.post("chat/completions", {"messages": longer, "n": 3})

    trajectories = with_agent(chat_session(writer), client)
    assert [t.turns for t in trajectories].count(2) == 1
    assert sorted(t.turns for t in trajectories) == [1, 1, 1, 1, 2]
    assert sum(t.sampled_tokens for t in trajectories) == sum(len(s.tokens) for s in writer.sampled)
    assert len({tuple(t.columns()["rollout_logprobs"].tolist()) for t in trajectories}) == 5


def test_sub_agents_interleave_with_the_conversation_that_called_them():
    async def client(running: Running) -> None:
        main, sub = list(OPENING), [{"role": "system", "content": "be brief"}, user("go")]
        for _ in range(3):
            for messages in (main, sub):
                choice = await running.chat(messages)
                messages += [choice["message"], user("next")]

    trajectories = with_agent(chat_session(Writer()), client)
    assert [t.turns for t in trajectories] == [3, 3]
    assert [t.breaks for t in trajectories] == [0, 0]


def test_the_opened_conversation_is_counted_by_its_first_difference():
    counts: dict[str, int] = {}

    async def client(running: Running) -> None:
        first = await running.chat(OPENING)
        await running.chat(OPENING, tools=[{"type": "function", "function": TOOL}])
        await running.chat([{"role": "system", "content": "x"}, *OPENING])
        edited = {**first["message"], "content": "something else"}
        await running.chat([*OPENING, edited, user("so?")])
        counts.update(running.agent.counts)

    trajectories = with_agent(chat_session(Writer(texts=["ab"])), client)
    opened = {name: count for name, count in counts.items() if name.startswith("opened/")}
    assert opened == {"opened/tools": 1, "opened/system": 1, "opened/content": 1}
    assert len(trajectories) == 4


@pytest.mark.parametrize(
    "headers",
    [
        [{"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "1"}],
        [{"idempotency-key": "a"}, {"idempotency-key": "a"}],
    ],
)
def test_a_request_that_is_sent_again_gets_the_same_turn(headers: list[dict[str, str]]):
    async def client(running: Running) -> None:
        first, again = [await running.chat(OPENING, mark) for mark in headers]
        assert first == again

    (trajectory,) = with_agent(chat_session(Writer()), client)
    assert trajectory.turns == 1


def test_an_identical_body_in_flight_is_a_retry_and_later_a_sibling():
    async def client(running: Running) -> None:
        first, again = await asyncio.gather(running.chat(OPENING), running.chat(OPENING))
        assert first == again
        await running.chat(OPENING)

    trajectories = with_agent(chat_session(Writer(wait_s=0.2)), client)
    assert [t.turns for t in trajectories] == [1, 1]


def test_concurrent_requests_that_are_first_tries_are_siblings():
    async def client(running: Running) -> None:
        mark = {"x-stainless-retry-count": "0"}
        await asyncio.gather(*(running.chat(OPENING, mark) for _ in range(4)))

    assert len(with_agent(chat_session(Writer(wait_s=0.1)), client)) == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("returns", [False, True])
def test_a_client_that_leaves_finds_its_turn_when_it_returns(stream: bool, returns: bool, monkeypatch):
    monkeypatch.setattr(endpoint_module, "PING_S", 0.05)
    writer = Writer(wait_s=0.4)

    async def client(running: Running) -> None:
        body = {"messages": OPENING, "stream": stream}
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(running.post("chat/completions", body), 0.2)
        if returns:
            response = await running.post("chat/completions", body)
            assert response.status_code == 200
        else:
            await asyncio.sleep(0.6)
            await running.chat([user("another")])

    (trajectory,) = with_agent(chat_session(writer), client)
    assert trajectory.turns == 1
    assert len(writer.sampled) == 2 - returns


def test_a_stop_text_ends_the_turn_at_its_token_and_the_text_before_it():
    async def client(running: Running) -> None:
        choice = await running.chat(OPENING, stop=["STOP", "never"])
        assert choice["message"]["content"] == " b "
        assert choice["finish_reason"] == "stop"
        await running.chat([*OPENING, choice["message"], user("more")])

    (trajectory,) = with_agent(chat_session(Writer(texts=[" b STOP c"])), client)
    text = TOKENIZER.decode(trajectory.ids())
    assert "assistant\n b STOP<|im_end|>\n<|im_start|>user\nmore" in text
    assert TOKENIZER.decode(trajectory.sampled()[0]) == " b STOP"


def test_a_call_of_an_unknown_tool_or_broken_json_is_text():
    tools = [{"type": "function", "function": {**TOOL, "name": "other"}}]

    async def client(running: Running) -> None:
        choice = await running.chat(OPENING, tools=tools)
        assert choice["message"] == {"role": "assistant", "content": CALL}
        assert choice["finish_reason"] == "stop"

    with_agent(chat_session(Writer(texts=[CALL])), client)


def test_reasoning_is_apart_and_need_not_come_back():
    async def client(running: Running) -> None:
        choice = await running.chat(OPENING)
        assert choice["message"]["reasoning_content"] == "hm"
        await running.chat([*OPENING, {"role": "assistant", "content": "ab"}, user("more")])

    (trajectory,) = with_agent(chat_session(Writer(texts=["<think>hm</think> ab"])), client)
    assert trajectory.turns == 2


def test_each_turn_has_the_whole_length_of_a_turn():
    async def client(running: Running) -> None:
        messages = list(OPENING)
        for most in (3, 4):
            choice = await running.chat(messages, max_tokens=most)
            messages += [choice["message"], user("more")]

    (trajectory,) = with_agent(chat_session(Writer(texts=["ab a ab a"])), client)
    assert [len(turn) for turn in trajectory.sampled()] == [3, 4]


@pytest.mark.parametrize("strict", [False, True])
def test_sampling_settings_are_overridden_and_counted_or_refused(strict: bool):
    counts: dict[str, int] = {}

    async def client(running: Running) -> None:
        settings = {
            "temperature": 0.1,
            "top_p": 1.0,
            "tool_choice": "required",
            "response_format": {"type": "text"},
        }
        response = await running.post("chat/completions", {"messages": OPENING, **settings})
        assert response.status_code == (400 if strict else 200)
        counts.update(running.agent.counts)

    with_agent(chat_session(Writer(), agent={"strict": strict}), client)
    assert counts["overridden"] == (1 if strict else 2)


def test_a_session_is_found_by_key_path_and_header_and_never_by_anothers_key():
    async def run() -> None:
        endpoint = running_endpoint()
        async with (
            endpoint.open(chat_session(Writer())) as (key, _),
            endpoint.open(chat_session(Writer())) as (other, _),
            httpx2.AsyncClient(base_url=endpoint.url) as http,
        ):

            async def status(path: str = "/v1/chat/completions", **headers: str) -> int:
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                return (await http.post(path, json={"messages": OPENING}, headers=named)).status_code

            assert await status(authorization=f"Bearer {key}") == 200
            assert await status(x_api_key=key) == 200
            assert await status(x_session_id=key, authorization="Bearer EMPTY") == 200
            assert await status(x_session_id="the client's own", authorization=f"Bearer {key}") == 200
            assert await status(f"/sessions/{key}/v1/chat/completions") == 200
            assert await status(f"/sessions/{key}/v1/chat/completions", x_api_key=other) == 403
            assert await status(authorization="Bearer nobody") == 401
            assert await status() == 401
            assert endpoint.strays == 2

    asyncio.run(run())


def test_a_request_after_the_end_is_a_conflict_and_a_turn_in_flight_is_discarded():
    async def run() -> None:
        endpoint, session = running_endpoint(), chat_session(Writer(wait_s=5))
        async with httpx2.AsyncClient(base_url=endpoint.url) as http:
            async with endpoint.open(session) as (key, agent):
                headers = {"authorization": f"Bearer {key}"}
                body = {"messages": OPENING}
                late = asyncio.create_task(http.post("/v1/chat/completions", json=body, headers=headers))
                while not agent.counts["requests"]:
                    await asyncio.sleep(0.01)
                assert await agent.end() == []
                assert agent.counts["discarded"] == 1
                assert (await late).status_code == 409
            response = await http.post("/v1/chat/completions", json=body, headers=headers)
            assert response.status_code == 409
            assert endpoint.strays == 2

    asyncio.run(run())


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"messages": 3, "input": 3, "prompt": {}}',
        b'{"messages": [{"role": "wizard", "content": ""}], "input": [{"role": "wizard"}], "prompt": "a", '
        b'"n": -1, "max_tokens": "x"}',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}], "input": [{"type": "file"}], '
        b'"stop": 5, "prompt": [], "tools": [3]}',
    ],
)
def test_a_malformed_request_gets_the_error_of_its_dialect(path: str, body: bytes):
    async def client(running: Running) -> None:
        response = await running.http.post(f"/v1/{path}", content=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert (response.json().get("type") == "error") == (path == "messages")
        assert running.agent.counts["refused"] == 1

    with_agent(chat_session(Writer()), client)


def test_turns_open_requests_context_and_body_have_limits(monkeypatch):
    monkeypatch.setattr(endpoint_module, "MAX_BODY", 1000)

    async def client(running: Running) -> None:
        long = await running.post("chat/completions", {"messages": [user("a" * 1000)]})
        assert long.status_code == 413
        full = await running.post("chat/completions", {"messages": [user("a" * 300)]})
        assert full.json()["error"]["code"] == "context_length_exceeded"
        for _ in range(2):  # refused requests were no turns
            await running.chat(OPENING)
        third = await running.post("chat/completions", {"messages": OPENING})
        assert third.json()["error"]["code"] == "turn_limit"

    with_agent(chat_session(Writer(), agent={"turns": 2}, context=200), client)


def test_a_strict_refusal_is_no_turn():
    async def client(running: Running) -> None:
        refused = await running.post("chat/completions", {"messages": OPENING, "temperature": 0.1})
        assert refused.status_code == 400
        await running.chat(OPENING)

    with_agent(chat_session(Writer(), agent={"strict": True, "turns": 1}), client)


def test_a_refused_request_for_siblings_leaves_the_conversation_open():
    async def client(running: Running) -> None:
        first = await running.chat(OPENING)
        longer = [*OPENING, first["message"], user("a" * 200)]
        assert (await running.post("chat/completions", {"messages": longer, "n": 3})).status_code == 400
        await running.chat([*OPENING, first["message"], user("more")])

    (trajectory,) = with_agent(chat_session(Writer(texts=["ab"]), context=200), client)
    assert trajectory.turns == 2


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("responses", {"input": "1+2?"}, {"type": "web_search"}),
        ("messages", {"messages": OPENING}, {"type": "bash_20250124", "name": "bash"}),
        ("chat/completions", {"messages": OPENING}, {"type": "custom", "custom": {"name": "shell"}}),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_tools_that_are_no_functions_are_counted_or_refused(path: str, body: Any, kind: Any, strict: bool):
    async def client(running: Running) -> None:
        response = await running.post(path, {**body, "tools": [kind]})
        assert response.status_code == (400 if strict else 200), response.text
        assert running.agent.counts["overridden/tools"] == 1

    with_agent(chat_session(Writer(), agent={"strict": strict}), client)


def test_a_posted_reward_is_the_sessions():
    async def client(running: Running) -> None:
        assert (await running.post("reward", {"reward": 0.5})).status_code == 200
        assert (await running.post("reward", {"reward": "much"})).status_code == 400
        assert (await running.post("messages/count_tokens", {"messages": 3})).status_code == 400
        assert (running.agent.reward, running.agent.counts["refused"]) == (0.5, 2)

    with_agent(chat_session(Writer()), client)

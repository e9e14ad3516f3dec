"""The task for tools: its demonstrator plays whole conversations, with and without a summary in between."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.engines.protocol import Sampling
from practicum.models.tokenizer import CHARACTERS, make_tokenizer
from practicum.recipe.schema.recipe import Task
from practicum.recipe.schema.rollout_sections import Agent
from practicum.sessions.attempts import find_loop
from practicum.sessions.chat import SessionStart
from practicum.sessions.demonstrator import DemonstratorPolicy
from practicum.sessions.session import Session
from practicum.sessions.tools.toolbox import Toolbox
from practicum.tasks.messages import Message
from practicum.tasks.prompts import Prompt, demonstrated_turn, encode_prompt
from practicum.tasks.stream import make_stream

seeds = st.integers(0, 10**6)


def draw(seed: int, **options: Any) -> Prompt:
    return make_stream({"t": Task(kind="total", options=options)}, seed).prompt(0)


def play(prompt: Prompt, chat: bool, **settings: Any) -> Session:
    """The session that the agent's loop leaves when the demonstrator plays it, with a real calculator."""
    agent = Agent.model_validate(
        {"tools": ["calculator"], "tool_call_format": "plain", "turns": 40, **settings}
    )
    tokenizer = make_tokenizer()
    encoded = encode_prompt(prompt, tokenizer, chat, None)
    start = SessionStart(encoded.ids, encoded.images, encoded.messages)
    policy = DemonstratorPolicy(demonstrated_turn, tokenizer)
    assert isinstance(tokenizer.eos_token_id, int)
    sampling = Sampling(max_new_tokens=256, stop=frozenset({tokenizer.eos_token_id}))
    toolbox = Toolbox(agent.tools)
    session = Session(
        prompt, start, 0, policy, sampling, tokenizer, context=512, agent=agent, toolbox=toolbox
    )
    asyncio.run(asyncio.wait_for(_run(session), 60))
    return session


async def _run(session: Session) -> None:
    await find_loop(session.agent.loop)(session)


@pytest.mark.parametrize("chat", [False, True])
@given(seed=seeds)
def test_the_demonstrator_calls_the_tool_for_each_pair_and_answers(chat, seed):
    prompt = draw(seed, numbers=[2, 6], digits=[1, 4])
    assert prompt.example is not None
    numbers = [int(n) for n in re.findall(r"\d+", prompt.example.prompt)]
    session = play(prompt, chat, loop="tool_use")
    expected, so_far = [], numbers[0]
    for number in numbers[1:]:
        expected.append(f"[{so_far}+{number}]")
        so_far += number
    assert session.said() == [*expected, str(so_far)]
    assert prompt.answer == str(so_far)
    assert (session.trajectory.tool_calls, session.trajectory.tool_errors) == (len(numbers) - 1, 0)


@pytest.mark.parametrize("chat", [False, True])
@given(seed=seeds, compress_at=st.integers(8, 80))
def test_the_demonstrator_sums_up_and_goes_on_from_its_summary(chat, seed, compress_at):
    prompt = draw(seed, numbers=[2, 8], digits=[1, 4])
    asked = "what is left?"
    session = play(prompt, chat, loop="compress", compress_at=compress_at, message=asked)
    assert session.said()[-1] == prompt.answer
    *earlier, last = session.trajectories
    for trajectory in earlier:
        summary = session.said(trajectory)[-1]
        assert re.fullmatch(r"\d+(\+\d+)*", summary)
        assert sum(map(int, summary.split("+"))) == int(prompt.answer)
    assert last.tool_errors == 0


def test_a_call_that_failed_is_made_again():
    prompt = draw(3, numbers=2)
    talk: list[Message] = [{"role": "user", "content": prompt.content}]
    first = demonstrated_turn(prompt, talk)
    talk += [{"role": "assistant", "content": first}, {"role": "tool", "content": "timed out"}]
    assert demonstrated_turn(prompt, talk) == first
    talk += [{"role": "assistant", "content": first}, {"role": "tool", "content": prompt.answer}]
    assert demonstrated_turn(prompt, talk) == prompt.answer


@given(seed=seeds)
def test_demonstrations_use_the_tiny_tokenizers_characters(seed):
    prompt = draw(seed)
    said = demonstrated_turn(prompt, [{"role": "user", "content": prompt.content}])
    assert set(f"{prompt.content}{said}{prompt.answer}") <= set(CHARACTERS)

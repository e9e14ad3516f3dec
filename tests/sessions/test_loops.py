"""The built-in loops, played by demonstrators and scripts with real tools, and sampled by a real engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from practicum.errors import EngineError, RecipeError
from practicum.models.tokenizer import make_tokenizer
from practicum.recipe.schema.rollout_sections import ToolSection
from practicum.sessions.attempts import LOOPS, find_loop, read_result
from practicum.sessions.demonstrator import DemonstratorPolicy
from practicum.sessions.session import EnginePolicy, Session
from practicum.sessions.tools.toolbox import Toolbox
from practicum.tasks.builtin import TOTAL
from practicum.tasks.messages import Message, tool_result
from practicum.tasks.procedural import Example
from practicum.tasks.prompts import Prompt
from tests.engines.engines import engine_of, tiny
from tests.sessions.sessions import byte_tokenizer, session_of

TOKENIZER = make_tokenizer()
CALCULATOR = Toolbox([ToolSection(use="calculator")])


def says(*turns: str) -> Callable[[Prompt, list[Message]], str]:
    """A demonstrator that says these, one after the other."""
    left = iter(turns)
    return lambda prompt, messages: next(left)


def run(loop: str, session: Session) -> list[str]:
    """Play the loop; the whole text of each trajectory that it leaves."""

    async def play() -> Any:
        return await LOOPS[loop](session)

    result = read_result(asyncio.run(play()), session)
    return [str(session.tokenizer.decode(t.ids())) for t in result.trajectories]


def plain(*turns: str, prompt: str = "total:1+2+3=", **more: Any) -> Session:
    agent = {"tool_call_format": "plain", **more.pop("agent", {})}
    return session_of(
        prompt, DemonstratorPolicy(says(*turns), TOKENIZER), agent=agent, toolbox=CALCULATOR, **more
    )


def test_single_turn_is_one_answer():
    assert run("single_turn", plain("6")) == ["total:1+2+3=6<eos>"]


def test_tool_use_answers_calls_until_there_is_none():
    session = plain("[1+2]", "[3+3][calculator: 2*3]", "6", "never")
    text = "total:1+2+3=[1+2]<eos>|3|[3+3][calculator: 2*3]<eos>|6||6|6<eos>"
    assert run("tool_use", session) == [text]
    trajectory = session.trajectory
    assert (trajectory.turns, trajectory.tool_calls, trajectory.tool_errors) == (3, 3, 0)


def test_tool_use_in_a_chat_with_json_calls():
    tokenizer = byte_tokenizer("chatml")
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+2"}}</tool_call>'
    demonstrator = DemonstratorPolicy(says(f"Let me see. {call}{call}", "It is 3."), tokenizer)
    tools = CALCULATOR.schemas
    session = session_of("1+2?", demonstrator, tokenizer, chat=True, toolbox=CALCULATOR, tools=tools)
    (text,) = run("tool_use", session)
    assert text.startswith("<|im_start|>tools\ncalculator <|im_end|>\n<|im_start|>user\n1+2?<|im_end|>\n")
    assert text.count("<|im_start|>tool\n3<|im_end|>\n") == 2
    assert text.endswith("<|im_start|>assistant\nIt is 3.<|im_end|>")
    assert session.messages[2] == tool_result("calculator", "3")


def test_a_tools_error_and_a_call_that_can_not_be_read_go_to_the_model():
    broken = Toolbox([ToolSection(use="calculator"), ToolSection(use="tests.sessions.sessions:nap")])
    session = plain("[calculator: 1/0]", "[what: 1]", "so", prompt="p")
    session.toolbox = broken
    (text,) = run("tool_use", session)
    _, first, _, second, last = text.split("|")
    assert "division by zero" in first.lower()
    assert "no tool is named" in second
    assert last == "so<eos>"
    assert (session.trajectory.tool_calls, session.trajectory.tool_errors) == (2, 2)


def test_tool_use_ends_after_its_turns_and_with_its_room():
    session = plain(*["[1+2]"] * 9, agent={"turns": 3})
    assert run("tool_use", session)[0].count("[1+2]") == 3
    assert session.trajectory.tool_calls == 2
    tight = plain("[1+2]", "6", context=len("total:1+2+3=[1+2].|3|"))
    assert run("tool_use", tight) == ["total:1+2+3=[1+2]<eos>"]
    assert tight.trajectory.finish == "context"


def test_calls_of_one_turn_run_side_by_side():
    toolbox = Toolbox([ToolSection(use="tests.sessions.sessions:meet")])
    session = plain("[2][2]", "met")
    session.toolbox = toolbox
    assert run("tool_use", session)[0].endswith("|met||met|met<eos>")


def test_retry_tells_a_miss_and_the_last_answer_counts():
    agent = {"message": "no.", "turns": 4}
    session = plain("5", "6", "7", agent=agent, check=lambda text: float(text == "6"))
    assert run("retry", session) == ["total:1+2+3=5<eos>|no.|6<eos>"]
    assert session.said()[-1] == "6"
    wrong = plain(*"12345", agent=agent, check=lambda text: 0.5)
    assert run("retry", wrong)[0].count("<eos>") == 4
    with pytest.raises(EngineError, match="retry needs a checker, and task task has none"):
        run("retry", plain("5"))


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
def test_compress_goes_on_from_a_summary_in_a_new_context(chat: bool):
    numbers = [214, 305, 118, 77]
    prompt = f"total:{'+'.join(map(str, numbers))}="
    example = Example(prompt, str(sum(numbers)))
    demonstrator = DemonstratorPolicy(lambda _, messages: TOTAL.demonstrate(example, messages), TOKENIZER)
    agent = {"tool_call_format": "plain", "compress_at": 30, "message": "left?"}
    session = session_of(prompt, demonstrator, agent=agent, toolbox=CALCULATOR, chat=chat)
    first, second, _, last = run("compress", session)
    if chat:
        asked, opened = "<tool>519<user>left?<assistant>", f"<user>{prompt}<user>519+118+77<assistant>"
    else:
        asked, opened = "|519||left?|", f"{prompt}|519+118+77|"
    assert first.endswith(f"[214+305]<eos>{asked}519+118+77<eos>")
    assert second.startswith(f"{opened}[519+118]<eos>")
    assert last.endswith("714<eos>")
    assert [t.turns for t in session.trajectories] == [2, 2, 2, 1]
    assert [t.tool_calls for t in session.trajectories] == [1, 1, 1, 0]
    assert all(t.breaks == 0 for t in session.trajectories)


def test_compress_by_default_when_little_room_is_left():
    # 10 + 60 / 8 = 17 tokens have to be left after a tool's result: after the third one they are.
    more = {"context": 60, "max_new_tokens": 10, "agent": {"message": "so?"}}
    session = plain(*["[1+2]"] * 4, "3+3", "6", **more)
    first, second = run("compress", session)
    assert first.count("[1+2]") == 4
    assert second == "total:1+2+3=|3+3|6<eos>"


def test_compress_never_ends_with_a_summary():
    agent = {"compress_at": 8, "turns": 3}
    session = plain("[1+2]", "3+3", "[3+3]", "6", agent=agent)
    assert run("compress", session)[-1] == "total:1+2+3=|3+3|[3+3]<eos>"


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
@pytest.mark.parametrize("loop", LOOPS)
def test_every_loop_runs_with_a_real_engine_and_repeats(loop: str, chat: bool):
    agent = {"tool_call_format": "plain", "compress_at": 24, "turns": 4, "message": "so?"}

    async def sessions(policy: EnginePolicy) -> list[list[list[int]]]:
        made = [
            session_of(
                "sort:312=",
                policy,
                index=index,
                chat=chat,
                context=80,
                max_new_tokens=9,
                agent=agent,
                toolbox=CALCULATOR,
                check=lambda text: float("1" in text),
            )
            for index in range(12)
        ]
        await asyncio.gather(*(LOOPS[loop](session) for session in made))
        results = [read_result(None, session) for session in made]
        for trajectory in itertools.chain.from_iterable(r.trajectories for r in results):
            assert len(trajectory) <= 80
            assert trajectory.pieces[-1].sampled
        return [[t.ids() for t in result.trajectories] for result in results]

    with engine_of(tiny(), slots=12) as engine:
        policy = EnginePolicy(engine)
        assert asyncio.run(sessions(policy)) == asyncio.run(sessions(policy))


async def own_loop(session: Session) -> None:
    await session.generate("so")


def not_async(session: Session) -> None:
    """A loop must be a coroutine function."""


def test_loops_are_found_by_name():
    assert find_loop("tool_use") is LOOPS["tool_use"]
    assert find_loop("tests.sessions.test_loops:own_loop").__name__ == "own_loop"
    with pytest.raises(RecipeError, match=r"agent\.loop: found 'tooluse'.*\n.*did you mean tool_use"):
        find_loop("tooluse")
    with pytest.raises(RecipeError, match=r"agent\.loop: .*a coroutine function"):
        find_loop("tests.sessions.test_loops:not_async")

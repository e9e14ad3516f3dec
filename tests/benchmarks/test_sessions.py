from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import pytest
from benchmarks.sessions import (
    TOOL_TURNS,
    TURN_TOKENS,
    Crowd,
    Span,
    busy_share,
    errand,
    longest_pause,
    turns_of,
    watch_steps,
)

from practicum.engines.torch.scheduler import Scheduler
from practicum.sessions.session import Session
from practicum.sessions.tools.toolbox import ToolOutcome

PROMPTS, SAMPLES = 2, 3


@pytest.fixture(scope="module", autouse=True)
def _models_aside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.model.CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    group = Crowd(PROMPTS, SAMPLES)
    yield group
    group.engine.close()


def logged(crowd: Crowd, meet: Callable[[], Any] | None) -> tuple[list[str], list[Session]]:
    """What the sessions did, in order: they asked the model, or got a tool's answer."""
    log: list[str] = []

    async def loop(session: Session) -> None:
        generate, tool = session.generate, session.tool

        async def asks(*args: Any, **more: Any) -> Any:
            log.append(f"turn {len(session.trajectory.sampled())}")
            return await generate(*args, **more)

        async def calls(name: str, arguments: Mapping[str, Any]) -> ToolOutcome:
            ran = await tool(name, arguments)
            log.append("tool")
            return ran

        session.generate, session.tool = asks, calls
        await errand(session, 0, meet)

    return log, crowd.run(loop, seed=1)


def test_a_session_takes_the_turns_that_were_drawn_and_a_tool_after_all_but_the_last(crowd: Crowd) -> None:
    for session in logged(crowd, None)[1]:
        turns = [len(ids) for ids in session.trajectory.sampled()]
        assert turns == turns_of(session.prompt.uid, session.index)
        assert session.trajectory.tool_calls == len(turns) - 1
        assert session.trajectory.tool_errors == 0
        assert TOOL_TURNS[0] <= len(turns) - 1 <= TOOL_TURNS[1]
        assert all(TURN_TOKENS[0] <= tokens <= TURN_TOKENS[1] for tokens in turns)


def test_in_waves_nobody_begins_a_turn_before_all_tools_of_the_one_before_have_answered(crowd: Crowd) -> None:
    free, sessions = logged(crowd, None)
    waves, same = logged(crowd, asyncio.Barrier(PROMPTS * SAMPLES).wait)
    count = PROMPTS * SAMPLES
    assert waves[: 2 * count] == ["turn 0"] * count + ["tool"] * count
    assert sorted(free) == sorted(waves)
    assert [len(s.trajectory) for s in sessions] == [len(s.trajectory) for s in same]


def test_every_step_of_the_engine_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "step", Scheduler.step)
    spans = watch_steps()
    group = Crowd(1, 1)
    group.run(lambda session: errand(session, 0), seed=0)
    group.engine.close()
    assert len(spans) == sum(turns_of(0, 0))
    assert all(one.ended <= two.began for one, two in pairwise(spans))


def test_the_engine_is_at_work_while_a_step_runs() -> None:
    steps = [Span(11.0, 12.0), Span(12.5, 13.5), Span(15.0, 19.0)]
    assert busy_share(steps, Span(10.0, 20.0)) == 0.6
    assert longest_pause(steps, Span(10.0, 20.0)) == 1.5
    assert longest_pause(steps, Span(8.0, 20.0)) == 3.0
    assert longest_pause(steps, Span(10.0, 24.0)) == 5.0

"""A session's turns, forks and contexts, and what a loop may return of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from practicum.concurrency.gather import gather_all
from practicum.engines.protocol import Counter, GenerateRequest
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.errors import EngineError, RecipeError
from practicum.models.tokenizer import make_tokenizer
from practicum.recipe.schema.rollout_sections import ToolSection
from practicum.sessions.attempts import SessionResult, read_result
from practicum.sessions.demonstrator import DemonstratorPolicy
from practicum.sessions.session import EnginePolicy, Session, TokenSpan, Trajectory
from practicum.sessions.tools.toolbox import Toolbox
from practicum.tasks.messages import Message, tool_result, user
from practicum.tasks.prompts import Prompt
from tests.engines.engines import engine_of, plain_logprobs, sampling, tiny
from tests.sessions.sessions import Scripted, session_of

TOKENIZER = make_tokenizer()
EOS = TOKENIZER.eos_token_id


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny()


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel) -> Iterator[TorchEngine]:
    with engine_of(model, slots=32) as engine:
        yield engine


def sampled(engine: TorchEngine, **more: Any) -> Session:
    return session_of("sort:312=", EnginePolicy(engine), context=96, **{"max_new_tokens": 6, **more})


def scripted(*turns: str, **more: Any) -> Session:
    return session_of("sort:312=", Scripted([ids_of(turn) for turn in turns]), **more)


def test_a_single_turn_is_the_engines_own_sample(engine: TorchEngine):
    session = sampled(engine, uid=5, index=3, seed=11)

    async def play():
        turn = await session.generate()
        direct = await engine.generate(
            GenerateRequest(ids_of("sort:312="), session.sampling, Counter(11, 5, 3, 0))
        )
        return turn, direct

    turn, direct = asyncio.run(play())
    assert turn.tokens == direct.tokens.tolist()
    assert turn.finish == direct.finish
    assert turn.text == TOKENIZER.decode(turn.tokens, skip_special_tokens=True)
    assert torch.equal(session.trajectory.columns()["rollout_logprobs"], direct.logprobs)


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
def test_logprobs_of_every_turn_are_those_of_the_whole_row(
    engine: TorchEngine, model: PreTrainedModel, chat: bool
):
    session = sampled(engine, chat=chat)

    async def play() -> None:
        await session.generate()
        await session.generate("again")
        await session.generate([tool_result("calculator", "42")], max_new_tokens=3)

    asyncio.run(play())
    columns = session.trajectory.columns()
    mask, response = columns["response_mask"], columns["response_ids"]
    scores_RV = plain_logprobs(model, columns["prompt_ids"].tolist(), response)
    expected = scores_RV.gather(1, response[:, None])[:, 0]
    torch.testing.assert_close(columns["rollout_logprobs"][mask], expected[mask], rtol=0, atol=1e-4)
    assert (~mask).any()
    assert session.trajectory.turns == 3
    assert session.text() == "".join(session.said())


def test_plain_text_goes_on_as_it_is_and_messages_between_bars():
    session = scripted("1", "2", "3")

    async def play() -> None:
        await session.generate()
        await session.generate(" no, ")
        await session.generate([tool_result("calculator", "42"), user("so")])

    asyncio.run(play())
    assert TOKENIZER.decode(session.trajectory.ids()) == "sort:312=1 no, 2|42||so|3"
    assert [m["role"] for m in session.messages] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "tool",
        "user",
        "assistant",
    ]
    with pytest.raises(EngineError, match="not with a system message"):
        asyncio.run(session.generate([{"role": "system", "content": "be brief"}]))


def test_every_turn_try_branch_and_session_has_its_own_randomness(engine: TorchEngine):
    async def play(attempt: int, index: int) -> list[tuple[int, ...]]:
        """What is sampled after the very same tokens, in several ways of getting there."""
        session = sampled(engine, index=index, attempt=attempt, max_new_tokens=12)
        forks = [session.fork(), session.fork()]
        forks.append(forks[0].fork())
        drawn = []
        for one in (session, *forks):
            for _ in range(2):
                one.new_trajectory()
                drawn.append(tuple((await one.generate()).tokens))
        return drawn

    async def play_all() -> list[list[tuple[int, ...]]]:
        return [await play(a, i) for a, i in ((0, 0), (1, 0), (0, 1), (0, 0))]

    *once, again = asyncio.run(play_all())
    assert again == once[0]
    flat = [tokens for drawn in once for tokens in drawn]
    assert len(set(flat)) == len(flat)


def test_many_sessions_at_once_sample_what_they_sample_alone(engine: TorchEngine):
    toolbox = Toolbox([ToolSection(use="tests.sessions.sessions:nap")])

    async def play(number: int) -> list[list[int]]:
        more = {"toolbox": toolbox, "max_new_tokens": 5}
        session = sampled(engine, uid=number // 4, index=number % 4, **more)
        await session.generate()
        fork = session.fork()

        async def branch(one: Session, naps: int) -> None:
            ran = await one.tool("nap", {"ms": naps * number % 13})
            await one.generate([tool_result("nap", ran.text)])

        await gather_all([branch(session, 5), branch(fork, 7)])
        assert [t.tool_calls for t in session.trajectories] == [1, 1]
        assert toolbox.errors == 0
        return [t.ids() for t in session.trajectories]

    async def one_by_one() -> list[list[list[int]]]:
        return [await play(number) for number in range(0, 256, 8)]

    async def at_once() -> list[list[list[int]]]:
        return await gather_all(play(number) for number in range(256))

    assert asyncio.run(at_once())[::8] == asyncio.run(one_by_one())


def test_a_fork_trains_nothing_twice(engine: TorchEngine):
    session = sampled(engine, chat=True)

    async def play() -> Session:
        await session.generate()
        fork = session.fork()
        await session.generate("one")
        await fork.generate("two")
        return fork

    fork = asyncio.run(play())
    second, first = session.trajectories  # the parent went on after the fork, so it has the last turn
    assert fork.trajectories == [second]
    shared = first.prompt_ids + first.sampled()[0]
    assert second.prompt_ids == shared
    assert (len(first.sampled()), len(second.sampled())) == (2, 1)
    assert fork.messages[:2] == session.messages[:2]
    assert fork.messages[2] == user("two")
    assert first.breaks == second.breaks == 0


def test_trajectories_come_in_the_order_of_branches_not_of_time():
    session = scripted(*"123456")

    async def play() -> list[Trajectory]:
        a, b = session.fork(), session.fork()
        c = a.fork()
        await b.generate()
        await c.generate()
        later = a.new_trajectory()
        await a.generate()
        session.new_trajectory()
        await session.generate()
        return [c.trajectory, later, b.trajectory, session.trajectory]

    expected = asyncio.run(play())
    assert read_result(None, session).trajectories == expected


def test_the_last_turn_is_that_of_whoever_went_on():
    """A helper's trajectory comes before the one that its result went into; a fork that took over, after."""
    asks, leaves = scripted(*"1234"), scripted(*"12")

    async def play() -> None:
        helper = asks.fork()
        helper.new_trajectory("copy:7=")
        await asks.generate(f"|{(await helper.generate()).text}|")
        await asks.fork().generate()
        await asks.generate()
        await leaves.generate()
        await leaves.fork().generate()

    asyncio.run(play())
    assert [asks.said(t) for t in read_result(None, asks).trajectories] == [["1"], ["3"], ["2", "4"]]
    assert [leaves.said(t) for t in read_result(None, leaves).trajectories] == [["1"], ["2"]]


def test_a_turn_is_cut_to_the_room_that_is_left():
    session = scripted("12345", "678", context=len("sort:312=") + 7, max_new_tokens=5)

    async def play():
        assert (await session.generate()).finish == "length"
        assert session.room == 2
        cut = await session.generate(ids_of("!"))
        assert (cut.text, cut.finish, session.room) == ("6", "context", 0)
        before = session.trajectory.ids()
        none = await session.generate("more")
        assert (none.text, none.tokens, none.finish) == ("", [], "context")
        assert session.trajectory.ids() == before
        assert session.trajectory.turns == 2

    asyncio.run(play())
    assert session.trajectory.finish == "context"


def test_contexts_are_opened_with_text_messages_or_tokens():
    plain, chat = scripted("1"), scripted("1", chat=True)
    opened = [
        plain.new_trajectory("copy:1="),
        plain.new_trajectory([user("copy:1="), user("x")]),
        plain.new_trajectory([*plain.opening, user("x")]),
        chat.new_trajectory("copy:1="),
        chat.new_trajectory([user("copy"), {"role": "assistant", "content": "1"}, user("x")]),
        chat.new_trajectory(ids_of("ab")),
        chat.new_trajectory(),
    ]
    assert [TOKENIZER.decode(t.prompt_ids) for t in opened] == [
        "copy:1=",
        "copy:1=|x|",
        "sort:312=|x|",
        "<user>copy:1=<assistant>",
        "<user>copy<assistant>1<eos><user>x<assistant>",
        "ab",
        "<user>sort:312=<assistant>",
    ]
    assert chat.trajectory is opened[-1]


def test_one_session_takes_one_turn_at_a_time(engine: TorchEngine):
    session = sampled(engine)

    async def play() -> None:
        await gather_all([session.generate(), session.generate()])

    with pytest.raises(EngineError, match="one turn at a time: use fork"):
        asyncio.run(play())
    with pytest.raises(EngineError, match="max_new_tokens is 0"):
        asyncio.run(session.generate(max_new_tokens=0))
    with pytest.raises(RecipeError, match=r"add it to agent\.tools"):
        asyncio.run(session.tool("calculator", {}))


def test_recorded_experts_are_those_of_the_first_time_a_token_was_an_input():
    model = tiny("qwen3_moe")
    with engine_of(model) as engine:
        session = sampled(engine)

        async def play():
            await session.generate()
            once = session.trajectory.experts
            await session.generate([tool_result("calculator", "42")])
            again = await engine.generate(
                GenerateRequest(session.trajectory.ids(), sampling(1), Counter(0, 0))
            )
            return once, again.experts

        once, whole = asyncio.run(play())
    assert once is not None
    assert whole is not None
    merged = session.trajectory.columns()["routed_experts"]
    assert merged.shape == (len(session.trajectory), 2, 2)
    assert torch.equal(merged[: len(once)], once)
    assert torch.equal(merged[:-1].sort(-1).values, whole[:-1].sort(-1).values)
    assert not merged[-1].any()
    # A turn's last token is no input before the next turn; then it is.
    assert len(once) == len(session.start.ids) + len(session.trajectory.sampled()[0]) - 1


def test_a_demonstrator_plays_the_loop_and_leaves_demonstrations():
    heard: list[list[Message]] = []

    def demonstrate(prompt: Prompt, messages: list[Message]) -> str:
        heard.append(messages)
        return f"{prompt.content} {len(messages)}"

    session = session_of("copy:1=", DemonstratorPolicy(demonstrate, TOKENIZER))

    async def play() -> None:
        await session.generate()
        await session.generate([tool_result("calculator", "42")])

    asyncio.run(play())
    first, second = (ids_of(f"copy:1= {n}<eos>") for n in (1, 3))
    columns = session.trajectory.columns()
    assert columns["response_ids"].tolist() == first + ids_of("|42|") + second
    assert columns["response_mask"].sum() == len(first) + len(second)
    assert not columns["rollout_logprobs"].any()
    said = {"role": "assistant", "content": "copy:1= 1"}
    assert heard == [[user("copy:1=")], [user("copy:1="), said, tool_result("calculator", "42")]]
    assert session.trajectory.finish == "stop"
    tight = session_of("copy:1=", DemonstratorPolicy(demonstrate, TOKENIZER), context=12)
    with pytest.raises(EngineError, match=r"turn 1 has 10 tokens, and 5 are left of a context of 12"):
        asyncio.run(tight.generate())


def played() -> tuple[Session, Trajectory, Trajectory, Trajectory]:
    """A session with two trajectories that have samples, and then one without."""
    session = scripted("1", "2")

    async def play() -> None:
        await session.generate()
        session.new_trajectory()
        await session.generate()
        session.new_trajectory()

    asyncio.run(play())
    first, second, empty = session.trajectories
    return session, first, second, empty


def test_what_a_loop_returns_is_read():
    session, first, second, empty = played()
    assert read_result(None, session) == SessionResult([first, second], None)
    assert read_result(second, session) == SessionResult([second], None)
    assert read_result([second, first, empty], session) == SessionResult([second, first], None)
    assert read_result((None, 1), session) == SessionResult([first, second], 1.0)
    assert read_result(([first, empty], 0.5), session) == SessionResult([first], 0.5)
    assert read_result(([first, second], [0.5, 2]), session) == SessionResult([first, second], [0.5, 2.0])
    assert (first.reward, second.reward) == (0.5, 2.0)
    assert read_result(None, session).reward == [0.5, 2.0]


def test_a_sessions_reward_is_earned_once():
    _, first, second, _ = played()
    both = [first, second]
    assert SessionResult(both, 0.5).row_rewards() == [0.0, 0.5]
    assert SessionResult(both, [1.0, 2.0]).row_rewards() == [1.0, 2.0]
    assert SessionResult(both).row_rewards() == [None, None]


def test_what_a_loop_may_not_return_names_the_loop():
    session, first, second, empty = played()
    stranger = scripted("1").trajectory
    wrong: list[tuple[object, str]] = [
        ("text", "returned a str; expected None, a Trajectory"),
        ([first, 1.0], "returned a float; expected"),
        ((first, second), "returned the reward Trajectory"),
        ((first, math.nan), "the reward nan; expected a finite number"),
        (([first, second], [1.0, math.inf]), "the reward inf"),
        (([first, second], [1.0]), "1 rewards for 2 trajectories"),
        (([first, second, empty], [1.0, 1.0, 1.0]), "rewarded a trajectory without sampled tokens"),
        ([stranger], "that its session did not open"),
        ([first, first], "the same trajectory twice"),
        (empty, "left no trajectory with sampled tokens"),
        ([], "left no trajectory with sampled tokens"),
    ]
    for result, reason in wrong:
        for trajectory in (first, second, empty):
            trajectory.reward = None
        with pytest.raises(EngineError, match=reason):
            read_result(result, session)
    first.reward, empty.reward = 1.0, None
    with pytest.raises(EngineError, match="rewarded 1 of 2 trajectories"):
        read_result(None, session)


@pytest.mark.parametrize(
    ("turns", "share"),
    [
        ([[1, 2, 3, 4, 5]], 0.0),
        ([[7] * 8], 0.8),
        ([[1, 2, 3], [4, 1, 2, 3, 4]], 0.2),
        ([[1, 2]], 0.0),
        ([], 0.0),
    ],
)
def test_repetition_is_the_share_of_runs_of_four_tokens_that_occurred_before(turns, share):
    trajectory = Trajectory([1])
    for ids in turns:
        zeros = torch.zeros(len(ids))
        trajectory.pieces.append(TokenSpan(torch.tensor(ids), True, zeros, zeros))
        trajectory.add_given([9, 9, 9, 9, 9])
    assert trajectory.repetition == pytest.approx(share)

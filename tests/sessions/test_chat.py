"""Later turns extend the earlier tokens; a template that rewrites what is there opens a new trajectory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from practicum.errors import EngineError
from practicum.models.processor import make_processor, make_vision_tokenizer
from practicum.recipe.schema.rollout_sections import Agent
from practicum.sessions.session import Session, SessionStart
from practicum.tasks.messages import Message, picture_message, tool_result, user
from practicum.tasks.pictures import Picture
from practicum.tasks.prompts import Encoded, Prompt, encode_prompt
from tests.engines.engines import sampling
from tests.sessions.sessions import Scripted, one_by_one, prompt_of, session_of, tokenizer_of

EXTENDING = ("own", "chatml", "trims", "llama3")
WORDS = st.text("abc12 ", min_size=1, max_size=8).map(str.strip).filter(bool)


def conversation(template: str, turns: list[tuple[str, bool]], **more: Any) -> Session:
    """A chat whose turns are these texts, without merges; each ends with a stop token, or is cut."""
    tokenizer = tokenizer_of(template)
    ends = [[tokenizer.eos_token_id] if ended else [] for _, ended in turns]
    scripts = [[*one_by_one(tokenizer, text), *end] for (text, _), end in zip(turns, ends, strict=True)]
    return session_of("abab a", Scripted(scripts), tokenizer, chat=True, **more)


def rendered(session: Session, messages: list[Message]) -> str:
    return str(session.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def decoded(session: Session) -> str:
    return str(session.tokenizer.decode(session.trajectory.ids(), skip_special_tokens=False))


@settings(max_examples=60)
@given(
    template=st.sampled_from(EXTENDING),
    turns=st.lists(st.tuples(WORDS, st.booleans(), st.lists(WORDS, min_size=1, max_size=2)), max_size=5),
)
def test_many_turns_decode_to_the_rendered_conversation_and_no_token_changes(
    template: str, turns: list[tuple[str, bool, list[str]]]
):
    session = conversation(template, [("abab", True), *((text, ended) for text, ended, _ in turns)])
    said: list[Message] = [user("abab a")]

    async def play() -> None:
        await session.generate()
        wrote = "abab"
        for text, _, news in turns:
            before = session.trajectory.ids()
            new = [user(news[0]), *(tool_result("calculator", n) for n in news[1:])]
            said.extend([{"role": "assistant", "content": wrote}, *new])
            await session.generate(new)
            assert session.trajectory.ids()[: len(before)] == before
            wrote = text

    asyncio.run(play())
    wrote, ended = (turns[-1][0], turns[-1][1]) if turns else ("abab", True)
    end = str(session.tokenizer.eos_token) if ended else ""
    assert decoded(session) == rendered(session, said) + wrote + end
    assert len(session.trajectories) == 1
    assert session.trajectory.breaks == 0


def test_only_what_the_student_wrote_is_sampled():
    session = conversation("chatml", [("ab", True), ("ba", False), ("c", True)])

    async def play() -> None:
        await session.generate()
        await session.generate("12")
        await session.generate("21")

    asyncio.run(play())
    tokenizer, columns = session.tokenizer, session.trajectory.columns()
    ids, mask = columns["response_ids"], columns["response_mask"]
    assert tokenizer.decode(ids[mask]) == "ab<|im_end|>bac<|im_end|>"
    given = "\n<|im_start|>user\n12<|im_end|>\n<|im_start|>assistant\n"
    # The template closes a turn that was cut; the closing token is no one's sample.
    assert tokenizer.decode(ids[~mask]) == given + "<|im_end|>" + given.replace("12", "21")
    assert columns["rollout_logprobs"][mask].eq(-1).all()
    assert columns["rollout_logprobs"][~mask].eq(0).all()


def test_sampled_tokens_stay_though_the_tokenizer_would_choose_others():
    session = conversation("chatml", [("aba", True), ("c", True)])

    async def play() -> list[int]:
        turn = await session.generate()
        await session.generate("go on")
        return turn.tokens

    tokens = asyncio.run(play())
    canonical = session.tokenizer.encode("aba<|im_end|>", add_special_tokens=False)
    assert len(canonical) < len(tokens)
    start = len(session.start.ids)
    assert session.trajectory.ids()[start : start + len(tokens)] == tokens


def test_a_turn_that_was_cut_within_a_character_goes_on():
    tokenizer = tokenizer_of("chatml")
    half = tokenizer.encode("é", add_special_tokens=False)[:1]
    session = session_of("a", Scripted([half, [5]]), tokenizer, chat=True)

    async def play() -> None:
        await session.generate()
        await session.generate("go on")

    asyncio.run(play())
    assert session.trajectory.breaks == 0
    assert session.trajectory.sampled()[0] == half


def test_a_template_that_strips_thoughts_breaks_the_trajectory():
    session = conversation("strips_thoughts", [("a</think>b", True), ("c", True)])

    async def play() -> None:
        await session.generate()
        await session.generate("12")

    asyncio.run(play())
    first, second = session.trajectories
    assert (first.breaks, second.breaks) == (0, 1)
    assert session.trajectory is second
    assert session.tokenizer.decode(first.sampled()[0]) == "a</think>b<|im_end|>"
    whole = [user("abab a"), {"role": "assistant", "content": "a</think>b"}, user("12")]
    assert session.tokenizer.decode(second.prompt_ids) == rendered(session, whole)
    assert "</think>" not in session.tokenizer.decode(second.prompt_ids)
    assert second.sampled_tokens == 2


def test_a_break_without_room_for_it_opens_nothing():
    session = conversation("strips_thoughts", [("a</think>b", True), ("c", True)], context=64)

    async def play() -> str:
        await session.generate()
        return (await session.generate("12" * 40)).finish

    assert asyncio.run(play()) == "context"
    (only,) = session.trajectories
    assert (only.finish, only.turns, only.breaks) == ("context", 1, 0)


@pytest.mark.parametrize(
    ("template", "text", "ended", "breaks"),
    [
        ("strips_thoughts", "b", True, 0),
        ("trims", "ab", True, 0),
        ("trims", " ab", True, 1),
        ("trims", "ab ", False, 1),
        ("llama3", "ab\n", True, 1),
        ("chatml", " ab \n", True, 0),
    ],
)
def test_a_template_breaks_only_where_it_changes_something(
    template: str, text: str, ended: bool, breaks: int
):
    session = conversation(template, [(text, ended), ("c", True)])

    async def play() -> None:
        await session.generate()
        await session.generate("12")

    asyncio.run(play())
    assert sum(t.breaks for t in session.trajectories) == breaks
    assert len(session.trajectories) == 1 + breaks


def test_another_stop_token_than_the_templates_breaks():
    tokenizer = tokenizer_of("chatml")
    other = tokenizer.bos_token_id
    assert isinstance(other, int)
    session = session_of("a", Scripted([[5, other], [6]]), tokenizer, chat=True)
    session.sampling = sampling(8, stop=[other])

    async def play() -> None:
        assert (await session.generate()).finish == "stop"
        await session.generate("go on")

    asyncio.run(play())
    assert session.trajectory.breaks == 1


def test_a_stop_token_of_one_turn_only_is_part_of_what_was_written():
    session = conversation("chatml", [("a1", False), ("c", True)])
    (one,) = session.tokenizer.encode("1", add_special_tokens=False)

    async def play() -> None:
        assert (await session.generate(stop=[one])).finish == "stop"
        await session.generate("go on")

    asyncio.run(play())
    assert session.trajectory.breaks == 0
    assert "a1<|im_end|>" in decoded(session)


def test_tokens_within_a_turn_are_part_of_it():
    session = conversation("chatml", [("ab", False), ("c", True), ("a", True)])

    async def play() -> None:
        await session.generate()
        await session.generate(session.tokenizer.encode(" wait ", add_special_tokens=False))
        await session.generate("go on")

    asyncio.run(play())
    assert session.messages[1]["content"] == "ab wait c"
    assert len(session.trajectories) == 1
    assert decoded(session) == rendered(session, session.messages[:-1]) + "a<|im_end|>"


def test_a_first_turn_may_bring_more_messages():
    session = conversation("chatml", [("ab", True)])
    asyncio.run(session.generate([user("12"), user("21")]))
    whole = [user("abab a"), user("12"), user("21")]
    assert session.tokenizer.decode(session.trajectory.prompt_ids) == rendered(session, whole)
    assert session.trajectory.breaks == 0


def test_tools_are_shown_in_every_context():
    calculator = {"type": "function", "function": {"name": "calculator", "parameters": {}}}
    session = conversation("strips_thoughts", [("a</think>", True), ("b", True)], tools=[calculator])

    async def play() -> None:
        await session.generate()
        await session.generate("12")

    asyncio.run(play())
    session.new_trajectory([user("21")])
    shown = [str(session.tokenizer.decode(t.prompt_ids)) for t in session.trajectories]
    assert len(shown) == 3
    assert all(text.startswith("<|im_start|>tools\ncalculator ") for text in shown)


@pytest.mark.parametrize(
    ("template", "new", "reason"),
    [
        ("refuses_tools", [tool_result("calculator", "1")], r"refused a conversation \(user, .*tool\)"),
        ("leaves_out_results", [user("2"), tool_result("calculator", "1")], "leaves out a tool message"),
        ("chatml", [{"role": "user", "content": [{"type": "image"}]}], "content that is not text: images"),
        ("chatml", [{"role": "user", "content": None}], "content that is not text"),
        ("chatml", [{"role": "user"}], "expected role and content"),
        ("chatml", ["text"], "expected role and content"),
    ],
)
def test_messages_that_can_not_be_said_are_refused(template: str, new: list[Any], reason: str):
    session = conversation(template, [("ab", True), ("c", True)])

    async def play() -> None:
        await session.generate()
        await session.generate(new)

    with pytest.raises(EngineError, match=reason):
        asyncio.run(play())


def test_a_context_of_tokens_does_not_go_on_with_messages():
    session = conversation("chatml", [("ab", True), ("c", True)])

    async def play() -> None:
        session.new_trajectory([1, 2, 3])
        await session.generate()
        await session.generate("text")

    with pytest.raises(EngineError, match="opened with tokens"):
        asyncio.run(play())


@pytest.fixture(scope="module")
def seen() -> tuple[Prompt, Encoded, PreTrainedTokenizerBase]:
    """A prompt with two pictures of different sizes."""
    tokenizer = make_vision_tokenizer()
    pictures = [Picture(width, 16, 200, ()) for width in (16, 24)]
    prompt = prompt_of([picture_message(pictures, "which")])
    processor = make_processor(tokenizer)
    return prompt, encode_prompt(prompt, tokenizer, chat=True, system="see", processor=processor), tokenizer


def test_pictures_stay_with_every_context_that_begins_with_the_prompt(
    seen: tuple[Prompt, Encoded, PreTrainedTokenizerBase],
):
    prompt, encoded, tokenizer = seen
    assert encoded.images is not None
    start = SessionStart(encoded.ids, encoded.images, encoded.messages)
    assert isinstance(tokenizer.eos_token_id, int)
    turns, drawn = Scripted([[20], [21]]), sampling(4, stop=[tokenizer.eos_token_id])
    session = Session(prompt, start, 0, turns, drawn, tokenizer, context=256, agent=Agent())

    async def play() -> None:
        await session.generate()
        await session.generate("and")

    asyncio.run(play())
    extended = session.trajectory
    again = session.new_trajectory([*session.opening, user("and")])
    other = session.new_trajectory([user("and")])
    (assistant,) = tokenizer.encode("<assistant>", add_special_tokens=False)
    assert encoded.ids[-1] == assistant
    assert extended.ids()[: len(encoded.ids)] == encoded.ids
    added = tokenizer.encode("<user>and<assistant>", add_special_tokens=False)
    assert again.prompt_ids == [*encoded.ids[:-1], *added]
    assert extended.images is again.images is encoded.images
    assert session.fork().trajectory.images is None
    assert other.images is None

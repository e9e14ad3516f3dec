"""A session: an attempt at a prompt in one or more turns, with one or more trajectories.

A trajectory holds the tokens of one context, their origin, and counts. A policy writes the turns: the engine,
or a demonstrator for supervised training (`demonstrator.py`).
"""

from __future__ import annotations

import asyncio
import operator
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from practicum.engines.protocol import Counter, GenerateRequest, Generates, Generation, Sampling
from practicum.errors import RecipeError, SessionError
from practicum.models.vision import Images
from practicum.recipe.schema.rollout_sections import Agent
from practicum.sessions.chat import (
    Chat,
    PlainFormat,
    SessionStart,
    WrittenTurn,
    begins_with,
    check_messages,
    read,
    tokenise,
)
from practicum.sessions.tools.toolbox import Toolbox, ToolOutcome
from practicum.tasks.messages import Message, user
from practicum.tasks.prompts import Prompt
from practicum.user_code import short_repr

TAIL, RUN = 256, 4


@dataclass(slots=True)
class TokenSpan:
    """Consecutive response tokens of one origin: a turn of the student, or text of a tool or template."""

    ids: Tensor
    sampled: bool
    logprobs: Tensor
    plain_logprobs: Tensor
    version: int | None = None
    """Version of the weights that sampled it, the oldest if it changed during sampling."""
    topk_ids: Tensor | None = None
    """The student's most likely tokens [n, K] at each position, if the engine reports them."""


@dataclass(eq=False, slots=True)
class Trajectory:
    """Tokens of one context: a prompt, then sampled and inserted spans in order."""

    prompt_ids: list[int]
    images: Images | None = None
    messages: list[Message] = field(default_factory=list)
    """The conversation before the open turn, whose tokens start at `turn_start`."""
    turn_start: int = 0
    pieces: list[TokenSpan] = field(default_factory=list)
    version_min: int | None = None
    version_max: int = 0
    shared: int = 0
    """Sampled tokens that the engine computed for another session."""
    finish: str = ""
    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    breaks: int = 0
    """1 if it was opened because the chat template rewrote text of the trajectory before."""
    reward: float | None = None
    """Reward of this trajectory, if the loop set one."""
    trace: str | None = None
    """Traceback of the first custom tool that raised."""
    reward_parts: dict[str, float] | None = None
    """Parts of the session's reward by name, on its last trajectory."""
    requests: dict[str, int] | None = None
    """Counts of the session's HTTP requests, on its last trajectory."""
    clients: tuple[str, ...] = ()
    """Path and client of each of the requests."""
    experts: Tensor | None = None
    """Experts of the first n tokens [n, L, E]. Later tokens were never an input."""

    def add_sampled(self, generation: Generation) -> None:
        if self.experts is None or generation.experts is None:
            self.experts = generation.experts
        else:  # a sampled token keeps the experts it had when sampled
            self.experts = torch.cat([self.experts, generation.experts[len(self.experts) :]])
        first = generation.version_min
        numbers = generation.tokens, True, generation.logprobs, generation.plain_logprobs
        self.pieces.append(TokenSpan(*numbers, version=first, topk_ids=generation.topk_ids))
        self.version_min = first if self.version_min is None else min(self.version_min, first)
        self.version_max = max(self.version_max, generation.version_max)
        self.shared += generation.shared
        self.finish = generation.finish
        self.turns += 1

    def add_given(self, ids: Sequence[int]) -> None:
        """Append tokens of a tool or template, which are not trained on."""
        if ids:
            zeros = torch.zeros(len(ids))
            self.pieces.append(TokenSpan(torch.tensor(ids, dtype=torch.int64), False, zeros, zeros))

    def drop_given(self) -> None:
        """Remove inserted tokens at the end that no turn follows."""
        while self.pieces and not self.pieces[-1].sampled:
            self.pieces.pop()

    def drop_last(self) -> None:
        """Remove the last turn, as if it had not been sampled."""
        self.pieces.pop()
        self.turns -= 1
        self.drop_given()
        self.experts = None if self.experts is None else self.experts[: max(0, len(self) - 1)]

    def ids(self) -> list[int]:
        return self.prompt_ids + [i for piece in self.pieces for i in piece.ids.tolist()]

    def sampled(self) -> list[list[int]]:
        return [piece.ids.tolist() for piece in self.pieces if piece.sampled]

    def versions(self) -> list[int | None]:
        """Return the weight version that sampled each response token, or None for inserted ones."""
        return [piece.version for piece in self.pieces for _ in range(len(piece.ids))]

    @property
    def sampled_tokens(self) -> int:
        return sum(len(piece.ids) for piece in self.pieces if piece.sampled)

    @property
    def repetition(self) -> float:
        """Share of the runs of RUN tokens that occurred before, in the last TAIL sampled tokens."""
        ids = [i for own in self.sampled() for i in own][-TAIL:]
        runs = list(zip(*(ids[start:] for start in range(RUN)), strict=False))
        return 1 - len(set(runs)) / len(runs) if runs else 0.0

    def __len__(self) -> int:
        return len(self.prompt_ids) + sum(len(piece.ids) for piece in self.pieces)

    def columns(self) -> dict[str, Tensor]:
        pieces = self.pieces
        empty_ids, empty = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
        masks = [torch.full_like(piece.ids, piece.sampled, dtype=torch.bool) for piece in pieces]
        columns = {
            "prompt_ids": torch.tensor(self.prompt_ids, dtype=torch.int64),
            "response_ids": torch.cat([p.ids for p in pieces]) if pieces else empty_ids,
            "response_mask": torch.cat(masks) if pieces else empty_ids.bool(),
            "rollout_logprobs": torch.cat([p.logprobs for p in pieces]) if pieces else empty,
            "plain_logprobs": torch.cat([p.plain_logprobs for p in pieces]) if pieces else empty,
        }
        if (width := max((p.topk_ids.shape[1] for p in pieces if p.topk_ids is not None), default=0)) > 0:
            given = [torch.arange(width).expand(len(p.ids), -1) for p in pieces]  # of tokens not sampled
            tops = [x if p.topk_ids is None else p.topk_ids for p, x in zip(pieces, given, strict=True)]
            columns["rollout_topk_ids"] = torch.cat(tops)
        if self.experts is not None:
            columns["routed_experts"] = torch.cat(
                [self.experts, self.experts.new_zeros(len(self) - len(self.experts), *self.experts.shape[1:])]
            )
        return columns


class Policy(Protocol):
    """Writes turns: an engine or a demonstrator."""

    def next(
        self, trajectory: Trajectory, sampling: Sampling, counter: Counter, session: Session
    ) -> Awaitable[Generation]:
        """Return the next turn of the trajectory."""
        ...


class EnginePolicy:
    """The student: an engine samples its turns. With `keep`, the engine may cache each for the next one."""

    def __init__(self, engine: Generates, *, keep: bool = False) -> None:
        self._engine, self._keep = engine, keep

    def next(
        self, trajectory: Trajectory, sampling: Sampling, counter: Counter, session: Session
    ) -> Awaitable[Generation]:
        return self._engine.generate(
            GenerateRequest(
                trajectory.ids(),
                sampling,
                counter,
                images=trajectory.images,
                experts=trajectory.experts,
                keep=self._keep,
            )
        )


New = str | Sequence[Message] | Sequence[int]
"""New content of a conversation: text, messages or tokens."""


@dataclass(frozen=True)
class ModelTurn:
    """A turn of the model. `finish` is "context" if the context filled up during the turn."""

    tokens: list[int]
    finish: Literal["stop", "length", "context"]
    tokenizer: PreTrainedTokenizerBase = field(repr=False, compare=False)

    @cached_property
    def text(self) -> str:
        """The decoded tokens without special ones, cached."""
        return read(self.tokenizer, self.tokens, specials=False)


class NextTurn(NamedTuple):
    """A turn to sample: its trajectory, the tokens to add first, and the conversation if a turn begins."""

    trajectory: Trajectory
    ids: list[int]
    messages: list[Message] | None


class Session:
    """The interface of agent loops: the prompt, the model, tools, and trajectories.

    Each turn of each session has separate randomness, so samples do not depend on other sessions. A
    trajectory with the prompt is open from the start.
    """

    trajectory: Trajectory
    """The trajectory that `generate` continues."""

    def __init__(
        self,
        prompt: Prompt,
        start: SessionStart,
        index: int,
        policy: Policy,
        sampling: Sampling,
        tokenizer: PreTrainedTokenizerBase,
        *,
        context: int,
        agent: Agent,
        toolbox: Toolbox | None = None,
        check: Callable[[str], float] | None = None,
        seed: int = 0,
        attempt: int = 0,
        vocab: int | None = None,
    ) -> None:
        """`vocab` is the exclusive upper bound of token ids from a loop, if known."""
        self.prompt, self.start, self.index = prompt, start, index
        self.tokenizer, self.sampling, self.context = tokenizer, sampling, context
        self.agent, self.toolbox, self.check, self._vocab = agent, toolbox, check, vocab
        self.opening: list[Message] = start.messages or [user(cast(str, prompt.content))]
        """The prompt as messages, including the system message."""
        self._policy, self._seed, self._attempt = policy, seed, attempt
        self._branch: tuple[int, ...] = ()
        self._turn, self._busy = 0, False
        self._opened: list[Trajectory] = []
        self._forks: list[Session] = []
        self._left: tuple[Trajectory, int] | None = None
        """For a fork, the trajectory it continues, and that trajectory's number of turns at the fork."""
        self.new_trajectory()

    @property
    def trajectories(self) -> list[Trajectory]:
        """Return all trajectories of this session and its forks, in an order that does not depend on timing.

        A fork's trajectories come before the one it left if that continued afterwards, else after it. So the
        last one has the session's last turn.
        """
        return [t for own in self._opened for t in self._with_forks(own)]

    @property
    def messages(self) -> list[Message]:
        return [*self.trajectory.messages, *self._written().messages()]

    @property
    def room(self) -> int:
        return self.context - len(self.trajectory)

    def room_after(self, new: New | None) -> int:
        """Return the number of tokens that a turn after `new` may have. Below 1, no turn fits."""
        following = self.plan(new)
        return self.context - len(following.trajectory) - len(following.ids)

    def plan(self, new: New | None) -> NextTurn:
        """Return the turn that `generate` would sample after new content."""
        now = self.trajectory
        if new is None:
            return NextTurn(now, [], None)
        content: str | list[Any] = new if isinstance(new, str) else list(new)
        if (ids := self._as_ids(content)) is not None:
            return NextTurn(now, ids, None)
        added = [user(content)] if isinstance(content, str) else check_messages(content)
        written = self._written()
        messages = [*now.messages, *written.messages(), *added]
        if isinstance(content, str) and self.start.messages is None:
            return NextTurn(now, tokenise(self.tokenizer, content), messages)
        for turn in (written, replace(written, split=True)):
            messages = [*now.messages, *turn.messages(), *added]
            if (text := self._format.extend(now.messages, turn, added)) is not None:
                return NextTurn(now, tokenise(self.tokenizer, text), messages)
        fresh = self._of_messages(messages)
        fresh.breaks = len(written.messages())  # 0 if the model wrote nothing and only the prompt got longer
        return NextTurn(fresh, [], None)

    async def generate(
        self,
        new: New | NextTurn | None = None,
        *,
        max_new_tokens: int | None = None,
        stop: Collection[int] | None = None,
        stop_texts: Collection[str] = (),
    ) -> ModelTurn:
        """Append new content, then sample a turn, optionally with another length or other stop tokens.

        A turn ends with the token that completes one of `stop_texts`.

        Text is a user message in a chat, and is appended verbatim to a plain-text prompt. Without room,
        nothing is appended or sampled. All turns use the recipe's sampling distribution, which the learner
        trains.
        """
        if self._busy:
            raise SessionError("a session samples one turn at a time: use fork() for concurrent turns")
        # Invalid input is this loop's error. In the engine, it would fail all sessions.
        most_tokens = (
            self.sampling.max_new_tokens if max_new_tokens is None else operator.index(max_new_tokens)
        )
        if most_tokens < 1:
            raise SessionError(f"max_new_tokens is {most_tokens}, expected 1 or more")
        stops = self.sampling.stop if stop is None else frozenset(map(operator.index, stop))
        trajectory, new_ids, messages = new if isinstance(new, NextTurn) else self.plan(new)
        room = self.context - len(trajectory) - len(new_ids)
        if room < 1:
            self.trajectory.finish = "context"
            await asyncio.sleep(0)  # lets an endless loop yield to others and reach its deadline
            return ModelTurn([], "context", self.tokenizer)
        if trajectory is not self.trajectory:
            self._open(trajectory)
        trajectory.add_given(new_ids)
        if messages is not None:
            trajectory.messages, trajectory.turn_start = messages, len(trajectory)
        counter = Counter(self._seed, self.prompt.uid, self.index, self._next_turn())
        sampling = replace(self.sampling, max_new_tokens=min(most_tokens, room), stop=stops)
        self._busy = True
        try:
            generation = await self._policy.next(trajectory, sampling, counter, self)
        finally:
            self._busy = False
        generation = self._cut(generation, stop_texts, len(trajectory))
        trajectory.add_sampled(generation)
        cut = generation.finish == "length" and room < most_tokens
        trajectory.finish = finish = "context" if cut else generation.finish
        return ModelTurn(generation.tokens.tolist(), finish, self.tokenizer)

    async def tool(self, name: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Call a tool. If it fails, the text describes the error for the model."""
        if self.toolbox is None or not self.toolbox.tools:
            found = f"none, and agent.loop {self.agent.loop} calls {short_repr(name, 60)}"
            raise RecipeError("agent.tools", found, "the tools that the loop calls", "add it to agent.tools")
        trajectory = self.trajectory
        trajectory.tool_calls += 1
        ran = await self.toolbox.run(name, arguments)
        await asyncio.sleep(0)  # yields to others even if no tool ever waits
        trajectory.tool_errors += not ran.ok
        trajectory.trace = trajectory.trace or ran.trace
        return ran

    def fork(self) -> Session:
        """Return another session that continues from here. Its trajectories also belong to this one."""
        now = self.trajectory
        return self.branch(
            len(self._forks), Trajectory(now.ids(), now.images, list(now.messages), now.turn_start)
        )

    def branch(
        self, name: int, trajectory: Trajectory | None = None, start: SessionStart | None = None
    ) -> Session:
        """Return another session, like `fork`, that continues a trajectory or has none yet."""
        branch = copy(self)
        branch.__dict__.pop("_format", None)
        branch.start = start or self.start
        branch._branch, branch._turn, branch._busy = (*self._branch, name), 0, False
        branch._opened, branch._forks, branch._left = [], [], (self.trajectory, self.trajectory.turns)
        if trajectory is not None:
            branch._open(trajectory)
        self._forks.append(branch)
        return branch

    def new_trajectory(self, context: New | None = None) -> Trajectory:
        """Open a context and continue with it: the prompt, or other text, messages or tokens."""
        if context is None:
            return self._open(self._of_tokens(self.start.ids))
        content: str | list[Any] = context if isinstance(context, str) else list(context)
        if (ids := self._as_ids(content)) is not None:
            return self._open(self._of_tokens(ids))
        messages = [user(content)] if isinstance(content, str) else content
        known = len(self.opening) if begins_with(messages, self.opening) else 0
        return self._open(self._of_messages([*messages[:known], *check_messages(messages[known:])]))

    def require_known(self, ids: Sequence[int]) -> None:
        """Raise SessionError if a token id is not in the model's vocabulary."""
        if self._vocab is None or not ids or (min(ids) >= 0 and max(ids) < self._vocab):
            return
        unknown = next(i for i in ids if not 0 <= i < self._vocab)
        raise SessionError(f"token id {unknown} is outside of the model's vocabulary, 0 to {self._vocab - 1}")

    def said(self, trajectory: Trajectory | None = None) -> list[str]:
        """Return the text of each of the model's turns."""
        turns = (self.trajectory if trajectory is None else trajectory).sampled()
        return [read(self.tokenizer, ids, specials=False) for ids in turns]

    def text(self, trajectory: Trajectory | None = None) -> str:
        """Return all text of the model, for people and checkers."""
        return "".join(self.said(trajectory))

    @cached_property
    def _format(self) -> PlainFormat | Chat:
        kind = PlainFormat if self.start.messages is None else Chat
        return kind(self.tokenizer, self.start, self.opening)

    def _open(self, trajectory: Trajectory) -> Trajectory:
        self.trajectory = trajectory
        self._opened.append(trajectory)
        return trajectory

    def _with_forks(self, own: Trajectory) -> list[Trajectory]:
        """Return a trajectory and those of its forks."""
        forks = [(fork, fork._left[1]) for fork in self._forks if fork._left and fork._left[0] is own]
        before = [t for fork, turns in forks if own.turns > turns for t in fork.trajectories]
        after = [t for fork, turns in forks if own.turns <= turns for t in fork.trajectories]
        return [*before, own, *after]

    def _of_messages(self, messages: list[Message]) -> Trajectory:
        images = self.start.images if begins_with(messages, self.opening) else None
        ids = self._format.open(messages)
        return Trajectory(ids, images, messages, len(ids))

    def _of_tokens(self, ids: Sequence[int]) -> Trajectory:
        known = len(self.start.ids)
        if list(ids[:known]) != self.start.ids:
            return Trajectory(list(ids))
        return Trajectory(list(ids), self.start.images, list(self.opening), known)

    def _written(self) -> WrittenTurn:
        ids = self.trajectory.ids()[self.trajectory.turn_start :]
        ended = bool(ids) and ids[-1] in self.sampling.stop
        content, end = (ids[:-1], ids[-1:]) if ended else (ids, [])
        texts = (read(self.tokenizer, part, specials=True) for part in (content, end))
        return WrittenTurn(*texts, thought=self._format.thought)

    def _cut(self, generation: Generation, stop_texts: Collection[str], before: int) -> Generation:
        """Cut the generation after the token that completes a stop text."""

        def stops(count: int) -> bool:
            text = read(self.tokenizer, generation.tokens[:count].tolist(), specials=False)
            return any(stop in text for stop in stop_texts)

        total = len(generation.tokens)
        if not stop_texts or not stops(total):
            return generation
        end = bisect_left(range(total), True, key=stops)
        return replace(
            generation,
            tokens=generation.tokens[:end],
            logprobs=generation.logprobs[:end],
            plain_logprobs=generation.plain_logprobs[:end],
            topk_ids=None if generation.topk_ids is None else generation.topk_ids[:end],
            finish="stop",
            experts=None if generation.experts is None else generation.experts[: before + end - 1],
        )

    def _next_turn(self) -> int:
        """Return the turn's number in its `Counter`, which depends on try and branch but not on timing."""
        self._turn += 1
        if not (self._attempt or self._branch):
            return self._turn - 1
        name = repr((self._attempt, self._branch, self._turn - 1))
        return int.from_bytes(blake2b(name.encode(), digest_size=8).digest())

    def _as_ids(self, new: str | list[Any]) -> list[int] | None:
        """Return new content that is tokens, or None."""
        if isinstance(new, str) or not all(isinstance(item, int) for item in new):
            return None
        ids = [int(item) for item in new]
        self.require_known(ids)
        return ids

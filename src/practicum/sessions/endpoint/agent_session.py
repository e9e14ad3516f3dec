"""A session driven by an agent's requests. Each becomes a turn of the trajectory that it continues.

Turns form a tree. A request continues the deepest turn whose conversation it extends: in place for a leaf,
else in a fork. Text is never tokenised again.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from practicum.errors import EngineError, SessionError
from practicum.processes.http_server import Refusal
from practicum.sessions.chat import Chat, tokenise
from practicum.sessions.endpoint.turn_request import (
    MessageKey,
    TurnReply,
    TurnRequest,
    first_difference,
    make_reply,
    message_key,
)
from practicum.sessions.session import ModelTurn, New, NextTurn, Session, Trajectory
from practicum.tasks.messages import Message, prompt_text

MOST_OPEN = 64
"""Maximum requests of a session in flight."""
_NEUTRAL = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
}
"""Values of sampling settings without effect."""


@dataclass(frozen=True, slots=True)
class RequestMarks:
    """Marks that distinguish a resent request from a new one, and its client."""

    body: bytes
    """A digest of path and body."""
    key: str | None = None
    """The Idempotency-Key."""
    retry: int | None = None
    """The number of the try, if the client sends it."""
    path: str = ""
    client: str = ""


@dataclass(eq=False, slots=True)
class Turn:
    """The state after a turn, which later requests may extend. The first is the prompt."""

    session: Session
    trajectory: Trajectory
    end: int
    """Tokens of the trajectory up to here."""
    messages: list[Message]
    turn_start: int
    text: str | None = None
    """All text up to here, for completions."""
    name: bytes = b""
    is_taken: bool = False
    """True if a later turn continues the trajectory from here."""

    def fork(self, root: Session, name: int) -> Session:
        """Return a session that continues from here, with the tokens so far as its prompt."""
        ids, images = self.trajectory.ids()[: self.end], self.trajectory.images
        trajectory = Trajectory(ids, images, list(self.messages), self.turn_start)
        return root.branch(name, trajectory, self.session.start)


@dataclass(eq=False, slots=True)
class Exchange:
    """A request in flight or answered, with its retries."""

    marks: RequestMarks
    task: asyncio.Task[list[TurnReply]]
    is_delivered: bool = False
    is_left: bool = False
    """True if the client went away before the reply."""
    turns: list[Turn] = field(default_factory=list)


@dataclass(slots=True)
class _Place:
    """Where a request's turn is added: a session, and what it samples next."""

    parent: Turn | None
    session: Session
    following: NextTurn
    name: bytes
    context: str
    in_place: bool = False


class AgentSession:
    """Handles the requests of a session. `counts` has events, `trouble` an error that is not the agent's."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.reward: object = None
        self.counts = Counter[str]()
        self.requests: list[tuple[str, str]] = []
        """Path and client of each request that led to a new turn."""
        self.trouble: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.replies: dict[str, list[Message]] = {}
        """Conversations by the ids of the replies that end them."""
        self.is_over = False
        self._exchanges: list[Exchange] = []
        self._by_body: defaultdict[bytes, list[Exchange]] = defaultdict(list)
        self._by_key: dict[str, Exchange] = {}
        self._open = 0
        self._siblings = Counter[bytes]()
        self._contexts: dict[str, str] = {}
        self._depth, self._turns = 0, 0
        self._last: dict[int, tuple[int, bytes]] = {}
        """By trajectory id: how many turns certainly precede its last one, and the last one's name."""
        start, opening, root = session.start, session.opening, session.trajectory
        text = prompt_text(session.prompt.content)
        if start.messages is not None:
            text = Chat(session.tokenizer, start, opening).render(opening)
        keys = None if start.images is not None else tuple(map(message_key, opening))
        first = Turn(session, root, len(root), list(opening), len(start.ids), text)
        self._by_keys: defaultdict[tuple[str, tuple[MessageKey, ...]], list[Turn]] = defaultdict(list)
        if keys is not None:
            self._by_keys["", keys].append(first)
        self._texts = [first]

    def ask(self, request: TurnRequest, marks: RequestMarks) -> Exchange:
        """Return the exchange of a request: a new turn, or the exchange of the request that it repeats."""
        self.counts["requests"] += 1
        if (earlier := self._repeated(marks)) is not None:
            self.counts["retries"] += 1
            earlier.is_left = False
            return earlier
        if self._open >= MOST_OPEN:
            raise Refusal(429, f"{MOST_OPEN} requests of this session are in flight")
        most = self.session.agent.turns
        if self._turns + request.n > most:
            raise Refusal(400, f"the session has used all its turns (agent.turns: {most})", "turn_limit")
        self._check_settings(request)
        places = [self._place(request) for _ in range(request.n)]
        self._turns += request.n
        self._open += 1
        turns: list[Turn] = []
        work = [self._turn(request, place, self._depth + 1, turns) for place in places]
        task = asyncio.create_task(self._all(work), name=f"a request of {self.session.prompt}")
        task.add_done_callback(self._close)
        exchange = Exchange(marks, task, turns=turns)
        self._exchanges.append(exchange)
        self._by_body[marks.body].append(exchange)
        if marks.key is not None:
            self._by_key[marks.key] = exchange
        self.requests.append((marks.path, marks.client))
        return exchange

    def count_tokens(self, request: TurnRequest) -> int:
        """Return the number of tokens that the model would read before its turn."""
        counts = self.counts.copy()
        following = self._place(request, peek=True).following
        self.counts = counts
        return len(following.trajectory) + len(following.ids)

    async def end(self) -> list[Trajectory]:
        """Discard turns in flight. Return the trajectories in order, with that of the last turn at the
        end."""
        self.is_over = True
        open_tasks = [exchange.task for exchange in self._exchanges if not exchange.task.done()]
        self.counts["discarded"] += len(open_tasks)
        for task in open_tasks:
            task.cancel()
        await asyncio.gather(*open_tasks, return_exceptions=True)
        for turn in [turn for exchange in self._exchanges if exchange.is_left for turn in exchange.turns]:
            if len(turn.trajectory) == turn.end:  # no client read this turn, and none follows it
                self.counts["discarded"] += 1
                turn.trajectory.drop_last()
        trajectories = [t for t in self.session.trajectories if t.sampled_tokens]
        for trajectory in trajectories:
            trajectory.drop_given()
        if not self.trouble.done():
            self.trouble.cancel()
        return sorted(trajectories, key=lambda t: self._last[id(t)])

    def _repeated(self, marks: RequestMarks) -> Exchange | None:
        """Return the exchange that a request repeats, or None."""
        if marks.key is not None:
            return self._by_key.get(marks.key)
        same = self._by_body[marks.body]
        if (
            marks.retry is None
        ):  # without a retry count, identical requests are retries only while no reply was sent
            return next((e for e in same if not e.is_delivered), None)
        if not marks.retry:
            return None
        # Among siblings, prefer one whose client disconnected, then one without a reply, then the last.
        return min(reversed(same), key=lambda e: (not e.is_left, e.is_delivered), default=None)

    def _close(self, task: asyncio.Task[list[TurnReply]]) -> None:
        self._open -= 1
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved if the client is gone

    def _check_settings(self, request: TurnRequest) -> None:
        """Count sampling settings that the recipe overrides, or reject them if agent.strict."""
        drawn = self.session.sampling
        ours = {"temperature": drawn.temperature, "top_p": drawn.top_p, "min_p": drawn.min_p}
        for name, value in request.asked.items():
            same = (ours[name],) if name in ours else _NEUTRAL.get(name, (drawn.top_k,))
            if value in same or (name == "top_k" and value in (-1, 0) and not drawn.top_k):
                continue
            self.counts["overridden"] += 1
            self.counts[f"overridden/{name}"] += 1
            if self.session.agent.strict:
                raise Refusal(400, f"{name} is {value!r}, which differs from the recipe (agent.strict)", name)

    def _context(self, tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """Return a name for tools and template options. Those that the template renders alike share it."""
        written = json.dumps([tools, options], sort_keys=True, default=str)
        session = self.session
        if session.start.messages is None:
            return ""  # a plain-text prompt shows no tools
        if written not in self._contexts:
            start = replace(session.start, tools=tools, options=options)
            try:
                text = Chat(session.tokenizer, start, session.opening).render(session.opening)
            except EngineError as error:
                raise Refusal(400, str(error)) from None
            self._contexts[written] = "" if text == self._texts[0].text else text
        return self._contexts[written]

    def _place(self, request: TurnRequest, peek: bool = False) -> _Place:
        """Return where a request's turn is added. Raise Refusal if the template can't render its messages."""
        find = self._of_text if request.prompt is not None else self._of_messages
        try:
            place = find(request, peek)
            if place.in_place and place.parent is not None and not peek:
                place.parent.is_taken = True
            return place
        except (SessionError, EngineError) as error:
            raise Refusal(400, str(error)) from None

    def _of_messages(self, request: TurnRequest, peek: bool) -> _Place:
        if request.messages[-1]["role"] == "assistant":
            raise Refusal(400, "the last message is the assistant's: a turn follows a user or a tool")
        context = self._context(request.tools, request.options)
        keys = tuple(map(message_key, request.messages))
        for count in range(len(keys), 0, -1):
            if turns := self._by_keys.get((context, keys[:count])):
                new = request.messages[count:]
                if any(message["role"] == "assistant" for message in new):
                    self._note_difference(context, keys)
                return self._continue(turns, new or None, repr(keys[count:]), context, peek)
        self._note_difference(context, keys)
        start = replace(self.session.start, tools=request.tools, options=request.options)
        name = self._name(b"", repr((context, keys)), peek)
        session = self.session.branch(int.from_bytes(name), start=start)
        trajectory = session.new_trajectory(request.messages)
        trajectory.breaks = int(any(message["role"] == "assistant" for message in request.messages))
        return _Place(None, session, session.plan(None), name, context)

    def _of_text(self, request: TurnRequest, peek: bool) -> _Place:
        prompt, tokenizer = request.prompt, self.session.tokenizer
        assert prompt is not None
        best: list[Turn] = []
        for turn in self._texts:
            known = turn.text if isinstance(prompt, str) else turn.trajectory.ids()[: turn.end]
            if known is not None and prompt[: len(known)] == known:
                longer = not best or turn.end > best[0].end
                best = [turn] if longer else [*best, turn] if turn.end == best[0].end else best
        if best:
            known = best[0].text or "" if isinstance(prompt, str) else best[0].trajectory.ids()[: best[0].end]
            rest = prompt[len(known) :]
            new = tokenise(tokenizer, rest) if isinstance(rest, str) else rest
            return self._continue(best, new or None, repr(rest), "text", peek)
        self.counts["opened"] += 1
        self.counts["opened/content"] += 1
        ids = prompt
        if isinstance(prompt, str):
            first = self.session.start.ids[:1]
            bos = first if first == [tokenizer.bos_token_id] else []
            ids = [*bos, *tokenise(tokenizer, prompt)]
        name = self._name(b"", repr(prompt), peek)
        session = self.session.branch(int.from_bytes(name))
        session.new_trajectory(ids)
        return _Place(None, session, session.plan(None), name, "text")

    def _continue(
        self, turns: Sequence[Turn], new: New | None, written: str, context: str, peek: bool
    ) -> _Place:
        """Continue one of several equal turns: a leaf if possible, else a fork of the first."""
        for turn in turns:
            if not turn.is_taken:
                name = self._name(turn.name, written, peek)
                return _Place(turn, turn.session, turn.session.plan(new), name, context, True)
        name = self._name(turns[0].name, written, peek)
        if not peek:
            self.counts["forks"] += 1
        fork = turns[0].fork(self.session, int.from_bytes(name))
        return _Place(turns[0], fork, fork.plan(new), name, context)

    def _name(self, parent: bytes, written: str, peek: bool) -> bytes:
        """Return a turn's name, from its parent and number, independent of timing."""
        base = blake2b(parent + written.encode("utf-8", "replace"), digest_size=8).digest()
        self._siblings[base] += not peek
        return blake2b(base + str(self._siblings[base]).encode(), digest_size=8).digest()

    def _note_difference(self, context: str, keys: tuple[MessageKey, ...]) -> None:
        """Count a request that continues no turn, by the first field that differs from the closest turn."""
        nearest = [(*first_difference(known, keys), where == context) for where, known in self._by_keys]
        _, name, is_same = max(
            nearest, key=lambda n: (n[0], n[2], n[1] != "length"), default=(0, "content", True)
        )
        field_name = name if is_same else "tools"
        self.counts["opened"] += 1
        self.counts[f"opened/{field_name}"] += 1

    async def _all(self, work: Sequence[Awaitable[TurnReply]]) -> list[TurnReply]:
        try:
            return [await work[0]] if len(work) == 1 else list(await asyncio.gather(*work))
        except Refusal:
            raise
        except Exception as error:  # engine errors end the run, not the request
            if not self.trouble.done():
                self.trouble.set_exception(error)
            raise Refusal(500, str(error)) from error

    async def _turn(self, request: TurnRequest, place: _Place, depth: int, turns: list[Turn]) -> TurnReply:
        session = place.session
        most = session.sampling.max_new_tokens
        try:
            turn = await session.generate(
                place.following, max_new_tokens=min(request.max_tokens or most, most), stop_texts=request.stop
            )
            if not turn.tokens and turn.finish == "context":
                message = f"the context of {session.context} tokens has no room for a turn"
                raise Refusal(400, message, "context_length_exceeded")
        except (Refusal, SessionError) as error:
            if place.in_place and place.parent is not None:
                place.parent.is_taken = False
            self._turns -= 1
            raise error if isinstance(error, Refusal) else Refusal(400, str(error)) from None
        state, reply = self._finished(request, place, turn, depth)
        turns.append(state)
        return reply

    def _finished(
        self, request: TurnRequest, place: _Place, turn: ModelTurn, depth: int
    ) -> tuple[Turn, TurnReply]:
        """Store the state after a turn. Return it and the reply."""
        session, trajectory = place.session, place.session.trajectory
        self._depth = max(self._depth, depth)
        self._last[id(trajectory)] = depth, place.name
        reply = make_reply(
            turn.text,
            turn.finish,
            request,
            session.agent.tool_call_format,
            prompt_tokens=len(trajectory) - len(turn.tokens),
            completion_tokens=len(turn.tokens),
        )
        conversation = [*request.messages, reply.message()]
        state = Turn(
            session,
            trajectory,
            len(trajectory),
            list(trajectory.messages),
            trajectory.turn_start,
            name=place.name,
        )
        if request.prompt is not None:
            state.text = f"{request.prompt}{reply.text}" if isinstance(request.prompt, str) else None
            self._texts.append(state)
        else:
            before = tuple(map(message_key, request.messages))
            said = reply.message()
            restored = {**said, "content": reply.text + (reply.stop_text or "")}  # as some clients do
            for key in {message_key(said), message_key(restored)}:
                self._by_keys[place.context, (*before, key)].append(state)
            self.replies[f"resp_{reply.id}"] = conversation
        trajectory.tool_calls += len(reply.calls)
        return state, reply

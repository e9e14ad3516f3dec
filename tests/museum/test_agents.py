"""An endpoint for agents gives the learner another conversation than the client had."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from practicum.processes.http_server import Refusal
from practicum.sessions.chat import Chat
from practicum.sessions.endpoint import dialects
from practicum.sessions.endpoint.agent_session import AgentSession, _Place
from practicum.sessions.endpoint.dialects import ChatCompletions
from practicum.sessions.session import Trajectory

from ..sessions.endpoint.driven import CALL, TOKENIZER, TOOL, Running, Writer, chat_session, user, with_agent
from ..sessions.sessions import byte_tokenizer, session_of

OPENING = [user("1+2?")]
RESULT = "3 and 7"
TOOLS: list[Any] = [{"type": "function", "function": TOOL}]


def talk(turns: int = 2, sub_agent: bool = False, tools_late: bool = False) -> list[Trajectory]:
    """Hold a conversation, and beside it that of a sub-agent; or bring tools from the second turn on.

    The tokens that the model saw are compared with what the template writes of the request.
    """
    writer = Writer(texts=["ab", "b a"])

    async def client(running: Running) -> None:
        talks = [list(OPENING), [user("sub")]][: 1 + sub_agent]
        for turn in range(turns):
            for messages in talks:
                tools = TOOLS if tools_late and turn else []
                said = await running.chat(messages, tools=tools)
                options: Any = {"tools": tools or None, "add_generation_prompt": True, "tokenize": False}
                text = TOKENIZER.apply_chat_template(messages, **options)
                assert TOKENIZER.decode(writer.sampled[-1].before) == text, "the model saw something else"
                messages += [said["message"], user("go on")]

    return with_agent(chat_session(writer), client)


def test_a_conversation_that_is_matched_without_its_tools(monkeypatch: pytest.MonkeyPatch):
    """PrimeIntellect-ai/verifiers#955: a request with other tools continued the tokens of the conversation
    without them."""
    talk(tools_late=True)
    monkeypatch.setattr(AgentSession, "_context", lambda *_: "")
    with pytest.raises(AssertionError, match="the model saw something else"):
        talk(tools_late=True)


def test_a_separator_that_is_lost_between_turns(monkeypatch: pytest.MonkeyPatch):
    """verl-project/verl#6921: the line break that the template writes after a turn's end was left out."""
    talk()
    extend = Chat.extend
    monkeypatch.setattr(Chat, "extend", lambda *given: (extend(*given) or "").removeprefix("\n"))
    with pytest.raises(AssertionError, match="the model saw something else"):
        talk()


def test_a_branch_that_ends_when_another_goes_on(monkeypatch: pytest.MonkeyPatch):
    """verl-project/verl#6299, rllm-org/rllm#772: only the branch of the last request could go on: a sub-agent
    cut the conversation around it into one row for each turn."""
    assert [(t.turns, t.breaks) for t in talk(3, sub_agent=True)] == [(3, 0), (3, 0)]
    finished = AgentSession._finished

    def forgets(self: AgentSession, *given: Any) -> Any:
        self._by_keys.clear()
        return finished(self, *given)

    monkeypatch.setattr(AgentSession, "_finished", forgets)
    assert sum(t.breaks for t in talk(3, sub_agent=True)) == 4


def ask_thrice(*, equal: bool = False, calls: bool = False) -> None:
    """Ask the same three times, or in streams with tool calls, or go on from a text that the client rewrote.

    The tokens that are trained are compared with those that were sampled.
    """
    writer = Writer(texts=[f"so {CALL}"] if calls else ["ab", "b a"])

    async def client(running: Running) -> None:
        messages = list(OPENING)
        for number in range(3):
            tools = TOOLS if calls else []
            asked = {"messages": messages, "tools": tools, "stream": calls}
            assert (await running.post("chat/completions", asked)).status_code == 200
            if not equal:
                messages = [*messages, {"role": "assistant", "content": f"a summary {number}"}, user("go on")]

    trajectories = with_agent(chat_session(writer), client)
    trained = sorted(turn for trajectory in trajectories for turn in trajectory.sampled())
    assert trained == sorted(turn.tokens for turn in writer.sampled), "sampled tokens are not trained"


def test_equal_requests_of_which_one_is_kept(monkeypatch: pytest.MonkeyPatch):
    """microsoft/agent-lightning#573: of requests with equal prompts the last was kept, as if the others were
    its retries: the siblings of best-of-n were lost."""
    ask_thrice(equal=True)
    end = AgentSession.end

    async def last_of_equal(self: AgentSession) -> list[Trajectory]:
        return list({tuple(t.prompt_ids): t for t in await end(self)}.values())

    monkeypatch.setattr(AgentSession, "end", last_of_equal)
    with pytest.raises(AssertionError, match="sampled tokens are not trained"):
        ask_thrice(equal=True)


def test_tokens_of_streamed_tool_calls_that_are_lost(monkeypatch: pytest.MonkeyPatch):
    """microsoft/agent-lightning#326, vllm-project/vllm#27482: of streamed turns with tool calls, the tokens
    came without those that the parser of the calls had taken."""
    ask_thrice(calls=True)
    finished = AgentSession._finished

    def parsed(self: AgentSession, request: Any, place: Any, turn: Any, depth: int) -> Any:
        state, reply = finished(self, request, place, turn, depth)
        pieces = place.session.trajectory.pieces
        kept = len(TOKENIZER.encode(reply.text))
        pieces[-1] = replace(pieces[-1], ids=pieces[-1].ids[:kept], logprobs=pieces[-1].logprobs[:kept])
        return state, reply

    monkeypatch.setattr(AgentSession, "_finished", parsed)
    with pytest.raises(AssertionError, match="sampled tokens are not trained"):
        ask_thrice(calls=True)


def test_turns_before_a_rewritten_context_that_are_masked(monkeypatch: pytest.MonkeyPatch):
    """rllm-org/rllm#352: where a request did not extend the tokens so far, these were masked with a
    warning."""
    ask_thrice()
    note = AgentSession._note_difference

    def masks(self: AgentSession, *given: Any) -> None:
        for trajectory in self.session.trajectories:
            trajectory.pieces = [replace(piece, sampled=False) for piece in trajectory.pieces]
        note(self, *given)

    monkeypatch.setattr(AgentSession, "_note_difference", masks)
    with pytest.raises(AssertionError, match="sampled tokens are not trained"):
        ask_thrice()


def answer_calls(template: str = "chatml", *, stream: bool = False) -> None:
    """Call a tool twice. The tokens before each turn must have the turns so far, and the results."""
    writer, tokenizer = Writer(texts=[f"so\n{CALL}"]), byte_tokenizer(template)
    session = session_of("1+2?", writer, tokenizer, chat=True, agent={"turns": 64})

    async def client(running: Running) -> None:
        messages = list(OPENING)
        for number in range(3):
            asked = {"messages": messages, "tools": TOOLS, "stream": stream and number > 0}
            response = await running.post("chat/completions", asked)
            assert response.status_code == 200, "the request is refused"
            if stream and number:
                continue
            before = writer.sampled[-1].before
            assert before[: len(seen)] == seen, "the model saw something else"
            assert tokenizer.decode(before).count(RESULT) == number, "the model did not see the result"
            seen[:] = [*before, *writer.sampled[-1].tokens]
            said = response.json()["choices"][0]["message"]
            (call,) = said["tool_calls"]
            messages += [said, {"role": "tool", "tool_call_id": call["id"], "content": RESULT}]

    seen: list[int] = []
    with_agent(session, client)


def test_results_of_tools_that_the_template_leaves_out(monkeypatch: pytest.MonkeyPatch):
    """verl-project/verl#6406: a chat template that shows results only of calls in its own format dropped them
    silently: the model never saw what its tools returned."""
    answer_calls()
    with pytest.raises(AssertionError, match="the request is refused"):
        answer_calls("leaves_out_results")
    monkeypatch.setattr("practicum.sessions.chat.message_text", lambda _: "")
    with pytest.raises(AssertionError, match="the model did not see the result"):
        answer_calls("leaves_out_results")


def test_turns_that_are_written_again_from_their_parsed_calls(monkeypatch: pytest.MonkeyPatch):
    """NVIDIA-NeMo/Gym#1787: earlier turns were rendered anew from parsed text and calls, and tokenised anew:
    what the model saw did not begin with what it had sampled."""
    answer_calls()

    def rendered(self: AgentSession, turns: Any, new: Any, written: str, context: str, peek: bool) -> Any:
        said = {"role": "assistant", "content": "so"}
        messages = [*turns[0].messages, *([said] if turns[0].trajectory.turns else []), *(new or [])]
        name = self._name(b"", repr(messages), peek)
        session = self.session.branch(int.from_bytes(name))
        session.new_trajectory(messages)
        return _Place(None, session, session.plan(None), name, context)

    monkeypatch.setattr(AgentSession, "_continue", rendered)
    with pytest.raises(AssertionError, match="the model saw something else"):
        answer_calls()


def test_streams_that_are_refused(monkeypatch: pytest.MonkeyPatch):
    """NVIDIA-NeMo/Gym#2130: requests for streams failed validation, so programs that stream had to go past
    the endpoint."""
    answer_calls(stream=True)
    read = ChatCompletions.read

    def refuses(self: ChatCompletions, data: Any, replies: Any) -> Any:
        if data.get("stream"):
            raise Refusal(422, "stream: expected false")
        return read(self, data, replies)

    monkeypatch.setattr(ChatCompletions, "read", refuses)
    with pytest.raises(AssertionError, match="the request is refused"):
        answer_calls(stream=True)


def test_stop_texts_that_are_ignored(monkeypatch: pytest.MonkeyPatch):
    """huggingface/text-generation-inference#1619: `stop` was not read (nor by AReaL's client in its exact
    mode), so an agent that waits for it got the model's idea of what comes next."""

    def ask() -> None:
        async def client(running: Running) -> None:
            said = await running.chat(OPENING, stop=["STOP"])
            assert said["message"]["content"] == "ab ", "the turn went on"

        (row,) = with_agent(chat_session(Writer(texts=["ab STOP b"])), client)
        assert TOKENIZER.decode(row.sampled()[0]) == "ab STOP", "more is trained than the client saw"

    ask()
    monkeypatch.setattr(dialects, "_stops", lambda _: ())
    with pytest.raises(AssertionError, match="the turn went on"):
        ask()


def test_retries_that_are_trained_as_samples(monkeypatch: pytest.MonkeyPatch):
    """vectorize-io/hindsight#1567: clients send a slow request again. Where each is a turn, it is sampled and
    trained once for every try."""

    async def client(running: Running) -> None:
        for retry in ("0", "1", "2"):
            await running.chat(OPENING, {"x-stainless-retry-count": retry})

    assert [t.turns for t in with_agent(chat_session(Writer()), client)] == [1]
    monkeypatch.setattr(AgentSession, "_repeated", lambda *_: None)
    assert [t.turns for t in with_agent(chat_session(Writer()), client)] == [1, 1, 1]

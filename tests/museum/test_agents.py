"""An endpoint for agents gives the learner another conversation than the client had."""

from __future__ import annotations

from typing import Any

import pytest

from practicum.sessions.chat import Chat
from practicum.sessions.endpoint.agent_session import AgentSession
from practicum.sessions.session import Trajectory

from ..sessions.endpoint.driven import TOKENIZER, TOOL, Running, Writer, chat_session, user, with_agent

OPENING = [user("1+2?")]
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

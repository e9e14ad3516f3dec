"""Write the turns of SFT examples in place of the model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerBase

from practicum.engines.protocol import Counter, Generation, Sampling
from practicum.errors import EngineError
from practicum.recipe.schema.rollout_sections import Agent
from practicum.sessions.chat import tokenise
from practicum.sessions.session import Session, Trajectory
from practicum.sessions.tools.calculator import CALCULATOR
from practicum.sessions.tools.tool_calls import Call, read_calls, write_call
from practicum.sessions.tools.toolbox import Toolbox
from practicum.tasks.messages import Message
from practicum.tasks.prompts import Prompt, demonstrated_turn, demonstration

Demonstrator = Callable[[Prompt, list[Message]], str]
"""Writes a turn of an SFT example."""


class DemonstratorPolicy:
    """Turns of an SFT example, which were not sampled and end with the EOS, in place of a model's."""

    def __init__(self, demonstrator: Demonstrator, tokenizer: PreTrainedTokenizerBase) -> None:
        if not isinstance(tokenizer.eos_token_id, int):
            raise EngineError("a demonstrator's turns end with the EOS, and the tokenizer has none")
        self._demonstrator, self._tokenizer, self._end = demonstrator, tokenizer, tokenizer.eos_token_id

    async def next(
        self, trajectory: Trajectory, sampling: Sampling, counter: Counter, session: Session
    ) -> Generation:
        ids = [*tokenise(self._tokenizer, self._demonstrator(session.prompt, session.messages)), self._end]
        if len(ids) > session.room:
            raise EngineError(
                f"{session.prompt}: the demonstrator's turn {trajectory.turns + 1} has {len(ids)} tokens, "
                f"and {session.room} are left of a context of {session.context}"
            )
        zeros = torch.zeros(len(ids))
        return Generation(torch.tensor(ids, dtype=torch.int64), zeros, zeros, "stop", 0, 0)


def make_demonstrator(agent: Agent, toolbox: Toolbox) -> Demonstrator:
    """Return a demonstrator that uses the calculator, in the agent's call format, if the agent has one."""
    if CALCULATOR.name not in {tool.name for tool in toolbox.tools}:
        return lambda prompt, _: demonstration(prompt)

    def demonstrate(prompt: Prompt, messages: list[Message]) -> str:
        text = demonstrated_turn(prompt, messages)
        calls = read_calls(text, "plain", [CALCULATOR]) if prompt.kind is not None else []
        if len(calls) == 1 and isinstance(calls[0], Call):
            return write_call(calls[0], agent.tool_call_format, toolbox.tools)
        return text

    return demonstrate

"""The expert of supervised training: what it writes in place of the model, turn by turn."""

from __future__ import annotations

from collections.abc import Callable

from practicum.recipe.schema.rollout_sections import Agent
from practicum.sessions.tools.calculator import CALCULATOR
from practicum.sessions.tools.tool_calls import Call, read_calls, write_call
from practicum.sessions.tools.toolbox import Toolbox
from practicum.tasks.messages import Message
from practicum.tasks.prompts import Prompt, demonstration, expert_turn


def make_demonstrator(agent: Agent, toolbox: Toolbox) -> Callable[[Prompt, list[Message]], str]:
    """An expert that uses the calculator if the agent has one, in the agent's way of writing calls.

    Without it, and on rows of files, it answers at once.
    """
    if CALCULATOR.name not in {tool.name for tool in toolbox.tools}:
        return lambda prompt, _: demonstration(prompt)

    def expert(prompt: Prompt, messages: list[Message]) -> str:
        text = expert_turn(prompt, messages)
        calls = read_calls(text, "plain", [CALCULATOR]) if prompt.kind is not None else []
        if len(calls) == 1 and isinstance(calls[0], Call):
            return write_call(calls[0], agent.calls, toolbox.tools)
        return text

    return expert

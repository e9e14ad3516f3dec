"""The recipe's agent: what happens in a session, and what becomes of one that fails."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from practicum.recipe.schema.section import Section


class ToolSection(Section):
    """A tool that the model may call; `calculator` is short for {use: calculator}."""

    use: str = Field(description="calculator, python, or package.module:function.")
    timeout_s: float = Field(default=5.0, gt=0, description="Seconds a call may take.")
    memory_mb: int = Field(default=256, ge=32, description="Memory of the program in MiB (python).")
    output_chars: int = Field(default=2000, ge=16, description="Characters of its result that are kept.")


class Retry(Section):
    """Run a failed session again."""

    retry: int = Field(ge=1, description="Further tries; a session that fails in all of them is left out.")


OnFailure = Literal["drop_group", "keep_rest"] | Retry


def _tool(value: Any) -> Any:
    return {"use": value} if isinstance(value, str) else value


class Agent(Section):
    """What happens in a session: the loop, its turns and its tools."""

    loop: str = Field(
        default="single_turn",
        description="single_turn, tool_use, retry, compress, or package.module:function.",
    )
    turns: int = Field(default=8, ge=1, description="Most turns that a built-in loop takes.")
    tools: list[Annotated[ToolSection, BeforeValidator(_tool)]] = Field(
        default_factory=list, description="Tools that the model may call, such as [calculator, python]."
    )
    calls: Literal["json", "plain"] = Field(
        default="json",
        description='How a tool call is written: json: <tool_call>{"name": …, "arguments": …}</tool_call>; '
        "plain: [calculator: 2+3], or [2+3] if there is one tool.",
    )
    compress_at: int | None = Field(
        default=None,
        ge=8,
        description="Tokens of a context from which compress asks for a summary; unset: when little is left.",
    )
    ask_summary: str = Field(
        default="Summarise what matters for going on.", description="How compress asks for a summary."
    )
    feedback: str = Field(
        default="That is not right. Try again.", description="What retry tells the model after a miss."
    )
    deadline_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds one session may take, waiting for the engine included; unset: nine tenths of "
        "rollout.deadline_s.",
    )
    on_failure: OnFailure = Field(
        default="keep_rest",
        description="Of a group with a failed session: train on the rest (keep_rest), leave all of it out "
        "(drop_group), or run the session again ({retry: 2}) before keeping the rest.",
    )

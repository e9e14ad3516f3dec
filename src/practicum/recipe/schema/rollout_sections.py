"""How answers are made: the engine that samples, what happens in a session, and sessions that fail."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from practicum.recipe.schema.engine_sections import EngineChoice
from practicum.recipe.schema.section import ReadWhen, Section, key, read_if, read_with

ON_RAY = read_with("runtime.kind", "ray", refused=False)
"""What a recipe says of a cluster may stay in runs without one."""
_ROLLOUTS = read_if(lambda recipe: not recipe.demonstrates, "with algorithm.loss supervised", refused=False)
"""Of rollouts for training; an SFT recipe may share a base with others."""


class Rollout(EngineChoice):
    """How the student's answers are sampled."""

    samples: int = key(8, "Sessions for each prompt.", _ROLLOUTS, ge=1)
    max_new_tokens: int = key(64, "Longest turn in tokens.", ge=1)
    temperature: float = key(1.0, "Sampling temperature of training rollouts.", _ROLLOUTS, gt=0)
    top_p: float = key(1.0, "Nucleus: smallest set with this mass; 1 = off.", _ROLLOUTS, gt=0, le=1)
    top_k: int = key(0, "Keep this many most likely tokens; 0 = all.", _ROLLOUTS, ge=0)
    stop: list[str] = key([], "Further stop tokens (each one token of the tokenizer).")
    max_num_seqs: int = key(256, "Sequences decoded together; KV memory grows up to this × context.", ge=1)
    context: int | None = key(
        None, "Longest prompt + answer in tokens; unset: 1,024 + max_new_tokens, at most the model's.", ge=2
    )
    lag: int = key(
        0,
        "Steps between the weights that sample a batch and those that it trains: always this many, less only "
        "in the first steps. Each has an engine with its own copy of the weights. 0: one after the other.",
        ge=0,
        le=16,
    )
    deadline_s: float = key(600.0, "Seconds one step's rollout may take.", gt=0)
    replicas: int | None = key(
        None, "Engines, with runtime.kind ray; unset: one for each device of their pool.", ON_RAY, ge=1
    )

    def context_for(self, model_context: int | None) -> int:
        """Tokens of KV memory for one sequence: `context`, else 1,024 of prompt and the answer."""
        if self.context is not None:
            return self.context
        needed = 1024 + self.max_new_tokens
        return needed if model_context is None else min(needed, model_context)


_LIMITED = read_if(
    lambda tool: tool.use != "calculator",
    "with use {0.use}",
    "the calculator has no limits to set: remove it",
    of_section=True,
)


class ToolSection(Section):
    """A tool that the model may call; `calculator` is short for {use: calculator}."""

    use: str = key(..., "calculator, python (in bubblewrap), or package.module:function.")
    timeout_s: float = key(5.0, "Seconds a call may take (not for calculator).", _LIMITED, gt=0)


class McpServer(Section):
    """A server of tools that speaks MCP on its standard input and output."""

    command: list[str] = key(..., "Program and arguments.", min_length=1)


class McpSection(Section):
    """The tools of an MCP server (extra mcp)."""

    mcp: McpServer = key(..., "{command: [...]}: the server, started with the run.")
    timeout_s: float = key(5.0, "Seconds a call may take.", gt=0)


class Retry(Section):
    """Run a failed session again."""

    retry: int = key(..., "Further tries; a session that fails in all of them is left out.", ge=1)


OnFailure = Literal["drop_group", "keep_rest"] | Retry


def _tool(value: Any) -> Any:
    return {"use": value} if isinstance(value, str) else value


BUILTIN_LOOPS = ("single_turn", "tool_use", "retry", "compress")


def _read_by(*loops: str, over_http: bool = False) -> ReadWhen:
    """Read by these built-in loops, by all loops of the user's in Python, and perhaps by agents over HTTP."""
    advice = f"remove it, or set agent.loop to one that reads it: {', '.join(loops)}"
    others = {*BUILTIN_LOOPS} - {*loops}

    def is_read(recipe: Any) -> bool:
        loop = recipe.agent.loop
        return loop not in others if isinstance(loop, str) else over_http

    return read_if(is_read, "with agent.loop {0.agent.loop}", advice)


_BY_MOST = _read_by("tool_use", "retry", "compress", over_http=True)
_BY_TOOL_LOOPS, _BY_COMPRESS = _read_by("tool_use", "compress"), _read_by("compress")


class CommandLoop(Section):
    """A program that calls the model through an HTTP endpoint."""

    command: list[str] = key(
        ..., "Program and arguments; the prompt is {prompt}, {prompt_file} or standard input.", min_length=1
    )

    def __str__(self) -> str:
        return " ".join(self.command)

    def __hash__(self) -> int:
        return hash(tuple(self.command))


class FunctionLoop(Section):
    """A function that calls the model through an HTTP endpoint."""

    function: str = key(..., "package.module:function of an AgentTask; it may return the reward.")
    python: str | None = key(
        None, "Python of another environment, one process of which runs the function for all sessions."
    )

    def __str__(self) -> str:
        return self.function


_EXTERNAL = read_if(
    lambda recipe: not isinstance(recipe.agent.loop, str),
    "with agent.loop {0.agent.loop}",
    "remove it, or set agent.loop to a command or function",
)


class Agent(Section):
    """What happens in a session: the loop, its turns and its tools."""

    loop: str | CommandLoop | FunctionLoop = key(
        "single_turn",
        "single_turn, tool_use, retry, compress, package.module:function, or an agent that calls the model "
        "through an HTTP endpoint: {command: [...]} or {function: package.module:function}.",
    )
    turns: int = key(
        8, "Most turns of a session; loops of the user's in Python set their own.", _BY_MOST, ge=1
    )
    strict: bool = key(
        False, "Refuse requests with other sampling settings than the recipe's, not override them.", _EXTERNAL
    )
    tools: list[Annotated[ToolSection | McpSection, BeforeValidator(_tool)]] = key(
        [],
        "Tools that the model may call, such as [calculator, python, {mcp: {command: [...]}}].",
        _BY_TOOL_LOOPS,
    )
    tool_call_format: Literal["json", "plain"] = key(
        "json",
        'How a tool call is written: json: <tool_call>{"name": …, "arguments": …}</tool_call>; plain: '
        "[calculator: 2+3], or [2+3] if there is one tool.",
        _read_by("tool_use", "compress", over_http=True),
    )
    compress_at: int | None = key(
        None, "Tokens from which compress asks for a summary; unset: when little is left.", _BY_COMPRESS, ge=8
    )
    message: str | None = key(
        None,
        "What retry tells the model after a miss, or how compress asks for a summary; unset: That is not "
        "right. Try again. / Summarise what matters for going on.",
        _read_by("retry", "compress"),
    )
    deadline_s: float | None = key(
        None, "Seconds of one session, waiting included; unset: nine tenths of rollout.deadline_s.", gt=0
    )
    on_failure: OnFailure = key(
        "keep_rest",
        "Of a group with a failed session: train on the rest (keep_rest), leave all of it out "
        "(drop_group), or run the session again ({retry: 2}) before keeping the rest.",
    )

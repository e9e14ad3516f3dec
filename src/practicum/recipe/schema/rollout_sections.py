"""Sections of the rollout: the sampling engine, agent loops, and failing sessions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from practicum.recipe.schema.engine_sections import EngineChoice
from practicum.recipe.schema.section import ReadWhen, Section, key, read_if, read_with

ON_RAY = read_with("runtime.kind", "ray", refused=False)
"""Keys of a cluster may stay in local runs."""
_ROLLOUTS = read_if(lambda recipe: not recipe.demonstrates, "with algorithm.loss supervised", refused=False)
"""Keys of training rollouts may stay in an SFT recipe, which may share a base with others."""


class Rollout(EngineChoice):
    """Sampling of the student's responses."""

    samples: int = key(8, "Sessions per prompt (the group size).", _ROLLOUTS, ge=1)
    max_new_tokens: int = key(64, "Maximum tokens per turn.", ge=1)
    temperature: float = key(1.0, "Sampling temperature of training rollouts.", _ROLLOUTS, gt=0)
    top_p: float = key(1.0, "Nucleus sampling; 1 disables it.", _ROLLOUTS, gt=0, le=1)
    top_k: int = key(0, "Sample from the k most likely tokens; 0 disables it.", _ROLLOUTS, ge=0)
    stop: list[str] = key([], "Additional stop tokens, each a single token of the tokenizer.")
    max_num_seqs: int = key(
        256, "Maximum number of sequences decoded together. KV memory grows up to this × context.", ge=1
    )
    context: int | None = key(
        None,
        "Maximum tokens of prompt and response. Default: 1,024 + max_new_tokens, at most the model's.",
        ge=2,
    )
    lag: int = key(
        0,
        "Number of steps that rollouts run ahead of training: exactly this many, except in the first steps. "
        "Each step in flight has an engine with a copy of the weights. 0 alternates rollout and training.",
        ge=0,
        le=16,
    )
    deadline_s: float = key(600.0, "Deadline of one step's rollout in seconds.", gt=0)

    def context_for(self, model_context: int | None) -> int:
        """Return the tokens of KV memory per sequence: `context`, or 1,024 plus the response."""
        if self.context is not None:
            return self.context
        needed = 1024 + self.max_new_tokens
        return needed if model_context is None else min(needed, model_context)


_LIMITED = read_if(
    lambda tool: getattr(tool, "use", None) != "calculator",
    "with use calculator",
    "the calculator has no time limit: remove it",
    of_section=True,
)


class _Limited(Section):
    timeout_s: float = key(5.0, "Time limit of a call in seconds (not for calculator).", _LIMITED, gt=0)


class _Program(Section):
    command: list[str] = key(
        ...,
        "Program and arguments. Of an agent, the prompt is {prompt}, {prompt_file} or standard input.",
        min_length=1,
    )


class ToolSection(_Limited):
    """A tool that the model may call. `calculator` is short for {use: calculator}."""

    use: str = key(..., "calculator, python (in bubblewrap), or package.module:function.")


class McpServer(_Program):
    """A server of tools that speaks MCP on its standard input and output."""


class McpSection(_Limited):
    """The tools of an MCP server (extra mcp)."""

    mcp: McpServer = key(..., "{command: [...]}: the server, started with the run.")


OnFailure = Literal["drop_group", "keep_rest", "retry"]


def _tool(value: Any) -> Any:
    return {"use": value} if isinstance(value, str) else value


BUILTIN_LOOPS = ("single_turn", "tool_use", "retry", "compress")


def _read_by(*loops: str, over_http: bool = False) -> ReadWhen:
    """Return a rule: read by these built-in loops, by all custom loops, and perhaps by agents over HTTP."""
    advice = f"remove it, or set agent.loop to one that reads it: {', '.join(loops)}"
    others = {*BUILTIN_LOOPS} - {*loops}

    def is_read(recipe: Any) -> bool:
        loop = recipe.agent.loop
        return loop not in others if isinstance(loop, str) else over_http

    return read_if(is_read, "with agent.loop {0.agent.loop}", advice)


_BY_MOST = _read_by("tool_use", "retry", "compress", over_http=True)
_BY_TOOL_LOOPS, _BY_COMPRESS = _read_by("tool_use", "compress"), _read_by("compress")


class CommandLoop(_Program):
    """A program that calls the model through an HTTP endpoint."""

    def __str__(self) -> str:
        return " ".join(self.command)

    def __hash__(self) -> int:
        return hash(tuple(self.command))


class FunctionLoop(Section):
    """A function that calls the model through an HTTP endpoint."""

    function: str = key(..., "package.module:function that takes an AgentTask and may return the reward.")
    python: str | None = key(
        None, "Python of another environment. One process of it runs the function for all sessions."
    )

    def __str__(self) -> str:
        return self.function


_EXTERNAL = read_if(
    lambda recipe: not isinstance(recipe.agent.loop, str),
    "with agent.loop {0.agent.loop}",
    "remove it, or set agent.loop to a command or function",
)


class Agent(Section):
    """Agent loop, turns and tools of a session."""

    loop: str | CommandLoop | FunctionLoop = key(
        "single_turn",
        "single_turn, tool_use, retry, compress, package.module:function, or an agent that calls the model "
        "through an HTTP endpoint: {command: [...]} or {function: package.module:function}.",
    )
    turns: int = key(
        8, "Maximum turns of a session. Custom Python loops set their own limit.", _BY_MOST, ge=1
    )
    strict: bool = key(
        False,
        "Reject requests whose sampling settings differ from the recipe's, instead of overriding them.",
        _EXTERNAL,
    )
    tools: list[Annotated[ToolSection | McpSection, BeforeValidator(_tool)]] = key(
        [],
        "Tools that the model may call, such as [calculator, python, {mcp: {command: [...]}}].",
        _BY_TOOL_LOOPS,
    )
    tool_call_format: Literal["json", "plain"] = key(
        "json",
        'How a tool call is written: json: <tool_call>{"name": …, "arguments": …}</tool_call>; plain: '
        "[calculator: 2+3], or [2+3] with a single tool.",
        _read_by("tool_use", "compress", over_http=True),
    )
    compress_at: int | None = key(
        None,
        "Tokens of context at which compress asks for a summary. Default: when little room remains.",
        _BY_COMPRESS,
        ge=8,
    )
    message: str | None = key(
        None,
        "Message of retry after a wrong response, or compress's request for a summary. Defaults: That is not "
        "right. Try again. / Summarise what matters for going on.",
        _read_by("retry", "compress"),
    )
    deadline_s: float | None = key(
        None,
        "Deadline of one session in seconds, including waiting. Default: 0.9 × rollout.deadline_s.",
        gt=0,
    )
    on_failure: OnFailure = key(
        "keep_rest",
        "If a session fails: train on the rest of its group (keep_rest), drop the group (drop_group), or "
        "retry it up to twice and then keep the rest (retry).",
    )

"""Options of the agent and of mini-batches that can't work together, or that nothing would read."""

from __future__ import annotations

from collections.abc import Iterator

from practicum.errors import RecipeError
from practicum.recipe.checks.rules import unread
from practicum.recipe.counts import count
from practicum.recipe.schema.recipe import Recipe

_READ_BY = {
    "single_turn": (),
    "tool_use": ("turns", "tools", "calls"),
    "retry": ("turns", "feedback"),
    "compress": ("turns", "tools", "calls", "compress_at", "ask_summary"),
}
"""Options that the built-in loops read; a loop of the user's may read all."""
_OPTIONS = ("turns", "tools", "calls", "compress_at", "ask_summary", "feedback")


def check_agent(recipe: Recipe) -> Iterator[RecipeError]:
    """Options that the loop would not read, and a loop for tools without any."""
    agent = recipe.agent
    for key in _OPTIONS:
        if agent.loop in _READ_BY and key not in _READ_BY[agent.loop]:
            readers = [loop for loop, read in _READ_BY.items() if key in read]
            advice = f"remove it, or set agent.loop to one that reads it: {', '.join(readers)}"
            yield from unread(agent, "agent", [key], f"with agent.loop {agent.loop}", advice)
    if agent.loop == "tool_use" and not agent.tools:
        expected = "at least one tool, such as [calculator]"
        yield RecipeError("agent.tools", "none with agent.loop tool_use", expected)
    if agent.deadline_s is not None and agent.deadline_s > recipe.rollout.deadline_s:
        found = f"{agent.deadline_s:g} with rollout.deadline_s {recipe.rollout.deadline_s:g}"
        advice = "all sessions of a step must be done in rollout.deadline_s: lower one, or raise the other"
        yield RecipeError("agent.deadline_s", found, "at most rollout.deadline_s", advice)


def check_minibatches(recipe: Recipe) -> Iterator[RecipeError]:
    """Mini-batches are asked for in one way, and each has something to learn from."""
    train, sessions = recipe.train, count(recipe).sessions
    if train.minibatch_rows is not None and train.minibatches != 1:
        found = f"{train.minibatch_rows} with train.minibatches {train.minibatches}"
        advice = "say how many optimizer steps there are, or how many rows each takes"
        yield RecipeError("train.minibatch_rows", found, "one of the two", advice)
    elif train.minibatches > sessions:
        found = f"{train.minibatches} with {sessions} sessions per step"
        advice = "raise train.prompts or rollout.samples, or lower it"
        yield RecipeError("train.minibatches", found, f"at most {sessions}", advice)
    make = recipe.model.make
    if make is None:
        return
    if make.family != "qwen3_moe":
        advice = "set model.make.family to qwen3_moe, or remove it"
        why = f"with family {make.family}"
        yield from unread(make, "model.make", ("experts", "experts_per_token"), why, advice)
    elif make.experts_per_token > make.experts:
        found = f"{make.experts_per_token} of {make.experts} experts"
        yield RecipeError("model.make.experts_per_token", found, "at most model.make.experts")

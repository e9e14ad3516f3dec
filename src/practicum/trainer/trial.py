"""Users' own code tried before a run: each reward function once, on real rows with made-up answers."""

from __future__ import annotations

from practicum.concurrency.event_loop import run_async
from practicum.recipe.schema.recipe import Recipe
from practicum.sessions.tools.toolbox import Toolbox
from practicum.tasks.check_tasks import tasks_needing_answer
from practicum.tasks.messages import prompt_text
from practicum.tasks.prompts import Prompt
from practicum.tasks.rewards import RewardFunctions, RewardSample
from practicum.tasks.stream import make_stream

MADE_UP = "a made-up answer"


def try_rewards(recipe: Recipe) -> list[str]:
    """What each task's rewards give to a made-up answer; a function that fails is a RewardError.

    With reward.on_error skip a failure is told and does not stop.
    """
    judge, findings = RewardFunctions(recipe.tasks, recipe.reward), []
    for name, task in recipe.tasks.items():
        specs = recipe.reward.functions if task.rewards is None else task.rewards
        if not specs:
            continue
        stream = make_stream({name: task}, recipe.seed, needs_answer=tasks_needing_answer(recipe))
        # A function of a batch must give a number for each: with one sample a wrong one may look right.
        count = 1 if judge.divides(name) else 2
        samples = [_sample(name, prompt) for prompt in stream.take(count)]
        longest = sum(spec.timeout_s for spec in specs)
        judged, *_ = run_async(judge.score(samples), timeout=longest + 5.0, owner=f"rewards of tasks.{name}")
        parts = ", ".join(f"{part} {value:g}" for part, value in judged.parts.items())
        findings.append(f"tasks.{name}: rewards of {MADE_UP}: {judged.failure or parts}")
    return findings


def _sample(task: str, prompt: Prompt) -> RewardSample:
    return RewardSample(
        prompt_text=prompt_text(prompt.content),
        response_text=MADE_UP,
        answer=prompt.answer,
        row=prompt.row,
        task=task,
        domain=prompt.domain,
        finish="stop",
        key=f"{MADE_UP} to {prompt}",
        response_tokens=len(MADE_UP.split()),
        turns=(MADE_UP,),
    )


def describe_tools(recipe: Recipe) -> list[str]:
    """Each tool with the parameters that a model sees; one that can't be shown is a RecipeError."""
    tools = Toolbox(recipe.agent.tools).tools
    shown = [", ".join(f"{p.name}: {p.kind}" for p in tool.parameters) for tool in tools]
    return [f"tool: {tool.name}({text})" for tool, text in zip(tools, shown, strict=True)]

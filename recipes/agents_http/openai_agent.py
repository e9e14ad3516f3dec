# pyright: reportMissingImports=false
"""An agent written with openai-agents. Only the address of the model is the trainer's."""

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIProvider,
    RunConfig,
    Runner,
    StopAtTools,
    function_tool,
)
from openai import BadRequestError


@function_tool
def calculator(expression: str) -> str:
    """Adds numbers, as in 1+2."""
    return str(sum(map(int, expression.split("+"))))


@function_tool
def final_answer(answer: str) -> str:
    """Answers the task."""
    return answer


AGENT = Agent(
    name="adder",
    tools=[calculator, final_answer],
    tool_use_behavior=StopAtTools(stop_at_tool_names=["final_answer"]),
)


async def solve(task) -> float:
    """Return 1 if the agent's answer is right."""
    provider = OpenAIProvider(base_url=task.base_url, api_key=task.api_key)
    config = RunConfig(model=task.model, model_provider=provider)
    try:
        result = await Runner.run(AGENT, task.prompt, max_turns=3, run_config=config)
    except (MaxTurnsExceeded, ModelBehaviorError, BadRequestError):  # no answer in three turns, or a cut one
        return 0.0
    return float(str(result.final_output) == task.answer)

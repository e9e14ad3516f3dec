# pyright: reportMissingImports=false
"""An agent written with smolagents. Only the address of the model is the trainer's."""

from smolagents import AgentError, OpenAIModel, ToolCallingAgent, tool

PROMPTS = {
    "system_prompt": "You calculate.",
    "planning": {"initial_plan": "", "update_plan_pre_messages": "", "update_plan_post_messages": ""},
    "managed_agent": {"task": "", "report": ""},
    "final_answer": {"pre_messages": "Answer.", "post_messages": ""},
}


@tool
def calculator(expression: str) -> str:
    """Adds numbers.

    Args:
        expression: The numbers, as in 1+2.
    """
    return str(sum(map(int, expression.split("+"))))


def solve(task) -> float:
    """Return 1 if the agent's answer is right."""
    model = OpenAIModel(task.model, api_base=task.base_url, api_key=task.api_key)
    agent = ToolCallingAgent([calculator], model, prompt_templates=PROMPTS, max_steps=2, verbosity_level=0)
    try:
        return float(str(agent.run(task.prompt)) == task.answer)
    except AgentError:  # no answer that fits the model's context
        return 0.0

from practicum.recipe.schema.recipe import Task
from practicum.recipe.schema.rollout_sections import Agent
from practicum.sessions.demonstrator import make_demonstrator
from practicum.sessions.tools.toolbox import Toolbox
from practicum.tasks.prompts import Prompt
from practicum.tasks.stream import make_stream


def asked() -> Prompt:
    task = Task(kind="total", options={"numbers": [2, 2], "digits": [2, 2]})
    return make_stream({"total": task}, seed=1).prompt(0)


def turn(calls: str, *tools: str) -> str:
    agent = Agent.model_validate({"loop": "tool_use", "tools": list(tools), "tool_call_format": calls})
    prompt = asked()
    assert isinstance(prompt.content, str)
    return make_demonstrator(agent, Toolbox(agent.tools))(
        prompt, [{"role": "user", "content": prompt.content}]
    )


def test_a_demonstrator_writes_calls_as_the_agent_does():
    content = asked().content
    assert isinstance(content, str)
    expression = content.removeprefix("total:").removesuffix("=")
    assert turn("plain", "calculator") == f"[{expression}]"
    assert turn("plain", "calculator", "python") == f"[calculator: {expression}]"
    assert f'"expression": "{expression}"' in turn("json", "calculator")


def test_a_demonstrator_without_the_calculator_answers():
    assert turn("plain") == turn("json", "python") == asked().answer

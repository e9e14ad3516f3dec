# pyright: reportMissingImports=false
"""A tool-using agent with OpenAI's client, unchanged for training: `python openai_tools.py PROMPT`."""

import json
import sys

from openai import OpenAI

TOOL = {
    "name": "calculator",
    "description": "Calculates a sum.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
}


def calculate(expression: str) -> str:
    try:
        return str(sum(int(number) for number in expression.split("+")))
    except ValueError as error:
        return f"error: {error}"


client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
messages, answer = [{"role": "user", "content": sys.argv[1]}], ""
for _ in range(4):
    completion = client.chat.completions.create(
        model="student", messages=messages, tools=[{"type": "function", "function": TOOL}]
    )
    said = completion.choices[0].message
    messages.append(said)
    answer = said.content or ""
    for call in said.tool_calls or []:
        result = calculate(json.loads(call.function.arguments).get("expression", ""))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    if not said.tool_calls:
        break
print(json.dumps({"reward": float("3" in answer)}))

# pyright: reportMissingImports=false
"""Programs that hold one conversation with real client libraries: `python clients.py openai`.

The model is asked 1+2?, may call the calculator, which says 3, and is then told to go on until four turns are
done. They run in their own environment (requirements-clients.txt) and know nothing of practicum.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

PROMPT, NEXT, TURNS = "1+2?", "go on", 4
TOOL = {
    "name": "calculator",
    "description": "Calculates.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
}
MODEL = "student"
PATIENCE = {"timeout": float(os.environ.get("CLIENT_TIMEOUT_S", "60")), "max_retries": 100}
STREAMS = "CLIENT_STREAMS" not in os.environ
"""False on a bad network: libraries do not ask again for a stream that breaks off."""


def http() -> None:
    from http.client import HTTPException
    from urllib.request import Request, urlopen
    from uuid import uuid4

    def post(body: Any) -> Any:
        headers = {
            "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "content-type": "application/json",
            "idempotency-key": str(uuid4()),
        }
        url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
        while True:
            try:
                return json.load(urlopen(Request(url, json.dumps(body).encode(), headers)))
            except (OSError, HTTPException, ValueError):  # of the network: no reply, or half of one
                time.sleep(0.05)

    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    for _ in range(TURNS):
        body = {"model": MODEL, "messages": messages, "tools": [{"type": "function", "function": TOOL}]}
        said = post(body)["choices"][0]["message"]
        messages.append(said)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "3"}
            for call in said.get("tool_calls", [])
        ]
        messages += results or [{"role": "user", "content": NEXT}]


def openai() -> None:
    from openai import OpenAI

    client = OpenAI(**PATIENCE)
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    for turn in range(TURNS):
        tools = [{"type": "function", "function": TOOL}]
        if STREAMS and turn % 2:
            with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
                said = stream.get_final_completion().choices[0].message
        else:
            said = (
                client.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0].message
            )
        messages.append({k: v for k, v in said.to_dict().items() if k in ("role", "content", "tool_calls")})
        calls = said.tool_calls or []
        results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in calls]
        messages += results or [{"role": "user", "content": NEXT}]


def responses() -> None:
    from openai import OpenAI

    client = OpenAI(**PATIENCE)
    given: Any = PROMPT
    earlier = None
    for _ in range(TURNS):
        tools = [{"type": "function", **TOOL}]
        said = client.responses.create(model=MODEL, input=given, tools=tools, previous_response_id=earlier)
        calls = [item for item in said.output if item.type == "function_call"]
        given = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
        given, earlier = given or NEXT, said.id


def anthropic() -> None:
    from anthropic import Anthropic

    client = Anthropic(**PATIENCE)
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
    for turn in range(TURNS):
        request = {"model": MODEL, "messages": messages, "tools": [tool], "max_tokens": 512}
        if STREAMS and turn % 2:
            with client.messages.stream(**request) as stream:
                said = stream.get_final_message()
        else:
            said = client.messages.create(**request)
        messages.append({"role": "assistant", "content": [block.to_dict() for block in said.content]})
        calls = [block for block in said.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "3"} for call in calls]
        messages.append({"role": "user", "content": results or NEXT})


def agents() -> None:
    from agents import Agent, Runner, function_tool, set_default_openai_client
    from openai import AsyncOpenAI

    set_default_openai_client(AsyncOpenAI(**PATIENCE))

    @function_tool
    def calculator(expression: str) -> str:
        """Calculates."""
        return "3"

    given: Any = [{"role": "user", "content": PROMPT}]
    agent, turns = Agent(name="sums", tools=[calculator], model=MODEL), 0
    while turns < TURNS:
        result = Runner.run_sync(agent, given)
        turns += len(result.raw_responses)
        given = [*result.to_input_list(), {"role": "user", "content": NEXT}]


def smolagents() -> None:
    from smolagents import OpenAIModel, Tool, ToolCallingAgent

    class Calculator(Tool):
        name, description, output_type = "calculator", "Calculates.", "string"
        inputs = {"expression": {"type": "string", "description": "what to calculate"}}  # noqa: RUF012

        def forward(self, expression: str) -> str:
            return "3"

    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    model = OpenAIModel(MODEL, api_base=url, api_key=key, client_kwargs=PATIENCE)
    ToolCallingAgent([Calculator()], model, max_steps=TURNS).run(PROMPT)


if __name__ == "__main__":
    globals()[sys.argv[1]]()

# pyright: reportMissingImports=false
"""Best of three with Anthropic's client: the shortest answer goes on. The recipe's functions judge it."""

import sys

from anthropic import Anthropic

client = Anthropic()  # reads ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY


def ask(messages: list) -> str:
    message = client.messages.create(model="student", max_tokens=64, messages=messages)
    return "".join(block.text for block in message.content if block.type == "text")


question = {"role": "user", "content": sys.argv[1]}
drafts = [ask([question]) for _ in range(3)]  # three siblings of one prompt
best = min(drafts, key=len)
final = ask([question, {"role": "assistant", "content": best}, {"role": "user", "content": "sure?"}])
print(final)

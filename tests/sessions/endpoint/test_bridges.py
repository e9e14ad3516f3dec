"""How a conversation is continued equals what PyPI's `renderers` does, an independent reference.

Its renderers are written by hand for each family. Here the family's chat template decides. These templates
come from the package `trl` in the clients' environment; the tokenizer is byte-level, with the special tokens.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from practicum.errors import EngineError
from practicum.tasks.messages import Message
from tests.sessions.endpoint.driven import TOOL
from tests.sessions.endpoint.test_clients import PYTHON
from tests.sessions.sessions import Scripted, byte_tokenizer, session_of

FAMILIES = {
    "qwen3": ("qwen3", "<|im_end|>"),
    "qwen3-vl": ("qwen3_vl", "<|im_end|>"),
    "qwen3.5": ("qwen3_5_think", "<|im_end|>"),
    "qwen3.6": ("qwen3_6", "<|im_end|>"),
    "qwen3.8": ("qwen3_8", "<|im_end|>"),
    "glm-4.5": ("glm4moe", "<|user|>"),
    "llama-3": ("llama3", "<|eot_id|>"),
    "gemma4": ("gemma4_v5", "<turn|>"),
    "deepseek-v3": ("deepseekv3", "<｜end▁of▁sentence｜>"),
    "deepseek-r1": ("deepseek_r1_distill", "<｜end▁of▁sentence｜>"),
    "nemotron-3": ("nemotron_3_nano", "<|im_end|>"),
    "nemotron-3-ultra": ("nemotron_3_ultra", "<|im_end|>"),
    "nemotron-3.5": ("nemotron_3_5_lightning", "<|im_end|>"),
}
"""By the renderer's name: the template, and the token that ends a turn."""
USER, RESULT = {"role": "user", "content": "b c"}, {"role": "tool", "name": "calculator", "content": "3"}
CASES: dict[str, tuple[str, list[Message]]] = {
    "user": ("ab a", [USER]),
    "tool": ("ab a", [RESULT]),
    "two tools": ("ab a", [RESULT, RESULT]),
    "tool after thoughts": ("<think>\nhm\n</think>\n\nab a", [RESULT]),
    "user after thoughts": ("<think>\nhm\n</think>\n\nab a", [USER]),
}
_SPECIAL = re.compile(r"<[|｜]?/?[\w▁:.-]+[|｜]?>|<\|?[\w]+\|>|\[gMASK\]|\]~!?b\[?\]?|\[e~\[")


def templates() -> Path:
    (folder,) = PYTHON.parents[1].glob("lib/*/site-packages/trl/chat_templates")
    return folder


def tokenizer_for(family: str) -> Any:
    template, end = FAMILIES[family]
    tokenizer = byte_tokenizer("chatml")
    text = (templates() / f"{template}.jinja").read_text()
    specials = {
        end,
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *(t for t in _SPECIAL.findall(text) if len(t) < 40),
    }
    tokenizer.add_special_tokens({"eos_token": end, "additional_special_tokens": sorted(specials)})
    tokenizer.chat_template = text
    return tokenizer


def continued(family: str, tokenizer: Any, turn: list[int], new: list[Message]) -> tuple[list[int], Any]:
    """Return the prompt's tokens, and those before the second turn; None if a trajectory opens for it."""

    async def loop(session: Any) -> None:
        await session.generate()
        await session.generate(new)

    session = session_of(
        "1+2?", Scripted([turn, turn]), tokenizer, chat=True, tools=[{"type": "function", "function": TOOL}]
    )
    prompt = list(session.trajectory.prompt_ids)
    try:
        asyncio.run(loop(session))
    except EngineError as error:
        return prompt, str(error)
    first = session.trajectories[0]
    return prompt, first.ids()[: -len(turn)] if first.turns == 2 else None

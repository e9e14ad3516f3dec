"""Conversations are continued with the tokens of PyPI's `renderers`, an independent reference.

Its renderers are written by hand for each family. Here the family's chat template decides. The templates come
from the package `trl` in the environment of verifiers; the tokenizer is byte-level, with the special tokens.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from practicum.errors import EngineError
from practicum.sessions.session import Session
from practicum.tasks.messages import Message
from tests.sessions.endpoint.driven import TOOL
from tests.sessions.endpoint.test_clients import ROOT
from tests.sessions.sessions import Scripted, byte_tokenizer, session_of

PYTHON = ROOT / ".venv-verifiers/bin/python"
FAMILIES = {
    "qwen3": ("qwen3", "<|im_end|>"),
    "qwen3 instruct-2507": ("qwen3_instruct_2507", "<|im_end|>"),
    "qwen3-vl": ("qwen3_vl", "<|im_end|>"),
    "qwen3.5": ("qwen3_5_think", "<|im_end|>"),
    "qwen3.5 without thinking": ("qwen3_5_nothink", "<|im_end|>"),
    "qwen3.6": ("qwen3_6", "<|im_end|>"),
    "qwen3.8": ("qwen3_8", "<|im_end|>"),
    "glm-4.5": ("glm4moe", "<|user|>"),
    "llama-3": ("llama3_2", "<|eot_id|>"),
    "gemma4": ("gemma4_v5", "<turn|>"),
    "deepseek-v3": ("deepseekv3", "<｜end▁of▁sentence｜>"),
    "deepseek-r1": ("deepseek_r1_distill", "<｜end▁of▁sentence｜>"),
    "nemotron-3": ("nemotron_3_nano", "<|im_end|>"),
    "nemotron-3 super": ("nemotron_3_super", "<|im_end|>"),
    "nemotron-3-ultra": ("nemotron_3_ultra", "<|im_end|>"),
    "nemotron-3.5": ("nemotron_3_5_lightning", "<|im_end|>"),
}
"""By the renderer's name and perhaps the models': the template, and the token that ends a turn."""
SETTINGS = {"qwen3.5 without thinking": {"enable_thinking": False}}
OBSERVATION = "<|observation|>"
"""Ends turns of GLM that call a tool."""
STARTS = {"llama-3": "<|begin_of_text|>", "gemma4": "<bos>", "deepseek-v3": "<｜begin▁of▁sentence｜>"}
STARTS["deepseek-r1"] = STARTS["deepseek-v3"]
USER, RESULT = {"role": "user", "content": "b c"}, {"role": "tool", "name": "calculator", "content": "3"}
THOUGHT = "<think>\nhm\n</think>\n\nab a"
CASES: dict[str, tuple[str, list[Message]]] = {
    "user": ("ab a", [USER]),
    "tool": ("ab a", [RESULT]),
    "two tools": ("ab a", [RESULT, RESULT]),
    "tool after thoughts": (THOUGHT, [RESULT]),
    "user after thoughts": (THOUGHT, [USER]),
}
_OTHERS = """<think> </think> <eos> <pad> <unk> <|endoftext|> <|end_of_text|> <|eom_id|> <|python_tag|>
<|image> <image|> <|audio> <audio|> <|image|> <|audio|> <|video|>
<|tool_call> <tool_call|> <|tool_response> <tool_response|> <|"|>"""
"""Special tokens that renderers ask for and templates need not name."""
_SPECIAL = re.compile(r"<[|｜]?/?[\w▁:.-]+[|｜]?>|\[gMASK\]")


def tokenizer_for(family: str) -> PreTrainedTokenizerFast:
    name, end = FAMILIES[family]
    (file,) = PYTHON.parents[1].glob(f"lib/*/site-packages/trl/chat_templates/{name}.jinja")
    tokenizer, text = byte_tokenizer("chatml"), file.read_text()
    specials = {end, "<|im_start|>", "<|im_end|>", *_OTHERS.split(), *_SPECIAL.findall(text)}
    more = {"bos_token": STARTS[family]} if family in STARTS else {}
    tokenizer.add_special_tokens({"eos_token": end, **more, "additional_special_tokens": sorted(specials)})
    tokenizer.chat_template = text
    return tokenizer


def continued(tokenizer: Any, text: str, new: list[Message]) -> tuple[list[int], list[int], Any]:
    """Return the prompt, the turn, and the tokens before the next turn; None if a trajectory opens for it.
    The turn has the white space that the template writes. An error is its text."""
    tools = [{"type": "function", "function": TOOL}]
    session = session_of("1+2?", Scripted([]), tokenizer, chat=True, tools=tools)
    prompt = list(session.trajectory.prompt_ids)
    before, messages = (
        tokenizer.decode(prompt),
        [*session.opening, {"role": "assistant", "content": text}, *new],
    )
    written = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    if before.endswith("<think>\n"):
        text = text.removeprefix("<think>\n") if "<think>" in text else f"\n</think>\n\n{text}"
    end = tokenizer.eos_token
    if written.startswith(before):
        text, end = re.split(f"({re.escape(end)}|{re.escape(OBSERVATION)})", written.removeprefix(before))[:2]
    turn = tokenizer.encode(text + end, add_special_tokens=False)
    session.sampling = replace(session.sampling, stop=frozenset(turn[-1:]))

    async def loop(session: Session) -> None:
        await session.generate()
        await session.generate(new)

    session._policy = Scripted([turn, turn])
    try:
        asyncio.run(loop(session))
    except EngineError as error:
        return prompt, turn, str(error)
    first = session.trajectories[0]
    return prompt, turn, first.ids()[: -len(turn)] if first.turns == 2 else None


def compared(folder: Path) -> dict[tuple[str, str], tuple[Any, Any]]:
    """Return our tokens and those of `renderers`, by family and case."""
    ours: dict[tuple[str, str], Any] = {}
    asked = []
    for family in FAMILIES:
        tokenizer = tokenizer_for(family)
        tokenizer.save_pretrained(folder / family)
        for case, (text, new) in CASES.items():
            prompt, turn, ours[family, case] = continued(tokenizer, text, new)
            config = {"name": family.split()[0]} | SETTINGS.get(family, {})
            shared = {"folder": str(folder / family), "config": config, "tools": [TOOL]}
            asked.append(shared | {"prompt": prompt, "turn": turn, "new": new})
    program = [str(PYTHON), f"{Path(__file__).parent}/bridges.py"]
    done = subprocess.run(
        program, input=json.dumps(asked), capture_output=True, text=True, timeout=300, check=True
    )
    return {key: (ours[key], theirs) for key, theirs in zip(ours, json.loads(done.stdout), strict=True)}


def documented() -> set[tuple[str, str]]:
    """Return the families and cases of the docs' table of differences."""
    table = (
        (ROOT / "docs/agents.md").read_text().partition("| family | after the turn |")[2].partition("\n\n")[0]
    )
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in table.splitlines()[2:]]
    return {
        (f.strip("`"), case)
        for families, cases in rows
        for f in families.split(", ")
        for case in cases.split(", ")
    }


@pytest.mark.long
@pytest.mark.skipif(not PYTHON.exists(), reason="`make test-clients` makes .venv-verifiers")
def test_conversations_go_on_as_renderers_continues_them(tmp_path: Path):
    found = compared(tmp_path)
    assert all(theirs is None or isinstance(theirs, list) for _, theirs in found.values())
    both = {key: pair for key, pair in found.items() if all(isinstance(side, list) for side in pair)}
    assert len(both) >= 30
    assert all(ours == theirs for ours, theirs in both.values())
    # Elsewhere one of them renders all anew, or the template leaves out the message.
    assert {key for key, (ours, theirs) in found.items() if ours != theirs} == documented()

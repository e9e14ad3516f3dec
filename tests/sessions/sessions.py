"""Sessions for tests: prompts, tokenizers with templates of several kinds, and turns by script."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from practicum.engines.protocol import Counter, Generation, Sampling
from practicum.models.tokenizer import make_tokenizer
from practicum.recipe.schema.rollout_sections import Agent
from practicum.sessions.session import Policy, Session, SessionStart, Trajectory
from practicum.tasks.messages import Content
from practicum.tasks.prompts import Prompt, encode_prompt
from tests.engines.engines import sampling

_CHATML = (
    "{% if tools %}<|im_start|>tools\n"
    "{% for t in tools %}{{ t.function.name }} {% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_OLD_TURN = "m.role == 'assistant' and not loop.last"
TEMPLATES = {
    "chatml": _CHATML.replace("CONTENT", "m.content"),
    "trims": _CHATML.replace("CONTENT", "m.content | trim if m.role == 'assistant' else m.content"),
    "strips_thoughts": _CHATML.replace(
        "CONTENT", f"m.content.split('</think>')[-1] if {_OLD_TURN} else m.content"
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "leaves_out_results": _CHATML.replace("CONTENT", "m.content").replace(
        "for m in messages", "for m in messages if m.role != 'tool'"
    ),
    "refuses_tools": (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tool role') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    ),
}
_SPECIALS = ("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>")


def byte_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE with some merges, so that a text has many tokenisations; one of `TEMPLATES`."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("a", "b"), ("ab", "a"), ("Ġ", "a"), ("Ċ", "Ċ"), ("b", "c"), ("1", "2")]
    vocabulary |= {left + right: len(vocabulary) + i for i, (left, right) in enumerate(merges)}
    core = Tokenizer(models.BPE(vocabulary, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        bos_token="<|begin_of_text|>",
        additional_special_tokens=list(_SPECIALS),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """The character tokenizer of made models as "own", else one of `TEMPLATES`."""
    return make_tokenizer() if template == "own" else byte_tokenizer(template)


def one_by_one(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """A tokenisation of the text that the tokenizer itself would not choose: no merges."""
    return [i for c in text for i in tokenizer.encode(c, add_special_tokens=False)]


async def nap(ms: int) -> str:
    """A tool that takes its time."""
    await asyncio.sleep(ms / 1000)
    return f"slept {ms}"


_MEETINGS: dict[asyncio.AbstractEventLoop, asyncio.Barrier] = {}


async def meet(of: int) -> str:
    """A tool that ends when so many calls of it are under way."""
    barrier = _MEETINGS.setdefault(asyncio.get_running_loop(), asyncio.Barrier(of))
    await asyncio.wait_for(barrier.wait(), 5)
    return "met"


class Scripted:
    """Turns as they are written down: token ids, cut to the length that is asked for."""

    def __init__(self, turns: Sequence[Sequence[int]]) -> None:
        self._turns = iter(turns)

    async def next(
        self, trajectory: Trajectory, sampling: Sampling, counter: Counter, session: Session
    ) -> Generation:
        ids = list(next(self._turns))
        stopped = bool(ids) and ids[-1] in sampling.stop and len(ids) <= sampling.max_new_tokens
        tokens = torch.tensor(ids[: sampling.max_new_tokens])
        logprobs = torch.full((len(tokens),), -1.0)
        return Generation(tokens, logprobs, logprobs, "stop" if stopped else "length", 3, 4)


def prompt_of(content: Content, uid: int = 7, answer: str = "") -> Prompt:
    return Prompt(uid, "task", "domain", content, answer, {}, 0, 0)


def session_of(
    content: Content,
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    uid: int = 7,
    index: int = 0,
    chat: bool = False,
    context: int = 4096,
    max_new_tokens: int = 512,
    agent: dict[str, Any] | None = None,
    tools: Sequence[dict[str, Any]] = (),
    **more: Any,
) -> Session:
    """A session over a prompt that is encoded as it would be in a run."""
    tokenizer = tokenizer or make_tokenizer()
    prompt = prompt_of(content, uid)
    encoded = encode_prompt(prompt, tokenizer, chat=chat, system=None, tools=tools)
    start = SessionStart(encoded.ids, encoded.images, encoded.messages, tools)
    assert isinstance(tokenizer.eos_token_id, int)
    drawn = sampling(max_new_tokens, stop=[tokenizer.eos_token_id])
    return Session(
        prompt,
        start,
        index,
        policy,
        drawn,
        tokenizer,
        context=context,
        agent=Agent.model_validate(agent or {}),
        **more,
    )

"""Tiny reward models on disk, cases for them, and a real server that has one, as vLLM serves it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedModel, Qwen3Config

from practicum.concurrency.gather import gather_all
from practicum.engines.protocol import Counter, GenerateRequest
from practicum.models.tokenizer import make_tokenizer
from practicum.recipe.schema.teacher_sections import RewardModel
from practicum.rewards.judge import CannotScore, JudgeInput
from practicum.rewards.local_judges import Classifier, PromptedJudge, load_judge
from practicum.rewards.reward_scorer import RewardScorer
from tests.engines.engines import tiny
from tests.serving.servers import MODEL
from tests.teachers import scoring_server
from tests.teachers.scoring_server import Manners

T = TypeVar("T")


def save_classifier(
    folder: Path, *, family: str = "qwen3", labels: int = 3, seed: int = 0, context: int = 128, **more: Any
) -> PreTrainedModel:
    """Save a tiny classifier with its tokenizer into a folder, and give it."""
    tokenizer = make_tokenizer()
    kind = Qwen3Config if family == "qwen3" else LlamaConfig
    config = kind(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=context,
        **{"num_labels": labels, "pad_token_id": None, "bos_token_id": None} | more,
    )
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0)  # so that rows differ
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval()


def save_judge(folder: Path, says: str | None = None, seed: int = 0) -> PreTrainedModel:
    """Save a tiny language model with its tokenizer; with `says` it always says this character."""
    tokenizer = make_tokenizer()
    model = tiny("gpt2" if says else "qwen3", seed)
    if says is not None:
        with torch.no_grad():
            model.transformer.ln_f.weight.zero_()  # pyright: ignore
            head = model.get_output_embeddings().weight  # pyright: ignore
            assert isinstance(head, Tensor)
            model.transformer.ln_f.bias.copy_(head[tokenizer.convert_tokens_to_ids(says)] * 10)  # pyright: ignore
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def cases(count: int, *, chat: bool = False) -> list[JudgeInput]:
    """Cases of various lengths."""
    out = []
    for i in range(count):
        prompt, response = f"{i}+{i * 37 % 11}=" + "," * (i * 5 % 13), str(i * 7919)[: 1 + i % 5]
        talk = ({"role": "user", "content": prompt}, {"role": "assistant", "content": response})
        out.append(JudgeInput(f"prompt {i}/session 0", prompt, response, str(i), talk if chat else None))
    return out


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


async def score_all(scorer: RewardScorer, some: list[JudgeInput]) -> list[float | CannotScore]:
    """Scores of all cases, asked for concurrently."""
    return await gather_all(scorer.judge(case) for case in some)


@contextmanager
def local(spec: RewardModel, room: int = 60) -> Iterator[Classifier | PromptedJudge]:
    """A reward model in this process."""
    found = load_judge("rm", spec, room)
    try:
        yield found
    finally:
        found.close()


@contextmanager
def judging_server(spec: RewardModel, *, knows_use_activation: bool = True, **manners: Any) -> Iterator[Any]:
    """A server of a classifier (/classify) or a judge (/v1/completions with a text): (URL, Manners)."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    behaviour = Manners(**manners)

    with local(spec) as model:

        class Handler(_Handler):
            manners = behaviour
            knows = knows_use_activation
            served: Any = model

            @staticmethod
            def wait(work: Coroutine[Any, Any, T]) -> T:
                return asyncio.run_coroutine_threadsafe(work, loop).result(30)

        http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        http.daemon_threads = True
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}/v1", behaviour
        finally:
            behaviour.release.set()
            http.shutdown()
            http.server_close()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


class _Handler(scoring_server._Handler):
    served: Any
    wait: Any
    knows: bool

    def _complete(self, body: dict[str, Any], number: int) -> None:
        if number <= self.manners.fails_first:
            self._error(self.manners.fail_status, "overloaded")
        elif self.path == "/classify" and self.served.spec.kind == "classifier":
            self._json(200, {"data": [{"index": 0, "probs": self._probs(body)}], "model": MODEL})
        elif self.path == "/v1/completions" and self.served.spec.kind == "judge":
            self._json(200, {"choices": [{"index": 0, "text": self._reply(body)}], "model": MODEL})
        else:
            self._error(404, "Not Found")

    def _probs(self, body: dict[str, Any]) -> list[float]:
        tokenizer, model = self.served._tokenizer, self.served.model
        if "messages" in body:
            ids = tokenizer.apply_chat_template(body["messages"], return_dict=False)
        else:
            ids = tokenizer.encode(body["input"])
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        if self.knows and not body["use_activation"]:
            return logits.tolist()
        return vllm_probs(logits).tolist()

    def _reply(self, body: dict[str, Any]) -> str:
        engine, tokenizer = self.served._engine, self.served._tokenizer
        assert body["temperature"] == 0
        assert body["max_tokens"] == self.served._sampling.max_new_tokens
        ids = tokenizer.encode(body["prompt"])
        made = self.wait(engine.generate(GenerateRequest(ids, self.served._sampling, Counter(0, 0))))
        return tokenizer.decode(made.tokens, skip_special_tokens=True)


def vllm_probs(logits: Tensor) -> Tensor:
    """What vLLM's /classify gives by default: softmax, or sigmoid of a single output."""
    return logits.softmax(-1) if logits.shape[-1] > 1 else logits.sigmoid()


def values(verdicts: list[float | CannotScore]) -> list[float]:
    """Scores, where all cases have one."""
    out = []
    for verdict in verdicts:
        assert isinstance(verdict, float), verdict
        out.append(verdict)
    return out

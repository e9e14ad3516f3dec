"""What the two engines are given to do: models with random weights, rollouts of given lengths, scores.

Random weights would end answers at random, so there are no stop tokens: every answer has a given length.
"""

from __future__ import annotations

import asyncio
import copy
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.harness import Measured, Stopwatch
from benchmarks.model import make_random_model
from benchmarks.report_engines import TORCH
from practicum.engines.protocol import (
    Counter,
    Engine,
    GenerateRequest,
    Generation,
    Sampling,
    ScoreOptions,
    ScoreRequest,
    Scores,
)
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.engines.vllm.make_vllm import kv_bytes
from practicum.engines.vllm.vllm_engine import VllmEngine
from practicum.engines.vllm.vllm_messages import VllmSetup
from practicum.models.load_model import ready
from practicum.models.tokenizer import make_tokenizer

PARTS = (0.25, 0.25, 0.5, 0.5, 1.0, 1.0, 2.0, 2.5)
"""Of ragged answers: length in parts of the mean. Each part comes equally often."""
PROMPT_TOKENS = (24, 40)
SCORED_TOKENS, SCORED_FROM = 128, 32
TOP_K = 32
CONTEXT = 160


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts, samples of each, mean new tokens of an answer, and sequences to score."""

    prompts: int
    samples: int
    new_tokens: int
    scored: int


LOADS = {"4M": Load(64, 4, 32, 64), "31M": Load(8, 4, 16, 8), "135M": Load(8, 4, 16, 8)}
"""By parameters of the model."""


class SpinningSetup(VllmSetup):
    """vLLM whose waiting threads spin, as OpenMP has it where nobody says otherwise."""

    def environment(self) -> dict[str, str]:
        """As it was, without the limit."""
        return {k: v for k, v in VllmSetup.environment(self).items() if k != "GOMP_SPINCOUNT"}


def make_model(size: str) -> PreTrainedModel:
    """A model of this size; the same weights in every process."""
    if size != "135M":
        width, layers = {"4M": (256, 4), "31M": (512, 8)}[size]
        return ready(make_random_model(make_tokenizer(), width, layers), torch.device("cpu"))
    config = LlamaConfig(  # the shape of SmolLM2-135M
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return ready(AutoModelForCausalLM.from_config(config, dtype=torch.float32), torch.device("cpu"))


def make_engine(kind: str, model: PreTrainedModel, slots: int, threads: int, spins: bool = False) -> Engine:
    """An engine with the model's weights, as a run makes it; vLLM with logprobs enough for scoring."""
    if kind == TORCH:
        assert torch.get_num_threads() == threads
        return TorchEngine(model, slots=slots, context=CONTEXT)
    folder = TemporaryDirectory(prefix="practicum-vllm-")
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder.name)
    setup = (SpinningSetup if spins else VllmSetup)(
        model=folder.name,
        dtype="float32",
        context=CONTEXT,
        slots=slots,
        kv_bytes=kv_bytes(model.config, model.dtype, slots, slots * CONTEXT),
        max_logprobs=TOP_K,
        threads=threads,
    )
    engine = VllmEngine(setup, weights=lambda: (model.named_parameters(), engine.version), folder=folder)
    assert engine.facts.threads == threads
    engine.load_weights(model.named_parameters(), 0)
    return engine


def draw_ids(random: Random, count: int, vocab: int) -> list[int]:
    """Token ids of a prompt or a sequence."""
    return [random.randrange(vocab) for _ in range(count)]


def draw_prompts(load: Load, vocab: int, seed: int) -> list[list[int]]:
    """Prompts of a turn; those of other turns differ, so that nothing is left of them in a cache."""
    random = Random(f"prompts {seed}")
    return [draw_ids(random, random.randint(*PROMPT_TOKENS), vocab) for _ in range(load.prompts)]


def answer_lengths(load: Load, ragged: bool, seed: int) -> list[int]:
    """New tokens of each answer, prompt by prompt; ragged or not, the sum is the same."""
    count = load.prompts * load.samples
    if not ragged:
        return [load.new_tokens] * count
    if count % len(PARTS):
        raise ValueError(f"{count} answers can't have each of {len(PARTS)} lengths equally often")
    lengths = [round(part * load.new_tokens) for part in PARTS] * (count // len(PARTS))
    Random(f"lengths {seed}").shuffle(lengths)
    return lengths


class Work:
    """The cases of one engine with one load. Weights that it is sent are copies, never its own tensors."""

    def __init__(self, engine: Engine, model: PreTrainedModel, load: Load) -> None:
        self._engine, self._load = engine, load
        self._vocab: int = model.config.vocab_size
        self._sent = [(name, tensor.detach().clone()) for name, tensor in model.named_parameters()]
        self.bytes = sum(tensor.nbytes for _, tensor in self._sent)
        self.cases: dict[str, Callable[[int], Measured]] = {
            "equal": lambda turn: self._rolled_out(turn, ragged=False),
            "ragged": lambda turn: self._rolled_out(turn, ragged=True),
            "score, top-0": lambda turn: self._scored(turn, 0),
            f"score, top-{TOP_K}": lambda turn: self._scored(turn, TOP_K),
            "sync": self._synced,
            "rest": self._rested,
        }

    def reference(self) -> dict[str, list[float]]:
        """Greedy tokens and some scores: those of both engines have to be the same."""
        answers = self.roll_out(0, [self._load.new_tokens] * min(8, self._load.prompts), 1, greedy=True)
        scores = self.score(0, 0, min(4, self._load.scored))
        return {
            "tokens": [token for answer in answers for token in answer.tokens.tolist()],
            "logprobs": [logprob for one in scores for logprob in one.logprobs.tolist()],
        }

    def roll_out(
        self, turn: int, lengths: Sequence[int], samples: int, greedy: bool = False
    ) -> list[Generation]:
        """All answers at once, as a training step asks; each `samples` answers share a prompt."""
        prompts = draw_prompts(self._load, self._vocab, turn)

        async def sample() -> list[Generation]:
            return await asyncio.gather(
                *(
                    self._engine.generate(
                        GenerateRequest(
                            prompts[i // samples],
                            Sampling(max_new_tokens=length, stop=frozenset(), greedy=greedy),
                            Counter(seed=turn, prompt=i // samples, session=i % samples),
                        )
                    )
                    for i, length in enumerate(lengths)
                )
            )

        return asyncio.run(sample())

    def score(self, turn: int, top_k: int, count: int) -> list[Scores]:
        """All sequences at once, from the end of the prompt on, as a teacher is asked."""
        random = Random(f"scored {turn}")
        rows = [draw_ids(random, SCORED_TOKENS, self._vocab) for _ in range(count)]

        async def ask() -> list[Scores]:
            return await asyncio.gather(
                *(
                    self._engine.score(ScoreRequest(ids, SCORED_FROM), ScoreOptions(top_k=top_k))
                    for ids in rows
                )
            )

        return asyncio.run(ask())

    def _rolled_out(self, turn: int, ragged: bool) -> Measured:
        lengths = answer_lengths(self._load, ragged, turn)
        watch = _Watch(self._engine)
        answers = self.roll_out(turn, lengths, self._load.samples)
        spent = watch.read()
        found = [len(answer.logprobs) for answer in answers]
        assert found == lengths, "answers of other lengths came back"
        return _speed(spent, sum(lengths))

    def _scored(self, turn: int, top_k: int) -> Measured:
        watch = _Watch(self._engine)
        scores = self.score(turn, top_k, self._load.scored)
        spent = watch.read()
        assert all(len(one.logprobs) == SCORED_TOKENS - SCORED_FROM for one in scores)
        return _speed(spent, SCORED_TOKENS * self._load.scored)

    def _synced(self, turn: int) -> Measured:
        began = time.perf_counter()
        self._engine.load_weights(self._sent, turn)
        spent = time.perf_counter() - began
        room = [torch.zeros_like(tensor) for _, tensor in self._sent]  # written once: its pages are there
        began = time.perf_counter()
        for there, (_, tensor) in zip(room, self._sent, strict=True):
            there.copy_(tensor)
        return {"seconds": spent, "memcpy": time.perf_counter() - began, "bytes": float(self.bytes)}

    def _rested(self, turn: int) -> Measured:
        marks, held = [time.perf_counter()], [resident(self._engine)]
        for act in (self._engine.sleep, self._engine.wake):
            act()
            marks.append(time.perf_counter())
            held.append(resident(self._engine))
        seconds = {"sleep": marks[1] - marks[0], "wake": marks[2] - marks[1]}
        return seconds | dict(zip(("mb_before", "mb_asleep", "mb_after"), held, strict=True))


def resident(engine: Engine) -> float:
    """MB of the engine's process in memory; the torch engine's is this one, with all else that it holds."""
    pid = engine.pid if isinstance(engine, VllmEngine) else os.getpid()
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1000


class _Watch:
    """A stopwatch that counts the processor time of vLLM's process too."""

    def __init__(self, engine: Engine) -> None:
        self._pid = engine.pid if isinstance(engine, VllmEngine) else None
        self._before = self._elsewhere()
        self._watch = Stopwatch()

    def read(self) -> Measured:
        """Both readings now."""
        spent = self._watch.read()
        return spent | {"cpu_seconds": spent["cpu_seconds"] + self._elsewhere() - self._before}

    def _elsewhere(self) -> float:
        if self._pid is None:
            return 0.0
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _speed(spent: Measured, tokens: int) -> Measured:
    return {**spent, "tokens": tokens, "tokens_per_second": tokens / spent["seconds"]}


def agreement(ours: dict[str, Any], theirs: dict[str, Any]) -> Measured:
    """Of two references: the share of greedy tokens that agree, and the largest difference of a score."""
    same = [a == b for a, b in zip(ours["tokens"], theirs["tokens"], strict=True)]
    off = [abs(a - b) for a, b in zip(ours["logprobs"], theirs["logprobs"], strict=True)]
    return {"tokens": float(len(same)), "agree": sum(same) / len(same), "largest_difference": max(off)}

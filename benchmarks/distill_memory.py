"""Peak memory of the distillation losses beside that of one log-softmax of all tokens × vocabulary.

Forward and backward through the head, in chunks, as the learner does it; each in a process of its own.
Counted is what comes on top of weights and inputs. The model is narrow, so that the losses are what is seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from benchmarks import harness
from benchmarks.harness import Channel, Contender, Measured, Stopwatch
from practicum.algorithms.distill.distributions import full_divergence, topk_divergence
from practicum.learning.logprobs import map_logits
from practicum.models.attention import head_logits
from practicum.recipe.counts import CHUNK_LOGITS

TOKENS, VOCAB, HIDDEN, TOP_K = 8192, 151_936, 64, 32
GOAL = 0.25
MATERIALISED = "log-softmax of all"
CONTENDERS = (
    Contender("top-k", "benchmarks.distill_memory:top_k"),
    Contender("full vocabulary", "benchmarks.distill_memory:full"),
    Contender(MATERIALISED, "benchmarks.distill_memory:materialised"),
)


def top_k(channel: Channel) -> None:
    """Reverse KL to the teacher's top-k and its tail."""
    model, hidden_M = make_student()
    ids_MK, logprobs_MK = teacher_top_k()

    def reduce(logits_CV: Tensor, rows: slice) -> tuple[Tensor, ...]:
        return (topk_divergence("reverse_kl", logits_CV, ids_MK[rows], logprobs_MK[rows]).loss_N,)

    channel.serve(lambda _: above_inputs(lambda: backward(*map_logits(model, hidden_M, reduce))))


def full(channel: Channel) -> None:
    """Reverse KL to the teacher's whole distribution, from its last hidden states and its head."""
    model, hidden_M = make_student()
    teacher_M, head_VH = noise(1, TOKENS), noise(2, VOCAB)

    def reduce(logits_CV: Tensor, rows: slice) -> tuple[Tensor, ...]:
        with torch.no_grad():
            teacher_CV = teacher_M[rows] @ head_VH.T
        return (full_divergence("reverse_kl", logits_CV, teacher_CV).loss_N,)

    channel.serve(lambda _: above_inputs(lambda: backward(*map_logits(model, hidden_M, reduce))))


def materialised(channel: Channel) -> None:
    """The log-softmax of all tokens, written in chunks so that nothing else is counted, and no backward."""
    model, hidden_M = make_student()

    @torch.no_grad()
    def run() -> None:
        logprobs_MV = torch.empty(TOKENS, VOCAB)
        for i in range(0, TOKENS, 64):
            rows = slice(i, i + 64)
            torch.log_softmax(head_logits(model, hidden_M[rows]), -1, out=logprobs_MV[rows])

    channel.serve(lambda _: above_inputs(run))


def make_student() -> tuple[PreTrainedModel, Tensor]:
    """A model whose head is all that is used, and hidden states that want a gradient."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HIDDEN,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model, noise(0, TOKENS).requires_grad_()


def noise(seed: int, rows: int) -> Tensor:
    """Random rows [rows, HIDDEN]; a function of the seed."""
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed))


def teacher_top_k() -> tuple[Tensor, Tensor]:
    """Distinct ids [M, K], and logprobs that leave a tail."""
    first_M1 = torch.arange(TOKENS).unsqueeze(1) * 17
    ids_MK = (first_M1 + torch.arange(TOP_K) * 4001) % VOCAB
    logprobs_MK = -1.0 - 0.3 * torch.arange(TOP_K).expand(TOKENS, TOP_K)
    return ids_MK, logprobs_MK.contiguous() - 1.0


def backward(loss_M: Tensor) -> None:
    """The mean of the losses, back to the head and the hidden states."""
    loss_M.mean().backward()


def above_inputs(run: Callable[[], None]) -> Measured:
    """Seconds, and the most memory that the process held while running above what it held before."""
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back to now
    watch = Stopwatch()
    run()
    return {"bytes": status_bytes("VmHWM") - before, **watch.read()}


def status_bytes(name: str) -> int:
    """A number of this process's memory, as the kernel counts it."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, f"/proc/self/status has no {name}"
    return 1024 * int(found[1])


def main() -> None:
    """Measure each once, print shares of the log-softmax, write the numbers."""
    computed = 4 * TOKENS * VOCAB
    print(f"distillation losses, {TOKENS:,} tokens × {VOCAB:,} vocabulary, float32, 1 thread")
    raced = harness.race(CONTENDERS, rounds=1, warmup=0)
    print(f"  {MATERIALISED}, computed: {computed / 1e9:.2f} GB")
    for name, rounds in raced.items():
        share = rounds[0]["bytes"] / computed
        verdict = (
            "" if name == MATERIALISED else f" · goal {GOAL:.0%} {'reached' if share < GOAL else 'missed'}"
        )
        print(f"  {name}: {rounds[0]['bytes'] / 1e9:.2f} GB, {share:.1%} of it{verdict}")
    sizes = {"tokens": TOKENS, "vocab": VOCAB, "hidden": HIDDEN, "top_k": TOP_K, "chunk_logits": CHUNK_LOGITS}
    harness.write_results(
        "distill_memory", {"sizes": sizes, "goal": GOAL, "computed_bytes": computed, "raced": raced}
    )


if __name__ == "__main__":
    main()

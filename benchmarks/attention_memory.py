"""Peak memory of one training row by its length: our packed forward and backward beside the plain model's.

The plain model is transformers' with SDPA attention, without a mask. Then rows that share their prompt, all
in one micro-batch. Each in a process of its own; counted is what comes on top of weights, their gradients and
inputs. The model is narrow, with one KV head, so that attention is what is seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from benchmarks import harness
from benchmarks.distill_memory import above_inputs
from benchmarks.harness import Channel, Contender, Measured
from practicum.dataplane.ragged import Ragged
from practicum.learning.packed_model import PackedModel
from practicum.learning.packing import RowSpans
from practicum.models.load_model import ready
from practicum.recipe.schema.recipe import Train

LENGTHS = (2048, 4096, 8192, 16_384)
SHARED = (4096, 256, 8)
"""Tokens of a prompt and of each of its responses, and how many there are."""
GOAL, GROWTH_GOAL = 1.3, 1.1
VOCAB, WIDTH, HEADS = 64, 256, 8


def make_model(attention: str | None = None) -> PreTrainedModel:
    """2 layers, 8 heads, 1 KV head, float32."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        head_dim=WIDTH // HEADS,
        max_position_embeddings=2 * max(LENGTHS),
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()


def tokens(count: int) -> torch.Tensor:
    """Some tokens."""
    return (torch.arange(count) * 7) % VOCAB


def practicum(channel: Channel, prompt: int, response: int, rows: int) -> None:
    """The learner's forward and backward of rows that share a prompt, in one micro-batch."""
    model = PackedModel(ready(make_model(), torch.device("cpu")), Train())

    def run(prompt: int = prompt, response: int = response) -> None:
        prompts = Ragged.from_rows([tokens(prompt)] * rows)
        responses = Ragged.from_rows([tokens(response + 1)] * rows)
        packed = RowSpans(prompts, responses).pack(range(rows))
        model.hidden(packed).square().mean().backward()

    run(4, 4)  # makes gradients, and what libraries keep
    channel.serve(lambda _: above_inputs(run))


def plain(channel: Channel, prompt: int, response: int, rows: int) -> None:
    """The model's own forward and backward of a batch."""
    model = make_model("sdpa")

    def run(length: int = prompt + response) -> None:
        ids = tokens(length).expand(rows, -1)
        model.base_model(input_ids=ids, use_cache=False).last_hidden_state.square().mean().backward()

    run(8)
    channel.serve(lambda _: above_inputs(run))


def measure(prompt: int, response: int, rows: int) -> dict[str, Measured]:
    """Both, one after the other."""
    options = {"prompt": prompt, "response": response, "rows": rows}
    found = {}
    for name in ("practicum", "plain"):
        contender = Contender(name, f"benchmarks.attention_memory:{name}", options)
        found[name] = harness.race([contender], rounds=1, warmup=0)[name][0]
    return found


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """Of growth between the first and the last point: 1 is linear."""
    (small, less), (large, more) = points[0], points[-1]
    return math.log(more / less) / math.log(large / small)


def main() -> None:
    """Measure, print ratios, write the numbers."""
    found = {f"one row of {length:,}": measure(length - 32, 32, 1) for length in LENGTHS}
    prompt, response, rows = SHARED
    found[f"{rows} rows of {response:,} after a prompt of {prompt:,}"] = measure(*SHARED)
    grows = {
        name: exponent(
            [(length, one[name]["bytes"]) for length, one in zip(LENGTHS, found.values(), strict=False)]
        )
        for name in ("practicum", "plain")
    }
    for title, both in found.items():
        ratio = both["practicum"]["bytes"] / both["plain"]["bytes"]
        told = ", ".join(f"{name} {one['bytes'] / 1e6:.0f} MB" for name, one in both.items())
        print(f"  {title}: {told}, ratio {ratio:.2f} (goal {GOAL})")
    print(f"  exponents of growth: {grows} (goal {GROWTH_GOAL})")
    goals = {"goal": GOAL, "growth_goal": GROWTH_GOAL}
    harness.write_results("attention_memory", {"measured": found, "exponents": grows, **goals})


if __name__ == "__main__":
    main()

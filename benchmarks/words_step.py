"""A GRPO step in another setting: another architecture, a BPE tokenizer, rows of a JSONL file and a reward
function of one's own, by a recipe file as `practicum train` reads it; beside TRL's GRPOTrainer.

The task is to write 3 to 6 words in the order of the alphabet. 32 prompts × 8 samples, one optimizer step.
`python -m benchmarks.words_step [THREADS …]` races at these threads, or at all; results of others are kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from benchmarks import trl_peer
from benchmarks.harness import Channel
from benchmarks.model import CACHE, ROWS, save, teach
from benchmarks.stepping import Steps, mean
from practicum.recipe.load_recipe import load_recipe
from practicum.rewards.reward_functions import RewardSample
from practicum.tasks.procedural import Example

_FOOD = (
    "apple banana barley cherry clover damson dill elder endive fennel fig ginger grape hazel hops iris "
    "juniper kiwi lemon lime mango mint nutmeg olive onion papaya parsley quince radish raisin sage sorrel "
    "thyme tomato umbra vanilla vetch walnut yam zucchini"
)
WORDS = tuple(_FOOD.split())
COUNTS = (3, 6)
VOCABULARY, WIDTH, LAYERS = 160, 256, 6
FILE_ROWS, TAUGHT_STEPS = 4096, 160
PROMPTS, SAMPLES, MAX_NEW, LR = 32, 8, 40, 1e-5
ROUNDS, BLOCK = {1: 4, 2: 3}, 2
"""Rounds by threads, and the steps that a contender takes in one turn."""


def example(seed: int, number: int) -> Example:
    """One task; a function of the arguments."""
    random = Random(f"{seed} {number}")
    words = random.sample(WORDS, random.randint(*COUNTS))
    return Example(f"In order: {', '.join(words)} ->", f" {', '.join(sorted(words))}")


def in_place(answer: str, expected: str) -> float:
    """Share of the words that stand where they belong."""
    words, right = answer.strip().split(", "), expected.strip().split(", ")
    return sum(a == b for a, b in zip(words, right, strict=False)) / max(len(words), len(right))


def reward(sample: RewardSample) -> float:
    """As a recipe calls it."""
    return in_place(sample.response_text, str(sample.answer))


def folder(taught: int = TAUGHT_STEPS) -> Path:
    """The taught model with its tokenizer, and the file of rows; made on first use, then kept."""
    path = CACHE / f"words-{WIDTH}-{LAYERS}-{taught}"
    if not (path / "model.safetensors").exists():
        path.mkdir(parents=True, exist_ok=True)
        drawn = [example(1, number) for number in range(FILE_ROWS)]
        lines = (json.dumps({"prompt": e.prompt, "answer": e.answer}) for e in drawn)
        (path / "rows.jsonl").write_text("\n".join(lines) + "\n")
        tokenizer = _make_tokenizer([e.prompt + e.answer for e in drawn])
        save(path, teach(_make_model(tokenizer), tokenizer, _demonstrations, taught), tokenizer)
    return path


def _demonstrations(step: int) -> list[Example]:
    return [example(0, step * ROWS + i) for i in range(ROWS)]


def _make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    specials = ["<pad>", "<eos>"]
    alphabet = sorted({character for text in texts for character in text.replace(" ", "Ġ")})
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def _make_model(tokenizer: Any) -> Any:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=704,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def practicum(channel: Channel, taught: int, prompts: int, threads: int) -> None:
    """The step of `practicum train`, all run-time checks on."""
    made = folder(taught)
    written = {
        "name": "words",
        "model": {"path": str(made)},
        "tasks": {"words": {"file": str(made / "rows.jsonl")}},
        "reward": {"functions": [{"use": "benchmarks.words_step:reward"}]},
        "algorithm": {"advantage": "grpo", "loss": "ppo_clip", "aggregation": "token_mean"},
        "rollout": {"samples": SAMPLES, "max_new_tokens": MAX_NEW},
        "train": {"prompts": prompts, "lr": LR, "steps": 1000},
        "runtime": {"threads": threads},
    }
    path = made / "recipe.yaml"
    path.write_text(yaml.safe_dump(written))
    with Steps(load_recipe(path).recipe) as steps:
        channel.serve(lambda turn: mean([steps.step() for _ in range(BLOCK)]))


def trl(channel: Channel, taught: int, prompts: int, threads: int) -> None:
    """GRPOTrainer on the same rows."""
    made = folder(taught)
    rows = [json.loads(line) for line in (made / "rows.jsonl").read_text().splitlines()]
    settings = trl_peer.settings(prompts * SAMPLES, MAX_NEW, LR)
    trl_peer.train_grpo(channel, threads, BLOCK, made, rows, settings, SAMPLES, in_place)


def main(threads: Sequence[int], *, quick: bool = False) -> None:
    """Race at these threads, and add to the results; quick: a small setting that shows that all works."""
    taught, prompts = (2, 2) if quick else (TAUGHT_STEPS, PROMPTS)
    folder(taught)
    settings = {"samples": SAMPLES, "max_new_tokens": MAX_NEW, "lr": LR, "steps_per_round": BLOCK}
    rounds = {count: 1 if quick else ROUNDS[count] for count in threads}
    module, kept = "benchmarks.words_step", {} if quick else settings
    trl_peer.race("words_step", module, rounds, kept, taught=taught, prompts=prompts)


if __name__ == "__main__":
    chosen = [int(word) for word in sys.argv[1:] if word != "--quick"]
    main(chosen or [*ROUNDS], quick="--quick" in sys.argv)

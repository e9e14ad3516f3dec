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

from benchmarks import harness, trl_peer
from benchmarks.harness import Channel, Contender, Measured
from benchmarks.model import CACHE, ROWS, teach
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
        model = teach(_make_model(tokenizer), tokenizer, _demonstrations, taught)
        tokenizer.save_pretrained(path)
        model.save_pretrained(path)
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
    """GRPOTrainer, whose loop waits in a callback for its turn."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(threads)
    made = folder(taught)
    rows = [json.loads(line) for line in (made / "rows.jsonl").read_text().splitlines()]
    counted: list[Measured] = []

    def rewarded(
        completions: list[str], completion_ids: list[list[int]], answer: list[str], **row: Any
    ) -> list[float]:
        rewards = [in_place(c, a) for c, a in zip(completions, answer, strict=True)]
        tokens = sum(len(ids) for ids in completion_ids)
        counted.append({"tokens": tokens, "mean_reward": sum(rewards) / len(rewards)})
        return rewards

    shared = trl_peer.settings(prompts * SAMPLES, MAX_NEW, LR)
    options = {"num_generations": SAMPLES, "beta": 0.0, "epsilon": 0.2, "loss_type": "dapo"}
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32),
        reward_funcs=rewarded,
        args=GRPOConfig(**shared, **options, num_iterations=1),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(made, padding_side="left"),
        callbacks=[trl_peer.make_turns(channel, BLOCK, counted)],
    )
    trainer.train()


def main(threads: Sequence[int], *, quick: bool = False) -> None:
    """Race at these threads, and add to the results; quick: a small setting that shows that all works."""
    taught, prompts = (2, 2) if quick else (TAUGHT_STEPS, PROMPTS)
    folder(taught)
    path = harness.RESULTS / "words_step.json"
    raced = json.loads(path.read_text())["raced"] if path.is_file() else {}
    options = {"taught": taught, "prompts": prompts}
    for count in threads:
        title = "1 thread" if count == 1 else f"{count} threads"
        print(f"GRPO step on words, {title}")
        contenders = [
            Contender(name, f"benchmarks.words_step:{name}", options | {"threads": count}, count)
            for name in ("practicum", "trl")
        ]
        raced[title] = harness.race(contenders, 1 if quick else ROUNDS[count])
    settings = {
        **options,
        "samples": SAMPLES,
        "max_new_tokens": MAX_NEW,
        "lr": LR,
        "trl_microbatch_rows": trl_peer.MICROBATCH,
        "rounds": ROUNDS,
        "steps_per_round": BLOCK,
    }
    if not quick:
        harness.write_results("words_step", {"settings": settings, "raced": raced})


if __name__ == "__main__":
    chosen = [int(word) for word in sys.argv[1:] if word != "--quick"]
    main(chosen or [*ROUNDS], quick="--quick" in sys.argv)

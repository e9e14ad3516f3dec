"""A whole GRPO step: practicum beside TRL's GRPOTrainer, same model, task, batch and optimizer.

32 prompts of sorting × 8 samples, at most 32 new tokens, one optimizer step per batch, no KL.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import harness, plots, trl_peer
from benchmarks.harness import Channel, Contender, Measured
from benchmarks.model import DIGITS, examples, model_folder
from benchmarks.stepping import Steps, make_recipe, mean

PROMPTS, SAMPLES, MAX_NEW, LR = 32, 8, 32, 1e-5
ROUNDS, BLOCK = {1: 3, 2: 3}, 2
"""Rounds by threads, and the steps that a contender takes in one turn."""


def practicum(channel: Channel, threads: int, hybrid: bool = False) -> None:
    """The step of `practicum train`, all run-time checks on."""
    recipe = make_recipe(
        "grpo_step",
        prompts=PROMPTS,
        samples=SAMPLES,
        max_new_tokens=MAX_NEW,
        digits=DIGITS,
        lr=LR,
        threads=threads,
        hybrid=hybrid,
    )
    with Steps(recipe) as steps:
        channel.serve(lambda turn: mean([steps.step() for _ in range(BLOCK)]))


def trl(channel: Channel, threads: int, hybrid: bool = False) -> None:
    """GRPOTrainer, whose loop waits in a callback for its turn."""
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(threads)
    folder = model_folder(hybrid=hybrid)
    drawn = examples(2, 0, 4096, DIGITS)
    rows = {"prompt": [e.prompt for e in drawn], "answer": [e.answer for e in drawn]}
    counted: list[Measured] = []

    # The reward function sees all answers, so it is also where tokens and rewards are counted.
    def is_sorted(
        completions: list[str], completion_ids: list[list[int]], answer: list[str], **row: Any
    ) -> list[float]:
        rewards = [float(c.strip() == a) for c, a in zip(completions, answer, strict=True)]
        tokens = sum(len(ids) for ids in completion_ids)
        counted.append({"tokens": tokens, "mean_reward": sum(rewards) / len(rewards)})
        return rewards

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=is_sorted,
        args=_trl_config(),
        train_dataset=Dataset.from_dict(rows),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        callbacks=[trl_peer.make_turns(channel, BLOCK, counted)],
    )
    trainer.train()


def _trl_config() -> Any:
    from trl import GRPOConfig  # pyright: ignore[reportMissingImports]

    return GRPOConfig(
        **trl_peer.settings(PROMPTS * SAMPLES, MAX_NEW, LR),
        num_generations=SAMPLES,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",  # the mean over all tokens of the batch
        num_iterations=1,
    )


def main() -> None:
    """Race at one and at two threads, and write the results."""
    plots.bars(race("grpo_step", ROUNDS), "seconds", "seconds per GRPO step", "grpo_step")


def race(name: str, rounds: Mapping[int, int], **options: Any) -> dict[str, Any]:
    """Race at as many threads as `rounds` has keys for, and write the results."""
    model_folder(**options)
    found: dict[str, Any] = {}
    for threads, count in rounds.items():
        print(f"{name}, {threads} thread(s)")
        contenders = [
            Contender(side, f"benchmarks.grpo_step:{side}", {"threads": threads, **options}, threads)
            for side in ("practicum", "trl")
        ]
        found["1 thread" if threads == 1 else f"{threads} threads"] = harness.race(contenders, count)
    harness.write_results(name, {"settings": {**settings(), "rounds": rounds, **options}, "raced": found})
    return found


def settings() -> dict[str, Any]:
    """What was compared."""
    return {
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "max_new_tokens": MAX_NEW,
        "digits": DIGITS,
        "lr": LR,
        "trl_microbatch_rows": trl_peer.MICROBATCH,
        "steps_per_round": BLOCK,
    }


if __name__ == "__main__":
    main()

"""What TRL's trainers have in common here: their settings, and a loop that waits for its turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Channel, Contender, Measured, Stopwatch
from benchmarks.model import CACHE
from benchmarks.stepping import mean

MICROBATCH = 64
"""Rows of TRL's forward and backward passes, with one generation and one optimizer step per batch
whatever it is. Tried with GRPO were 16, 32, 64 and 256: smaller ones are up to a tenth faster than 256."""
STEPS = 1000
"""More than will be taken."""


def settings(rows: int, max_new_tokens: int, lr: float) -> dict[str, Any]:
    """Arguments of the trainers' configs, so that a step is what practicum's is by default."""
    micro = min(MICROBATCH, rows)
    assert rows % micro == 0, f"{rows} rows do not divide into micro-batches of {micro}"
    return {
        "output_dir": str(CACHE / "trl"),
        "use_cpu": True,
        "bf16": False,  # its default is bfloat16, which is slower on this processor
        "gradient_checkpointing": False,  # its default is on, which trades time for memory
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": rows // micro,
        "max_completion_length": max_new_tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "learning_rate": lr,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "max_grad_norm": 1.0,
        "max_steps": STEPS,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 0,
    }


def make_turns(
    channel: Channel, block: int, counted: list[Measured], at_end: Callable[[], Measured] = dict
) -> Any:
    """A callback that lets a trainer take `block` steps per turn.

    Each generation of the trainer must add its numbers to `counted`. A turn's answer has their means, and
    what `at_end` finds after the time is taken.
    """
    from transformers import TrainerCallback

    class Turns(TrainerCallback):
        left, watch = 0, Stopwatch()

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            channel.ready()

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.left == 0:
                if channel.next_turn() is None:
                    raise SystemExit
                counted.clear()
                self.left, self.watch = block, Stopwatch()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.left -= 1
            if self.left == 0:
                spent = {name: value / block for name, value in self.watch.read().items()}
                assert len(counted) == block, "one generation per optimizer step"
                found = mean(counted)
                channel.answer({**spent, **found, **at_end()})

    return Turns()


def race(
    name: str, module: str, rounds: Mapping[int, int], settings: Mapping[str, Any], **options: Any
) -> dict[str, Any]:
    """Race a module's `practicum` and `trl` at each number of threads, and add to results/<name>.json, unless
    `settings` are empty."""
    raced = harness.stored(name)
    for threads, count in rounds.items():
        title = "1 thread" if threads == 1 else f"{threads} threads"
        print(f"{name}, {title}")
        contenders = [
            Contender(side, f"{module}:{side}", {**options, "threads": threads}, threads)
            for side in ("practicum", "trl")
        ]
        raced[title] = harness.race(contenders, count)
    if settings:
        written = {**settings, **options, "rounds": rounds, "trl_microbatch_rows": MICROBATCH}
        harness.write_results(name, {"settings": written, "raced": raced})
    return raced


def train_grpo(
    channel: Channel,
    threads: int,
    block: int,
    folder: Path,
    rows: list[dict[str, str]],
    settings: dict[str, Any],
    samples: int,
    score: Callable[[str, str], float],
) -> None:
    """Run GRPOTrainer in turns; `score` judges an answer by the expected one."""
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(threads)
    counted: list[Measured] = []

    # The reward function sees all answers, so it is also where tokens and rewards are counted.
    def reward(
        completions: list[str], completion_ids: list[list[int]], answer: list[str], **row: Any
    ) -> list[float]:
        rewards = [score(c, a) for c, a in zip(completions, answer, strict=True)]
        tokens = sum(len(ids) for ids in completion_ids)
        counted.append({"tokens": tokens, "mean_reward": sum(rewards) / len(rewards)})
        return rewards

    # dapo: the mean over all tokens of the batch.
    options = {"num_generations": samples, "beta": 0.0, "epsilon": 0.2, "loss_type": "dapo"}
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(**settings, **options, num_iterations=1),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        callbacks=[make_turns(channel, block, counted)],
    )
    trainer.train()

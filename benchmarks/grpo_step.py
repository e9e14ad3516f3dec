"""A whole GRPO step: practicum beside TRL's GRPOTrainer, same model, task, batch and optimizer.

32 prompts of sorting × 8 samples, at most 32 new tokens, one optimizer step per batch, no KL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import harness, plots
from benchmarks.harness import Channel, Contender, Measured, Stopwatch
from benchmarks.model import CACHE, DIGITS, examples, model_folder
from benchmarks.stepping import Steps, make_recipe

PROMPTS, SAMPLES, MAX_NEW, LR = 32, 8, 32, 1e-5
MICROBATCH = 64
"""Rows of TRL's forward and backward passes, with one generation and one optimizer step per batch
whatever it is. Tried were 16, 32, 64 and 256: smaller ones are up to a tenth faster than 256."""
ROUNDS, BLOCK = {1: 5}, 2
"""Rounds by threads, and the steps that a contender takes in one turn."""
STEPS = 1000
"""More than will be taken."""


def practicum(channel: Channel, threads: int) -> None:
    """The step of `practicum train`, all run-time checks on."""
    recipe = make_recipe(
        "grpo_step",
        prompts=PROMPTS,
        samples=SAMPLES,
        max_new_tokens=MAX_NEW,
        digits=DIGITS,
        lr=LR,
        threads=threads,
    )
    with Steps(recipe) as steps:
        channel.serve(lambda turn: _mean([steps.step() for _ in range(BLOCK)]))


def trl(channel: Channel, threads: int) -> None:
    """GRPOTrainer, whose loop waits in a callback for its turn."""
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(threads)
    folder = model_folder()
    drawn = examples(2, 0, 4096, DIGITS)
    rows = {"prompt": [e.prompt for e in drawn], "answer": [e.answer for e in drawn]}
    turns, is_sorted = _turns_and_reward(channel)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=is_sorted,
        args=_trl_config(),
        train_dataset=Dataset.from_dict(rows),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        callbacks=[turns],
    )
    trainer.train()


def _trl_config() -> Any:
    from trl import GRPOConfig  # pyright: ignore[reportMissingImports]

    return GRPOConfig(
        output_dir=str(CACHE / "trl"),
        use_cpu=True,
        bf16=False,  # its default is bfloat16, which is slower on this processor
        gradient_checkpointing=False,  # its default is on, which trades time for memory
        per_device_train_batch_size=MICROBATCH,
        gradient_accumulation_steps=PROMPTS * SAMPLES // MICROBATCH,
        num_generations=SAMPLES,
        max_completion_length=MAX_NEW,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",  # the mean over all tokens of the batch
        num_iterations=1,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        max_grad_norm=1.0,
        max_steps=STEPS,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
    )


def _turns_and_reward(channel: Channel) -> tuple[Any, Callable[..., list[float]]]:
    """A callback that lets the trainer take a block of steps per turn, and the reward function.

    The reward function sees all answers, so it is also where tokens and rewards are counted.
    """
    from transformers import TrainerCallback

    counted: list[Measured] = []

    def is_sorted(
        completions: list[str], completion_ids: list[list[int]], answer: list[str], **row: Any
    ) -> list[float]:
        rewards = [float(c.strip() == a) for c, a in zip(completions, answer, strict=True)]
        tokens = sum(len(ids) for ids in completion_ids)
        counted.append({"tokens": tokens, "mean_reward": sum(rewards) / len(rewards)})
        return rewards

    class Turns(TrainerCallback):
        left, watch = 0, Stopwatch()

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            channel.ready()

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.left == 0:
                if channel.next_turn() is None:
                    raise SystemExit
                counted.clear()
                self.left, self.watch = BLOCK, Stopwatch()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.left -= 1
            if self.left == 0:
                spent = {name: value / BLOCK for name, value in self.watch.read().items()}
                assert len(counted) == BLOCK, "one generation per optimizer step"
                channel.answer({**spent, **_mean(counted)})

    return Turns(), is_sorted


def _mean(steps: list[Measured]) -> Measured:
    return {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}


def main() -> None:
    """Race at one and at two threads, and write the results."""
    model_folder()
    found: dict[str, Any] = {}
    for threads, rounds in ROUNDS.items():
        print(f"GRPO step, {threads} thread(s)")
        contenders = [
            Contender(name, f"benchmarks.grpo_step:{name}", {"threads": threads}, threads)
            for name in ("practicum", "trl")
        ]
        found["1 thread" if threads == 1 else f"{threads} threads"] = harness.race(contenders, rounds)
    harness.write_results("grpo_step", {"settings": settings(), "raced": found})
    plots.bars(found, "seconds", "seconds per GRPO step", "grpo_step")


def settings() -> dict[str, Any]:
    """What was compared."""
    return {
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "max_new_tokens": MAX_NEW,
        "digits": DIGITS,
        "lr": LR,
        "trl_microbatch_rows": MICROBATCH,
        "rounds": ROUNDS,
        "steps_per_round": BLOCK,
    }


if __name__ == "__main__":
    main()

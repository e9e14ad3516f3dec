"""What TRL's trainers have in common here: their settings, and a loop that waits for its turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.harness import Channel, Measured, Stopwatch
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

"""How practicum's time per step grows with the batch (×1, ×4, ×16) and the response (×1, ×4).

×1 is 32 prompts × 8 samples. In the batch series answers stop by themselves (at most 32 tokens); in
the response series there are no stop tokens, so that every answer has exactly 32 or 128 tokens. No such
answer is right, and where all rewards are equal there is nothing to learn: they get a made-up reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks import harness, plots
from benchmarks.harness import Channel, Contender, Measured, medians
from benchmarks.model import DIGITS, model_folder
from benchmarks.stepping import Steps, make_recipe
from practicum.tasks.scorers import RewardSample

PROMPTS, SAMPLES, LR = 32, 8, 1e-5
LENGTH = 32
BATCH, RESPONSE = (1, 4, 16), (1, 4)
ROUNDS, THREADS = 3, 1


def stepper(channel: Channel, batch: int, response: int, stops: bool) -> None:
    """Steps of the GRPO recipe with so many times the prompts and the response length."""
    recipe = make_recipe(
        f"growth-{batch}-{response}",
        prompts=PROMPTS * batch,
        samples=SAMPLES,
        max_new_tokens=LENGTH * response,
        digits=DIGITS,
        lr=LR,
        threads=THREADS,
        reward="checker" if stops else "benchmarks.growth:is_even",
    )
    with Steps(recipe, stops=stops) as steps:
        channel.serve(lambda turn: steps.step())


def is_even(samples: Sequence[RewardSample]) -> list[float]:
    """A reward that differs within every group: whether the answer's characters add up to even."""
    return [float(sum(map(ord, sample.response_text)) % 2 == 0) for sample in samples]


def contender(batch: int, response: int, stops: bool) -> Contender:
    """One size of step."""
    name = f"batch ×{batch}" if stops else f"response ×{response}"
    options = {"batch": batch, "response": response, "stops": stops}
    return Contender(name, "benchmarks.growth:stepper", options, THREADS)


def exponent(points: list[tuple[float, Measured]], name: str) -> float:
    """The p of time ~ size^p from the first to the last size; 1 is linear growth."""
    (small, first), (large, last) = points[0], points[-1]
    return math.log(last[name] / first[name]) / math.log(large / small)


def main() -> None:
    """Step all sizes in turn, and write the results."""
    model_folder()
    print(f"growth, {THREADS} thread")
    by_batch = [contender(size, 1, True) for size in BATCH]
    by_response = [contender(1, size, False) for size in RESPONSE]
    found = harness.race([*by_batch, *by_response], ROUNDS)
    points = {
        "batch": [(float(size), medians(found[one.name])) for size, one in zip(BATCH, by_batch, strict=True)],
        "response": [
            (float(size), medians(found[one.name])) for size, one in zip(RESPONSE, by_response, strict=True)
        ],
    }
    exponents = {
        title: {name: exponent(series, name) for name in ("seconds", "rollout", "update_student")}
        for title, series in points.items()
    }
    content: dict[str, Any] = {
        "settings": settings(),
        "rounds": found,
        "medians": points,
        "exponents": exponents,
    }
    harness.write_results("growth", content)
    plots.growth(points, "growth")


def settings() -> dict[str, Any]:
    """What was measured."""
    return {
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "max_new_tokens": LENGTH,
        "batch": BATCH,
        "response": RESPONSE,
        "threads": THREADS,
        "rounds": ROUNDS,
    }


if __name__ == "__main__":
    main()

"""How much of a streamed teacher's scoring is hidden behind the rollout.

The teacher is a process of its own with one thread, the student has another, on two cores. Teachers of a few
depths take part, because what scoring costs beside the rollout is the machine's to say; the goal is for one
that costs about half. A colocated teacher shows what the same step takes when nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import harness
from benchmarks.harness import Channel, Contender, Measured, medians
from benchmarks.model import DIGITS, model_folder, random_folder
from benchmarks.stepping import Steps, make_distillation

PROMPTS, SAMPLES, MAX_NEW = 32, 8, 32
LR = 1e-9
"""Too little to change the student: every round is the same rollout."""
WIDTH, LAYERS = 256, (2, 3, 4)
ROUNDS = 4
GOAL, GOAL_RATIO = 0.8, 0.5
"""Share to be hidden, with scoring at this ratio to the rollout."""


def stepper(channel: Channel, prompts: int, layers: int, own: bool) -> None:
    """Steps with a teacher of so many layers."""
    placement: Any = {"own": {"replicas": 1, "threads": 1}} if own else "colocated"
    recipe = make_distillation(
        f"overlap-{layers}-{own}",
        {"teacher": {"model": str(random_folder(WIDTH, layers)), "placement": placement}},
        prompts=prompts,
        samples=SAMPLES,
        max_new_tokens=MAX_NEW,
        digits=DIGITS,
        lr=LR,
    )
    with Steps(recipe) as steps:
        channel.serve(lambda turn: with_ratio(steps.step()))


def with_ratio(step: Measured) -> Measured:
    """The step with `sampling`, the rollout without its wait for the teacher, and scoring's ratio to it."""
    waited = (1.0 - step.get("hidden", 1.0)) * step["scoring"]
    sampling = step["rollout"] - waited
    return step | {"sampling": sampling, "ratio": step["scoring"] / sampling}


def nearest(raced: Mapping[str, Sequence[Measured]]) -> str:
    """The streamed contender whose scoring is nearest to the goal's ratio."""
    streamed = [name for name, rounds in raced.items() if "hidden" in rounds[0]]
    return min(streamed, key=lambda name: abs(medians(raced[name])["ratio"] - GOAL_RATIO))


def contender(layers: int, own: bool, prompts: int) -> Contender:
    """One teacher in one place."""
    name = f"{layers} layers, {'own process' if own else 'colocated'}"
    options = {"prompts": prompts, "layers": layers, "own": own}
    return Contender(name, "benchmarks.teacher_overlap:stepper", options)


def main(rounds: int = ROUNDS, prompts: int = PROMPTS, depths: Sequence[int] = LAYERS) -> None:
    """Step with each teacher in turn, and write the results."""
    model_folder()
    print("overlap of scoring and rollout, student 1 thread, teacher 1 thread")
    middle = depths[len(depths) // 2]
    contenders = [contender(layers, True, prompts) for layers in depths]
    raced = harness.race([*contenders, contender(middle, False, prompts)], rounds)
    chosen = nearest(raced)
    mid = medians(raced[chosen])
    print(f"  {chosen}: scoring is {mid['ratio']:.2f} of the rollout, {mid['hidden']:.0%} of it hidden")
    settings = {
        "prompts": prompts,
        "samples": SAMPLES,
        "max_new_tokens": MAX_NEW,
        "digits": DIGITS,
        "width": WIDTH,
        "layers": depths,
        "rounds": rounds,
    }
    content = {"settings": settings, "goal": GOAL, "nearest_to_half": chosen, "raced": raced}
    harness.write_results("teacher_overlap", content)


if __name__ == "__main__":
    main()

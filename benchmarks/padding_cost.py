"""What padding rows cost: the same training step with them and without.

1,030 rows in optimizer steps of 256: 250 padding rows fill them up. Which real rows are learnt from together
does not depend on padding, so a step that leaves it out computes the same to the bit; that is checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks import harness
from benchmarks.harness import Channel, Contender, Measured, medians, paired_ratio
from benchmarks.model import model_folder
from benchmarks.stepping import Steps, make_recipe
from practicum.roles import padding as padding_module

PROMPTS, SAMPLES, MINIBATCH = 103, 10, 256
DIGITS, MAX_NEW, LR = (6, 8), 12, 1e-5
"""Short answers: the less a real row costs, the more does padding beside it."""
ROUNDS = 4
GOAL = 0.01
"""Most that padding may add to a step."""
PADDED, BARE = "with padding", "without"
SAME = ("tokens", "mean_reward", "gradient")
"""What must not depend on padding."""


def stepper(channel: Channel, prompts: int, padded: bool) -> None:
    """Steps of the GRPO recipe; without padding, every batch counts as full."""
    recipe = make_recipe(
        f"padding-{padded}",
        prompts=prompts,
        samples=SAMPLES,
        max_new_tokens=MAX_NEW,
        digits=DIGITS,
        lr=LR,
        threads=1,
        minibatch_rows=MINIBATCH,
    )
    if not padded:
        padding_module.padding_rows_needed = lambda recipe, batch, step, ranks: 0
    with Steps(recipe) as steps:
        channel.serve(lambda turn: {"pad": 0.0} | steps.step())


def check_same(raced: Mapping[str, Sequence[Measured]]) -> None:
    """A ValueError if the two did not learn the same, or did not differ in padding."""
    for mine, theirs in zip(raced[PADDED], raced[BARE], strict=True):
        told = [(name, mine[name], theirs[name]) for name in SAME if mine[name] != theirs[name]]
        if told:
            raise ValueError(f"padding changed the step: {told}")
        if theirs["padding_rows"] or not mine["padding_rows"]:
            raise ValueError(f"padding rows: {mine['padding_rows']:g} and {theirs['padding_rows']:g}")


def main(rounds: int = ROUNDS, prompts: int = PROMPTS) -> None:
    """Step with and without in turn, and write the results."""
    model_folder()
    print("training steps with and without padding rows, 1 thread")
    contenders = [
        Contender(name, "benchmarks.padding_cost:stepper", {"prompts": prompts, "padded": padded})
        for name, padded in ((PADDED, True), (BARE, False))
    ]
    raced = harness.race(contenders, rounds)
    check_same(raced)
    mid = medians(raced[PADDED])
    ratio, least, most = paired_ratio(raced[PADDED], raced[BARE], "seconds")
    print(
        f"  {mid['padding_rows']:g} padding rows take {1e3 * mid['pad']:.1f} ms of {mid['seconds']:.2f} s "
        f"({mid['pad'] / mid['seconds']:.2%}); the step takes {ratio:.3f} of the time without "
        f"({least:.3f} to {most:.3f})"
    )
    settings = {
        "rows": prompts * SAMPLES,
        "minibatch_rows": MINIBATCH,
        "digits": DIGITS,
        "max_new_tokens": MAX_NEW,
        "rounds": rounds,
    }
    content = {"settings": settings, "goal": GOAL, "raced": {"1 thread": raced}}
    harness.write_results("padding_cost", content)


if __name__ == "__main__":
    main()

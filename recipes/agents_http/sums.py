"""Sums of two numbers, and single turns of two agents that use a calculator for them.

`python sums.py FOLDER` writes a tokenizer with the characters of their tools' names.
"""

from __future__ import annotations

import string
import sys

from practicum.models.tokenizer import make_tokenizer
from practicum.tasks.draws import Draws
from practicum.tasks.procedural import Example, Option, Procedural, Settings

DIRECT = Option(50, 0, 100, "Percent of demonstrations that guess the answer in place of calculating.")
LAYOUTS = (("{}", "|{}|"), ("You calculate.|New task:\n{}|", "|Observation:\n{}|"))
"""How openai-agents and smolagents write the task and a tool's result after each other."""


def _terms(draws: Draws) -> tuple[int, int]:
    return draws.between(1, 9), draws.between(1, 9)


def _make_sum(draws: Draws, settings: Settings) -> Example:
    a, b = _terms(draws)
    return Example(f"{a}+{b}=", str(a + b))


def _make_turn(draws: Draws, settings: Settings) -> Example:
    """Return a turn that agents take: all text before it is the prompt, and the turn is the answer."""
    a, b = _terms(draws)
    task, result = draws.choice(LAYOUTS)
    before, call = task.format(f"{a}+{b}="), f"[calculator: {a}+{b}]"
    if draws.below(2):
        return Example(f"{before}{call}<eos>{result.format(a + b)}", f"[final_answer: {a + b}]")
    if draws.below(100) < settings.whole("direct"):
        return Example(before, f"[final_answer: {draws.between(2, 18)}]")
    return Example(before, call)


SUMS = Procedural("sums", "Add two numbers of one digit.", {}, _make_sum)
TURNS = Procedural("turns", "One turn of an agent that adds.", {"direct": DIRECT}, _make_turn)

if __name__ == "__main__":
    make_tokenizer(string.printable).save_pretrained(sys.argv[1])

"""What it costs that a token's bits do not depend on its batch: the same rollouts by the torch engine with
the rules of `models/batch_invariance.py`, and without any padding.

Both sample the same requests, with random weights and given lengths. Without the rules logprobs differ in
their last bits, which is checked.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import ModuleType
from typing import Any

import torch

from benchmarks import harness
from benchmarks.harness import Channel, Contender, Measured, Stopwatch
from benchmarks.model import make_random_model
from practicum.engines.protocol import Counter, GenerateRequest, Generation, Sampling
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.models.load_model import ready
from practicum.models.tokenizer import make_tokenizer

RULED, BARE = "with the rules", "without"
GOAL = 0.05
"""Most that they may add to a rollout's processor time."""
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts, samples of each, tokens of a prompt and of an answer (least and most)."""

    prompts: int
    samples: int
    prompt_tokens: tuple[int, int]
    new_tokens: tuple[int, int]


CASES = {
    "32 × 8 short answers": Case(32, 8, (16, 24), (8, 24)),
    "3 rows": Case(3, 1, (16, 24), (96, 96)),
    "middle lengths, 210 to 310": Case(8, 8, (205, 215), (60, 95)),
}


def drop_rules() -> None:
    """Take the padding of rows and keys out of every module of this process."""
    bare: dict[str, Any] = {
        "ROWS": 1,
        "padded_rows": lambda count: count,
        "padded_tokens": lambda count, width: count,
        "padded_keys": lambda count: count,
    }
    for module in [m for name, m in sys.modules.items() if name.startswith("practicum.")]:
        assert isinstance(module, ModuleType)
        for name, value in bare.items():
            if name in vars(module):
                setattr(module, name, value)


def sampler(channel: Channel, ruled: bool) -> None:
    """All cases in each turn: processor seconds of each, and a sum of all logprobs."""
    tokenizer = make_tokenizer()
    model = ready(make_random_model(tokenizer), torch.device("cpu"))
    model.config.max_position_embeddings = 512
    if not ruled:
        drop_rules()
    engine = TorchEngine(model, slots=256, context=512, repeatable=False)

    def run(turn: int) -> Measured:
        found: Measured = {"seconds": 0.0, "cpu_seconds": 0.0, "logprobs": 0.0}
        for name, case in CASES.items():
            watch = Stopwatch()
            answers = _sample(engine, case, turn, len(tokenizer))
            spent = watch.read()
            found[name] = spent["cpu_seconds"]
            found["logprobs"] += sum(float(a.logprobs.double().sum()) for a in answers)
            found = found | {key: found[key] + spent[key] for key in spent}
        return found

    channel.serve(run)
    engine.close()


def _sample(engine: TorchEngine, case: Case, turn: int, vocab: int) -> list[Generation]:
    random = Random(f"{case} {turn}")

    def request(prompt: int, ids: list[int], session: int) -> GenerateRequest:
        sampling = Sampling(max_new_tokens=random.randint(*case.new_tokens), stop=frozenset())
        return GenerateRequest(ids, sampling, Counter(seed=turn, prompt=prompt, session=session))

    wanted = []
    for prompt in range(case.prompts):
        ids = [random.randrange(vocab) for _ in range(random.randint(*case.prompt_tokens))]
        wanted += [request(prompt, ids, session) for session in range(case.samples)]

    async def all_of_them() -> list[Generation]:
        return await asyncio.gather(*map(engine.generate, wanted))

    return asyncio.run(all_of_them())


def check_other(raced: Mapping[str, Sequence[Measured]]) -> None:
    """A ValueError if both computed the same bits: then nothing was taken away."""
    if all(a["logprobs"] == b["logprobs"] for a, b in zip(raced[RULED], raced[BARE], strict=True)):
        raise ValueError("without the rules, logprobs are the same bits as with them")


def main(rounds: int = ROUNDS) -> None:
    """Roll out by both in turn, and write the results."""
    print("rollouts with and without the rules of batch invariance, 1 thread")
    contenders = [
        Contender(name, "benchmarks.invariance_cost:sampler", {"ruled": name == RULED})
        for name in (RULED, BARE)
    ]
    raced = harness.race(contenders, rounds)
    check_other(raced)
    harness.write_results("invariance_cost", {"goal": GOAL, "cases": list(CASES), "raced": raced})


if __name__ == "__main__":
    main()

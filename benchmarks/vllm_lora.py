"""What a sync costs with an adapter: the adapter alone beside whole weights, torch engine and vLLM.

In the environment of vLLM's tests. vLLM's engines are also asked for a rollout: an adapter beside its base
takes more products than weights it was merged into. `--quick` has each take a turn on the smallest model, and
writes nothing.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks import harness, report_lora
from benchmarks.harness import Channel, Contender, Measured, Stopwatch
from benchmarks.model import random_folder

SIZES = {"4M": (256, 4), "31M": (512, 8), "135M": (768, 15)}
"""Width and layers by the number of parameters, as in lora_step."""
RANK, PROMPTS, SAMPLES, PROMPT_TOKENS, MAX_NEW = 8, 4, 4, 16, 16
WAYS = {"torch, adapter": ("torch", RANK), "torch, all weights": ("torch", None)}
WAYS |= {"vLLM, adapter": ("vllm", RANK), "vLLM, all weights": ("vllm", None)}
ROUNDS = 3


@contextmanager
def started(kind: str, rank: int | None, size: str) -> Iterator[Any]:
    """The roles of a run with this engine."""
    from practicum.checks.watch import Watch
    from practicum.recipe.schema.recipe import Recipe
    from practicum.roles.stage_table import make_plan
    from practicum.runtime.local import start_local

    lora = None if rank is None else {"rank": rank}
    data: dict[str, Any] = {
        "name": "sync",
        "model": {"path": str(random_folder(*SIZES[size])), "lora": lora},
        "tasks": {"sort": {"kind": "sort"}},
        "rollout": {"engine": kind, "slots": PROMPTS * SAMPLES, "max_new_tokens": MAX_NEW, "context": 64},
        "runtime": {"threads": 1},
    }
    if kind == "vllm":
        data["rollout"]["vllm"] = {"threads": 1}
    recipe = Recipe.model_validate(data)
    roles = start_local(recipe, make_plan(recipe), Watch(recipe.checks, print))
    try:
        yield roles
    finally:
        roles.close()


def syncer(channel: Channel, kind: str, rank: int | None, size: str) -> None:
    """Syncs without the probe, then a rollout.

    In one process the torch engine's tensors are the learner's and nothing is sent: it gets copies here, as
    from another process.
    """
    with started(kind, rank, size) as roles:

        def run(turn: int) -> Measured:
            roles.student.learner.version += 1
            weights, version = roles._engine_weights()
            if kind == "torch":
                weights = [(name, tensor.clone()) for name, tensor in weights]
            watch = Stopwatch()
            roles.engine.load_weights(weights, version)
            spent = watch.read()
            watch = Stopwatch()
            asyncio.run(_sample(roles.engine, turn))
            sent = sum(tensor.nbytes for _, tensor in roles._engine_weights()[0])
            return spent | {"rollout": watch.read()["seconds"], "mb": sent / 2**20}

        channel.serve(run)


async def _sample(engine: Any, turn: int) -> None:
    from practicum.engines.protocol import Counter, GenerateRequest, Sampling

    sampling = Sampling(MAX_NEW, frozenset())
    requests = [
        GenerateRequest([5 + prompt] * PROMPT_TOKENS, sampling, Counter(turn, prompt, session))
        for prompt in range(PROMPTS)
        for session in range(SAMPLES)
    ]
    await asyncio.gather(*map(engine.generate, requests))


def race(sizes: Sequence[str], rounds: int) -> dict[str, Any]:
    """All ways in turn, by size."""
    found = {}
    for size in sizes:
        print(f"sync of {size} parameters, 1 thread")
        contenders = [
            Contender(
                f"{size}, {way}",
                "benchmarks.vllm_lora:syncer",
                {"kind": kind, "rank": rank, "size": size},
            )
            for way, (kind, rank) in WAYS.items()
        ]
        found[size] = harness.race(contenders, rounds)
    settings = {"rank": RANK, "rounds": rounds, "answers": PROMPTS * SAMPLES, "max_new_tokens": MAX_NEW}
    return {"settings": settings, "raced": found}


def main() -> None:
    """Race, and write the results; or the small setting, and show its table."""
    if "--quick" in sys.argv:
        print(report_lora.vllm_lora(race(["4M"], 1) | {"machine": harness.machine()}))
    else:
        harness.write_results("vllm_lora", race(["31M", "135M"], ROUNDS))


if __name__ == "__main__":
    main()

"""The torch engine beside vLLM: rollout, scoring, weights, rest, and what a busy neighbour does to threads.

Both engines, with one thread and with two, get the same model and the same requests, in turn. Before that,
each answers greedily and scores: if the two disagree, they do not do the same work, and there is no result.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks import harness
from benchmarks.engine_work import (
    CONTEXT,
    LOADS,
    PARTS,
    PROMPT_TOKENS,
    SCORED_FROM,
    SCORED_TOKENS,
    TOP_K,
    Load,
    Work,
    agreement,
    answer_lengths,
    make_engine,
    make_model,
)
from benchmarks.harness import Channel, Contender, Measured, Stopwatch
from benchmarks.model import CACHE
from benchmarks.report_engines import TORCH, VLLM, measured

CASES = ("equal", "ragged", "score, top-0", f"score, top-{TOP_K}", "sync")
RESTS = ("sync", "sync", "rest")
"""Turns of the model that is only sent and put to sleep."""
COMPARED, RESTED = ("4M", "135M"), "31M"
ROUNDS, REST_ROUNDS, SYNC_ROUNDS = 3, 2, 7
THREADS = (1, 2)
BESIDE, BESIDE_SIZE = Load(4, 4, 16, 0), "135M"
"""The rollout that one engine does alone, and two at once."""
LEAST_AGREEMENT, MOST_DIFFERENCE = 0.99, 1e-3
"""Of greedy tokens, and of a scored logprob: beyond these, the engines do not do the same work."""


def competitor(
    channel: Channel, kind: str, size: str, threads: int, cases: Sequence[str], reference: str = ""
) -> None:
    """An engine that takes the cases in turn; what it answers greedily is written to a file."""
    torch.set_num_threads(threads)
    load, model = LOADS[size], make_model(size)
    engine = make_engine(kind, model, load.prompts * load.samples, threads)
    work = Work(engine, model, load)
    if reference:
        (CACHE / reference).write_text(json.dumps(work.reference()))
    channel.serve(lambda turn: work.cases[cases[turn % len(cases)]](turn))
    engine.close()


def neighbour(channel: Channel, threads: int, spins: bool) -> None:
    """A rollout of one vLLM engine, and two of them at once."""
    torch.set_num_threads(1)
    model = make_model(BESIDE_SIZE)
    slots = BESIDE.prompts * BESIDE.samples
    engines = [make_engine(VLLM, model, slots, threads, spins) for _ in range(2)]
    works = [Work(engine, model, BESIDE) for engine in engines]
    lengths = answer_lengths(BESIDE, False, 0)

    def timed(turn: int, mine: Sequence[Work]) -> float:
        watch = Stopwatch()
        with ThreadPoolExecutor(len(mine)) as pool:
            for done in [pool.submit(work.roll_out, turn, lengths, BESIDE.samples) for work in mine]:
                done.result()
        return watch.read()["seconds"]

    def run(turn: int) -> Measured:
        alone, both = timed(2 * turn, works[:1]), timed(2 * turn + 1, works)
        tokens = sum(lengths)
        return {"alone": tokens / alone, "both": 2 * tokens / both, "gain": 2 * alone / both}

    channel.serve(run)
    for engine in engines:
        engine.close()


def race_cases(
    contenders: Sequence[Contender], cases: Sequence[str], rounds: int
) -> dict[str, dict[str, list[Measured]]]:
    """Every case `rounds` times after a warm-up; what was measured by case and contender."""
    if math.gcd(len(contenders), len(cases)) > 1:
        raise ValueError("a case would begin with the same contender in every round")
    found = harness.race(contenders, rounds * len(cases), warmup=len(cases))
    return by_case(found, cases)


def by_case(found: dict[str, list[Measured]], cases: Sequence[str]) -> dict[str, dict[str, list[Measured]]]:
    """Turns of a race sorted by the case that each was."""
    sorted_out: dict[str, dict[str, list[Measured]]] = {case: {} for case in cases}
    for name, turns in found.items():
        for i, turn in enumerate(turns):
            sorted_out[cases[i % len(cases)]].setdefault(name, []).append(turn)
    return sorted_out


def compare(size: str, rounds: int) -> tuple[dict[str, Any], dict[str, Any], Measured]:
    """Both engines with all threads: rollouts and scores by title, weights by title, and their agreement."""
    print(f"torch engine and vLLM, {size} parameters")
    files = {
        (kind, threads): f"greedy-{size}-{kind}-{threads}.json"
        for threads in THREADS
        for kind in (TORCH, VLLM)
    }
    contenders = [
        Contender(
            f"{kind}, {size}, {threads}",
            "benchmarks.vllm_engine:competitor",
            {"kind": kind, "size": size, "threads": threads, "cases": CASES, "reference": file},
            threads,
        )
        for (kind, threads), file in files.items()
    ]
    found = race_cases(contenders, CASES, rounds)
    raced: dict[str, Any] = {}
    for case in CASES:
        for threads in THREADS:
            title = f"{threads} thread{'s' * (threads > 1)}, {size}, {case}"
            raced[title] = {kind: found[case][f"{kind}, {size}, {threads}"] for kind in (TORCH, VLLM)}
    synced = {title: raced.pop(title) for title in list(raced) if title.endswith(", sync")}
    return (
        raced,
        synced,
        check_same(size, [json.loads((CACHE / file).read_text()) for file in files.values()]),
    )


def compare_weights(size: str, rounds: int) -> dict[str, Any]:
    """New weights alone, with all threads, by title."""
    print(f"weights, {size} parameters")
    contenders = [
        Contender(
            f"{kind}, {size}, {threads}",
            "benchmarks.vllm_engine:competitor",
            {"kind": kind, "size": size, "threads": threads, "cases": ("sync",)},
            threads,
        )
        for threads in THREADS
        for kind in (TORCH, VLLM)
    ]
    turns = race_cases(contenders, ("sync",), rounds)["sync"]
    return {
        f"{threads} thread{'s' * (threads > 1)}, {size}, sync": {
            kind: turns[f"{kind}, {size}, {threads}"] for kind in (TORCH, VLLM)
        }
        for threads in THREADS
    }


def check_same(size: str, references: Sequence[dict[str, Any]]) -> Measured:
    """How far the engines agree at worst; an error if that is too little."""
    first, *others = references
    found = [agreement(first, other) for other in others]
    worst = {
        "tokens": found[0]["tokens"],
        "agree": min(one["agree"] for one in found),
        "largest_difference": max(one["largest_difference"] for one in found),
    }
    if worst["agree"] < LEAST_AGREEMENT or worst["largest_difference"] > MOST_DIFFERENCE:
        raise ValueError(f"{size}: not the same work, no result: {worst}")
    return worst


def race_rests(rounds: int) -> tuple[dict[str, list[Measured]], dict[str, list[Measured]]]:
    """Weights of the model between, and what sleep and wake take."""
    print(f"weights and sleep, {RESTED} parameters, 1 thread")
    contenders = [
        Contender(
            kind,
            "benchmarks.vllm_engine:competitor",
            {"kind": kind, "size": RESTED, "threads": 1, "cases": RESTS},
        )
        for kind in (TORCH, VLLM)
    ]
    found = race_cases(contenders, RESTS, rounds)
    return found["sync"], found["rest"]


def race_neighbours(rounds: int) -> dict[str, list[Measured]]:
    """Threads of one engine, and of two at once."""
    print("two vLLM engines at once")
    ways = {"1 thread": (1, False), "2 threads": (2, False), "2 threads that spin": (2, True)}
    contenders = [
        Contender(name, "benchmarks.vllm_engine:neighbour", {"threads": threads, "spins": spins}, 2 * threads)
        for name, (threads, spins) in ways.items()
    ]
    return harness.race(contenders, rounds)


def main(rounds: int = ROUNDS, rest_rounds: int = REST_ROUNDS) -> None:
    """Everything in one run, and write the results."""
    CACHE.mkdir(exist_ok=True)
    raced: dict[str, Any] = {}
    synced: dict[str, Any] = {}
    same: dict[str, Measured] = {}
    for size in COMPARED:
        more, sent, same[size] = compare(size, rounds)
        raced |= more
        synced |= sent
    synced[f"1 thread, {RESTED}, sync"], rested = race_rests(rest_rounds)
    content = {
        "settings": settings(rounds, rest_rounds),
        "raced": raced,
        "synced": synced,
        "same": same,
        "rested": rested,
        "neighbours": race_neighbours(rounds),
    }
    harness.write_results("vllm_engine", content)


def weights_again(rounds: int = SYNC_ROUNDS, rest_rounds: int = REST_ROUNDS) -> None:
    """Measure weights and sleep by themselves; the other results stay as they are."""
    synced: dict[str, Any] = {}
    for size in COMPARED:
        synced |= compare_weights(size, rounds)
    synced[f"1 thread, {RESTED}, sync"], rested = race_rests(rest_rounds)
    harness.write_results("vllm_engine", measured() | {"synced": synced, "rested": rested})


def settings(rounds: int, rest_rounds: int) -> dict[str, Any]:
    """What was compared."""
    loads = {
        size: {
            "prompts": load.prompts,
            "samples": load.samples,
            "new_tokens": load.new_tokens,
            "scored": load.scored,
        }
        for size, load in {**LOADS, "beside": BESIDE}.items()
    }
    return {
        "loads": loads,
        "prompt_tokens": PROMPT_TOKENS,
        "parts": PARTS,
        "scored_tokens": SCORED_TOKENS,
        "scored_from": SCORED_FROM,
        "context": CONTEXT,
        "threads": THREADS,
        "rounds": rounds,
        "rest_rounds": rest_rounds,
    }


if __name__ == "__main__":
    weights_again() if "--weights" in sys.argv[1:] else main()

"""Adapters beside whole weights: a GRPO step by model and rank, beside TRL's with the same PEFT config, and
a distillation step with three teachers that are adapters, three whole ones, or one.

`python -m benchmarks.lora_step [ranks] [trl] [teachers]` measures these parts, all of them if none is named;
what was measured of the others stays. With `--quick` each contender takes one small step, and nothing is
written. Each contender is a process of its own; `peak_mb` is the most memory that it had beyond what it had
before its models were loaded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness, report_lora, trl_peer
from benchmarks.distill_memory import status_bytes
from benchmarks.grpo_step import LR, MAX_NEW, SAMPLES
from benchmarks.harness import Channel, Contender, Measured
from benchmarks.model import CACHE, DIGITS, examples, model_folder, random_folder
from benchmarks.stepping import Steps, make_distillation, make_recipe
from practicum.tasks.scorers import RewardSample

SIZES = {"4M": (256, 4), "31M": (512, 8), "135M": (768, 15)}
"""Width and layers by the number of parameters."""
SIZE_PROMPTS = {"4M": 8, "31M": 2, "135M": 1}
"""Prompts of a step, of SAMPLES answers each: larger models take fewer."""
RANKS = (None, 1, 8, 64)
"""None: all weights are trained."""
TRL_RANK, TRL_PROMPTS, LORA_LR = 8, 16, 10 * LR
DOMAINS = ("first", "second", "third")
STEP_PROMPTS, TEACHER_SIZE, TEACHER_RANK = 6, "31M", 8
ROUNDS = 5
PARTS = ("ranks", "trl", "teachers")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _peak_mb() -> float:
    """Of this process alone: what `resource` tells has the parent's memory at its start in it."""
    return status_bytes("VmHWM") / 2**20


def _begin_peak() -> float:
    """Set the high-water mark back to now, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_mb()


def _serve(channel: Channel, recipe: Any, *, stops: bool) -> None:
    """Take steps of a recipe in turn, and say how much memory they needed."""
    import peft  # noqa: F401 - what is imported later is not the models' memory

    import practicum.learning.learner  # noqa: F401

    before = _begin_peak()
    with Steps(recipe, stops=stops) as steps:

        def run(turn: int) -> Measured:
            return steps.step() | {"peak_mb": _peak_mb() - before} | _held(steps.run.roles)

        channel.serve(run)


def _held(roles: Any) -> Measured:
    """MiB that models hold: all weights, each tensor once; the student's base; gradients and moments too."""
    from practicum.models.lora import is_adapter

    learner = roles.student.learner
    teachers = [] if roles.frozen.teachers is None else roles.frozen.teachers.places.values()
    models = [learner.model, *(getattr(place, "base", place).model for place in teachers)]
    weights = {p.data_ptr(): p.nbytes for model in models for p in model.parameters()}
    base = {p.data_ptr(): p.nbytes for name, p in learner.model.named_parameters() if not is_adapter(name)}
    gradients = sum(p.nbytes for p in learner.stepper.parameters)
    states = learner.stepper.optimizer.state.values()
    moments = sum(x.nbytes for state in states for x in state.values() if hasattr(x, "nbytes"))
    return {
        "weights_mb": sum(weights.values()) / 2**20,
        "model_mb": sum(base.values()) / 2**20,
        "held_mb": (sum(weights.values()) + gradients + moments) / 2**20,
    }


def stepper(channel: Channel, size: str, rank: int | None, prompts: int) -> None:
    """GRPO steps of a model with random weights, whose answers are all as long as they may be."""
    recipe = make_recipe(
        f"lora-{size}-{rank}",
        prompts=prompts,
        samples=SAMPLES,
        max_new_tokens=MAX_NEW,
        digits=DIGITS,
        lr=LR if rank is None else LORA_LR,
        threads=1,
        reward="benchmarks.lora_step:character_sum",  # a checker's is 0: no backward passes
    )
    lora = None if rank is None else {"rank": rank}
    _serve(channel, _with_model(recipe, random_folder(*SIZES[size]), lora), stops=False)


def character_sum(samples: Sequence[RewardSample]) -> list[float]:
    """A reward that differs within every group."""
    return [sum(map(ord, sample.response_text)) % 997 / 997 for sample in samples]


def practicum(channel: Channel, prompts: int, rank: int | None) -> None:
    """GRPO steps of the taught model or its adapter: what TRL's trainer does beside it."""
    recipe = make_recipe(
        "lora-grpo",
        prompts=prompts,
        samples=SAMPLES,
        max_new_tokens=MAX_NEW,
        digits=DIGITS,
        lr=LR if rank is None else LORA_LR,
        threads=1,
    )
    lora = None if rank is None else {"rank": rank}
    _serve(channel, _with_model(recipe, model_folder(), lora), stops=True)


def trl(channel: Channel, prompts: int, rank: int | None) -> None:
    """GRPOTrainer with the same adapter or none, whose loop waits in a callback for its turn."""
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    folder, before = model_folder(), _begin_peak()
    drawn = examples(2, 0, 4096, DIGITS)
    rows = {"prompt": [e.prompt for e in drawn], "answer": [e.answer for e in drawn]}
    counted: list[Measured] = []

    def is_sorted(
        completions: list[str], completion_ids: list[list[int]], answer: list[str], **row: Any
    ) -> list[float]:
        rewards = [float(c.strip() == a) for c, a in zip(completions, answer, strict=True)]
        tokens = sum(len(ids) for ids in completion_ids)
        counted.append({"tokens": tokens, "mean_reward": sum(rewards) / len(rewards)})
        return rewards

    shared = trl_peer.settings(prompts * SAMPLES, MAX_NEW, LR if rank is None else LORA_LR)
    targets: list[str] = [*TARGETS]
    lora = rank and LoraConfig(r=rank, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM")
    options = {"num_generations": SAMPLES, "beta": 0.0, "epsilon": 0.2, "loss_type": "dapo"}
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=is_sorted,
        args=GRPOConfig(**shared, **options, num_iterations=1),
        train_dataset=Dataset.from_dict(rows),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        peft_config=lora or None,
        callbacks=[trl_peer.make_turns(channel, 1, counted, lambda: {"peak_mb": _peak_mb() - before})],
    )
    trainer.train()


def taught(channel: Channel, kind: str, prompts: int, size: str) -> None:
    """Distillation of an adapter: from one whole teacher, three whole ones, or three adapters on its base."""
    teachers = {
        "one whole": {DOMAINS[0]: {"model": str(_teacher(size, 0, merged=True))}},
        "three whole": {d: {"model": str(_teacher(size, i, merged=True))} for i, d in enumerate(DOMAINS)},
        "three adapters": {d: {"adapter": str(_teacher(size, i))} for i, d in enumerate(DOMAINS)},
    }[kind]
    recipe = make_distillation(
        f"taught-{kind.replace(' ', '-')}",
        teachers,
        prompts=prompts,
        samples=SAMPLES,
        max_new_tokens=MAX_NEW,
        digits=DIGITS,
        lr=1e-9,  # too little to change the student: all contenders score the same rows
        tasks=DOMAINS,
    )
    recipe = _with_model(recipe, random_folder(*SIZES[size]), {"rank": TEACHER_RANK})
    _serve(channel, recipe, stops=False)


def _with_model(recipe: Any, folder: Path, lora: Mapping[str, Any] | None) -> Any:
    from practicum.recipe.schema.recipe import Recipe

    data = recipe.model_dump(mode="json", exclude_unset=True)
    return Recipe.model_validate(data | {"model": {"path": str(folder), "lora": lora}})


def _teacher(size: str, number: int, *, merged: bool = False) -> Path:
    """An adapter on the model of this size with random weights, or a model that it was merged into."""
    import torch

    from practicum.models.adapter_files import write_adapter
    from practicum.models.load_model import load_model, load_tokenizer
    from practicum.models.lora import base_fingerprint, merged_weights
    from practicum.models.offloaded_weights import named_tensors
    from practicum.recipe.schema.recipe import Lora, Model

    base = random_folder(*SIZES[size])
    folder = CACHE / f"{base.name}-{'merged' if merged else 'adapter'}-{TEACHER_RANK}-{number}"
    if (folder / "practicum.json").is_file() or (folder / "model.safetensors").is_file():
        return folder
    model = load_model(Model(path=str(base), lora=Lora(rank=TEACHER_RANK)), number)
    generator = torch.Generator().manual_seed(number)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)
    if merged:
        plain = load_model(Model(path=str(base)), 0)
        plain.load_state_dict(dict(merged_weights(model)), strict=False)
        plain.save_pretrained(folder)
        load_tokenizer(Model(path=str(base))).save_pretrained(folder)
    else:
        folder.mkdir(parents=True)
        write_adapter(folder, model, named_tensors(model), base_fingerprint(model))
    return folder


def race_ranks(size: str, prompts: int, rounds: int) -> dict[str, list[Measured]]:
    """All weights and adapters of each rank in turn."""
    contenders = [
        Contender(
            f"{size}, all weights" if rank is None else f"{size}, rank {rank}",
            "benchmarks.lora_step:stepper",
            {"size": size, "rank": rank, "prompts": prompts},
        )
        for rank in RANKS
    ]
    raced = harness.race(contenders, rounds)
    idle = [name for name, measured in raced.items() if any(one["idle_share"] for one in measured)]
    if idle:
        raise ValueError(f"steps without all of their backward pass say nothing: {', '.join(idle)}")
    return raced


def race_trl(prompts: int, rounds: int) -> dict[str, list[Measured]]:
    """practicum beside TRL, with one adapter config, and with all weights."""
    contenders = [
        Contender(f"{name}, {trained}", f"benchmarks.lora_step:{name}", {"prompts": prompts, "rank": rank})
        for trained, rank in (("LoRA", TRL_RANK), ("all weights", None))
        for name in ("practicum", "trl")
    ]
    return harness.race(contenders, rounds)


def race_teachers(size: str, prompts: int, rounds: int) -> dict[str, list[Measured]]:
    """The three kinds of teachers in turn."""
    for number in range(len(DOMAINS)):  # made here, so that no contender's memory has the making in it
        _teacher(size, number)
        _teacher(size, number, merged=True)
    contenders = [
        Contender(kind, "benchmarks.lora_step:taught", {"kind": kind, "prompts": prompts, "size": size})
        for kind in ("one whole", "three whole", "three adapters")
    ]
    return harness.race(contenders, rounds)


def main(parts: Collection[str], rounds: int = ROUNDS) -> None:
    """Race these parts, and put each among the results when it is measured."""
    path = harness.RESULTS / "lora_step.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    settings = {"samples": SAMPLES, "max_new_tokens": MAX_NEW, "sizes": SIZES, "prompts": SIZE_PROMPTS}
    settings |= {"trl_prompts": TRL_PROMPTS, "trl_rank": TRL_RANK, "rounds": rounds}
    settings |= {"teacher_prompts": STEP_PROMPTS, "teacher_rank": TEACHER_RANK, "teachers_on": TEACHER_SIZE}

    def keep(name: str, raced: Mapping[str, Any]) -> None:
        found[name] = raced
        harness.write_results("lora_step", found | {"settings": settings})

    if "teachers" in parts:
        print("three teachers as adapters and as whole models, 1 thread")
        keep("teachers", race_teachers(TEACHER_SIZE, STEP_PROMPTS, rounds))
    if "trl" in parts:
        print("GRPO step beside TRL, 1 thread")
        keep("trl", race_trl(TRL_PROMPTS, rounds))
    if "ranks" in parts:
        sizes: dict[str, Any] = {}
        for size, prompts in SIZE_PROMPTS.items():
            print(f"GRPO step of {size} parameters, all weights and adapters, 1 thread")
            sizes[size] = race_ranks(size, prompts, rounds)
            keep("ranks", sizes)


def try_out(parts: Collection[str]) -> None:
    """Let each contender of these parts take a step on the smallest model, and show the tables of it."""
    size = next(iter(SIZES))
    found: dict[str, Any] = {"settings": {"teachers_on": size}, "machine": harness.machine()}
    if "teachers" in parts:
        found["teachers"] = race_teachers(size, len(DOMAINS), rounds=1)
    if "trl" in parts:
        found["trl"] = race_trl(2, rounds=1)
    if "ranks" in parts:
        found["ranks"] = {size: race_ranks(size, 1, rounds=1)}
    print(report_lora.lora_step(found))


if __name__ == "__main__":
    named = [word for word in sys.argv[1:] if word != "--quick"]
    if set(named) - set(PARTS):
        sys.exit(f"no such part: {', '.join(sorted(set(named) - set(PARTS)))}; there are {', '.join(PARTS)}")
    (try_out if "--quick" in sys.argv else main)(named or PARTS)

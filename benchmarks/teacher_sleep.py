"""What it costs that colocated teachers sleep: one cycle by size and place, and three teachers beside one.

A cycle is what a step does around the scoring: the student's engine sleeps, the teacher wakes and sleeps
again, the student's engine wakes. Its KV memory is new then, so a rollout before and one after are timed too.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from benchmarks import harness
from benchmarks.harness import Channel, Contender, Measured
from benchmarks.model import DIGITS, examples, model_folder, random_folder, teacher_folder
from benchmarks.stepping import Steps, make_distillation
from practicum.engines.protocol import GenerateRequest

SAMPLES, MAX_NEW = 8, 32
PROMPTS = 32
"""Of the rollouts around a cycle."""
SIZES = {"4M": (256, 4), "31M": (512, 8)}
"""Width and layers of the teacher by the number of its parameters."""
PLACES = {"stays": None, "to disk and back": 0.0}
"""Bytes of memory in which sleeping weights may stay."""
STEP_PROMPTS = 48
DOMAINS = ("first", "second", "third")
LR = 1e-9
"""Too little to change the student: one teacher and three score the same rows."""
ROUNDS = 4


def cycle(channel: Channel, prompts: int, width: int, layers: int, budget: float | None) -> None:
    """A rollout, a cycle, the same rollout again."""
    from practicum.engines.torch.torch_engine import TorchEngine
    from practicum.models.load_model import load_model, load_tokenizer
    from practicum.places.model_cache import ModelCache
    from practicum.places.torch_teacher import ColocatedTeacher, load_teacher
    from practicum.recipe.schema.recipe import Model
    from practicum.recipe.schema.teacher_sections import Teacher

    spec = Model(path=str(model_folder()))
    student, tokenizer = load_model(spec, 0), load_tokenizer(spec)
    engine = TorchEngine(student, slots=PROMPTS * SAMPLES, context=256)
    about = Teacher(model=str(random_folder(width, layers)))
    teacher = ColocatedTeacher("teacher", about, load_teacher("teacher", about, student))
    residency = ModelCache([teacher], device=budget, host=None)

    def run(turn: int) -> Measured:
        asked = [tokenizer.encode(e.prompt) for e in examples(4, turn * prompts, prompts, DIGITS)]
        found = {"before": _roll_out(engine, asked, turn, tokenizer)}
        marks = [time.perf_counter()]
        engine.sleep()
        marks.append(time.perf_counter())
        with residency.awake("teacher"):
            marks.append(time.perf_counter())
        marks.append(time.perf_counter())
        engine.wake()
        marks.append(time.perf_counter())
        names = ("student_sleeps", "teacher_wakes", "teacher_sleeps", "student_wakes")
        found |= {name: marks[i + 1] - marks[i] for i, name in enumerate(names)}
        found["cycle"] = marks[-1] - marks[0]
        found["after"] = _roll_out(engine, asked, turn, tokenizer)
        return found | {"bytes": teacher.nbytes}

    channel.serve(run)
    teacher.close()
    engine.close()


def _roll_out(engine: Any, prompts: list[list[int]], turn: int, tokenizer: Any) -> float:
    """Seconds of a rollout; the same turn samples the same tokens."""
    from practicum.engines.protocol import Counter, Sampling

    sampling = Sampling(max_new_tokens=MAX_NEW, stop=frozenset([tokenizer.eos_token_id]))

    async def sample() -> None:
        await asyncio.gather(
            *(
                engine.generate(GenerateRequest(ids, sampling, Counter(seed=turn, prompt=i, session=session)))
                for i, ids in enumerate(prompts)
                for session in range(SAMPLES)
            )
        )

    began = time.perf_counter()
    asyncio.run(sample())
    return time.perf_counter() - began


def stepper(channel: Channel, prompts: int, teachers: int) -> None:
    """Steps over three domains, whose rows one teacher scores, or three with the same weights."""
    copies = DOMAINS if teachers > 1 else DOMAINS[:1]
    recipe = make_distillation(
        f"faculty-{teachers}",
        {name: {"model": str(teacher_folder(name))} for name in copies},
        prompts=prompts,
        samples=SAMPLES,
        max_new_tokens=MAX_NEW,
        digits=DIGITS,
        lr=LR,
        tasks=DOMAINS,
    )
    with Steps(recipe) as steps:
        channel.serve(lambda turn: steps.step())


def race_faculties(rounds: int, prompts: int) -> dict[str, list[Measured]]:
    """One teacher with all rows beside three with a third each."""
    one, three = contenders = [
        Contender(name, "benchmarks.teacher_sleep:stepper", {"prompts": prompts, "teachers": count})
        for name, count in (("one teacher", 1), ("three teachers", 3))
    ]
    raced = harness.race(contenders, rounds)
    for mine, theirs in zip(raced[one.name], raced[three.name], strict=True):
        if mine["tokens"] != theirs["tokens"]:
            raise ValueError(f"not the same rows: {mine['tokens']:g} and {theirs['tokens']:g} tokens")
    return raced


def main(rounds: int = ROUNDS, prompts: int = PROMPTS, step_prompts: int = STEP_PROMPTS) -> None:
    """Cycles of all sizes and places in turn, then the faculties, and write the results."""
    teacher_folder()
    print("a colocated teacher's cycle of waking and sleeping, 1 thread")
    cycles = [
        Contender(
            f"{size}, {place}",
            "benchmarks.teacher_sleep:cycle",
            {"prompts": prompts, "width": width, "layers": layers, "budget": budget},
        )
        for size, (width, layers) in SIZES.items()
        for place, budget in PLACES.items()
    ]
    cycled = harness.race(cycles, rounds)
    print("three colocated teachers beside one, 1 thread")
    raced = race_faculties(rounds, step_prompts)
    ratio, least, most = harness.paired_ratio(raced["three teachers"], raced["one teacher"], "teachers")
    print(f"  three teachers take {ratio:.2f} of one's time ({least:.2f} to {most:.2f})")
    settings = {
        "samples": SAMPLES,
        "max_new_tokens": MAX_NEW,
        "digits": DIGITS,
        "sizes": SIZES,
        "prompts": prompts,
        "step_prompts": step_prompts,
        "rounds": rounds,
    }
    content = {"settings": settings, "cycles": cycled, "faculties": {"1 thread": raced}}
    harness.write_results("teacher_sleep", content)


if __name__ == "__main__":
    main()

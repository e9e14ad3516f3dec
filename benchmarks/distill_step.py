"""A whole distillation step: practicum beside TRL's DistillationTrainer, same student, teacher and batch.

32 prompts of sorting × 8 samples, or 256 prompts × 1, at most 32 new tokens, or 4 prompts of 512 tokens × 8
samples with at most 64 new ones. Reverse KL over the whole vocabulary, one optimizer step per batch. Before
the race, both say loss and gradient of the same rows, which have to agree.

`python -m benchmarks.distill_step [CASE …]` races these of CASES, or all; results of others are kept.
"""

from __future__ import annotations

import copy
import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness, plots, trl_peer
from benchmarks.harness import Channel, Contender, Measured
from benchmarks.model import MORE_DIGITS, examples, model_folder, teacher_folder
from benchmarks.stepping import Steps, make_recipe, mean
from practicum.concurrency.event_loop import run_async
from practicum.concurrency.gather import gather_all
from practicum.dataplane.ragged import Ragged
from practicum.engines.protocol import ScoreRequest
from practicum.learning.learner import Learner
from practicum.learning.update_batch import TeacherColumns, UpdateBatch
from practicum.runtime.local import LocalRoles

LR, ROUNDS = 1e-5, 3
SIZES = ("prompts", "samples", "threads", "digits", "max_new_tokens")
CASES = {
    "1 thread": (32, 8, 1, MORE_DIGITS, 32),
    "2 threads": (32, 8, 2, MORE_DIGITS, 32),
    "1 thread, distinct prompts": (256, 1, 1, MORE_DIGITS, 32),
    "1 thread, long prompts": (4, 8, 1, (506, 506), 64),
}
BLOCK = 2
"""Steps that a contender takes in one turn."""
CHECKED_ROWS, TOLERANCE = 32, 1e-3
"""Rows whose loss and gradient both sides compute beforehand, and the relative difference allowed."""
CHECKED = ("checked_loss", "checked_gradient")
LEARNT = "learnt_loss"
"""The loss of those rows at the end of a turn: less than at the start, if the student learns."""
TEACHER = "sorter"


def practicum(channel: Channel, **sizes: Any) -> None:
    """The step of `practicum train` with a colocated teacher, all run-time checks on."""
    sections = {
        "teachers": {TEACHER: {"model": str(teacher_folder())}},
        "reward": {"weight": 0.0},
        "distill": {"divergence": "reverse_kl", "signal": "full"},
    }
    recipe = make_recipe("distill_step", lr=LR, **sizes, **sections)
    with Steps(recipe) as steps:
        batch = _checked_batch(steps)
        checked = dict(zip(CHECKED, _practicum_checked(steps, batch), strict=True))

        def run(turn: int) -> Measured:
            found = mean([steps.step() for _ in range(BLOCK)])
            return found | checked | _peak() | {LEARNT: _practicum_checked(steps, batch)[0]}

        channel.serve(run)


def trl(
    channel: Channel, prompts: int, samples: int, threads: int, digits: tuple[int, int], max_new_tokens: int
) -> None:
    """DistillationTrainer, whose loop waits in a callback for its turn."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(threads)
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (model_folder(), teacher_folder())
    )
    drawn = examples(2, 0, 32 * prompts, digits)
    counted: list[Measured] = []
    checked: Measured = {}

    def at_end() -> Measured:
        return checked | _peak() | {LEARNT: _trl_checked(trainer)[0]}

    trainer = _timed_trainer(counted)(
        model=student,
        teacher_model=teacher,
        args=_trl_config(prompts * samples, max_new_tokens),
        # It samples once for each row, so a prompt's samples are rows of their own.
        train_dataset=Dataset.from_dict({"prompt": [e.prompt for e in drawn for _ in range(samples)]}),
        processing_class=AutoTokenizer.from_pretrained(model_folder(), padding_side="left"),
        callbacks=[trl_peer.make_turns(channel, BLOCK, counted, at_end)],
    )
    checked |= dict(zip(CHECKED, _trl_checked(trainer), strict=True))
    counted.clear()
    trainer.train()


def _timed_trainer(counted: list[Measured]) -> Any:
    """A DistillationTrainer that adds each step's tokens, loss, and seconds of its parts to `counted`."""
    from trl import DistillationTrainer  # pyright: ignore[reportMissingImports]

    @contextmanager
    def timed(part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        counted[-1][part] += time.perf_counter() - began

    class Timed(DistillationTrainer):
        def _generate(self, prompts: list[Any]) -> Any:
            counted.append({"tokens": 0, "distill_loss": 0.0, "rollout": 0.0, "teachers": 0.0})
            with timed("rollout"):
                found = super()._generate(prompts)
            counted[-1]["tokens"] = sum(len(ids) for ids in found[1])
            return found

        def _get_last_hidden_state(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            if model is not self.accelerator.unwrap_model(self.teacher_model) or not counted:
                return super()._get_last_hidden_state(model, *args, **kwargs)
            with timed("teachers"):
                return super()._get_last_hidden_state(model, *args, **kwargs)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            counted[-1]["distill_loss"] += float(loss.detach())  # each is divided by the tokens of all
            return loss

    return Timed


def _peak() -> Measured:
    """The most memory that this process has had."""
    return {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def _trl_config(rows: int, max_new_tokens: int) -> Any:
    from trl import DistillationConfig  # pyright: ignore[reportMissingImports]

    return DistillationConfig(
        **trl_peer.settings(rows, max_new_tokens, LR),
        beta=1.0,  # reverse KL
        shuffle_dataset=False,
    )


def checked_rows(tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Prompts and right answers as token ids."""
    drawn = examples(3, 0, CHECKED_ROWS, MORE_DIGITS)
    return [
        (tokenizer.encode(e.prompt), [*tokenizer.encode(e.answer), tokenizer.eos_token_id]) for e in drawn
    ]


def _checked_batch(steps: Steps) -> UpdateBatch:
    """The rows as a mini-batch, scored by the run's own teacher."""
    roles = steps.run.roles
    assert isinstance(roles, LocalRoles)
    assert roles.rank.teachers is not None
    rows = checked_rows(roles.rank.tokenizer)
    teachers = roles.rank.teachers.loaded
    whole = [ScoreRequest([*p, *r], len(p), f"row {i}") for i, (p, r) in enumerate(rows)]
    with teachers.awake(TEACHER):
        scorer, options = teachers.scorers[TEACHER], roles.rank.teachers.options
        work = gather_all(scorer.score(row, options) for row in whole)
        scores = run_async(work, timeout=120.0, owner="the check")
    hidden = [s.hidden for s in scores if s.hidden is not None]
    return UpdateBatch(
        prompt_ids=Ragged.from_rows([torch.tensor(p) for p, _ in rows]),
        response_ids=Ragged.from_rows([torch.tensor(r) for _, r in rows]),
        response_mask=Ragged.from_rows([torch.ones(len(r), dtype=torch.bool) for _, r in rows]),
        sessions=range(len(rows)),
        teachers=TeacherColumns(
            [0] * len(rows), Ragged.from_rows([s.logprobs for s in scores]), hidden=Ragged.from_rows(hidden)
        ),
    )


def _practicum_checked(steps: Steps, batch: UpdateBatch) -> tuple[float, float]:
    """Loss and norm of the gradient of the rows, by an update of a copy of the student."""
    roles, recipe = steps.run.roles, steps.run.recipe
    assert isinstance(roles, LocalRoles)
    learner = roles.rank.student.learner
    model, teaching = copy.deepcopy(learner.model), learner.objective.teaching
    metrics = Learner(model, recipe.train, recipe.algorithm, teaching=teaching).update(batch)
    return metrics["loss"], metrics["grad_norm"]


def _trl_checked(trainer: Any) -> tuple[float, float]:
    """Loss and norm of the gradient of the rows by the trainer's own loss, padded as it pads."""
    rows = checked_rows(trainer.processing_class)
    inputs: dict[str, Tensor] = {}
    for name, side, parts in (
        ("prompt", "left", [p for p, _ in rows]),
        ("completion", "right", [r for _, r in rows]),
    ):
        inputs[f"{name}_ids"] = _padded(parts, trainer.processing_class.pad_token_id, side)
        inputs[f"{name}_mask"] = _padded([[1] * len(part) for part in parts], 0, side)
    loss, _, _ = trainer._compute_loss(trainer.model, inputs, inputs["completion_mask"].sum())
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters() if p.grad is not None])
    trainer.model.zero_grad()
    return float(loss.detach()), float(norm)


def _padded(rows: Sequence[Sequence[int]], value: int, side: str) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row) for row in rows], batch_first=True, padding_value=value, padding_side=side
    )


def require_same(raced: Mapping[str, Sequence[Measured]], *, learns: bool = True) -> None:
    """Refuse results of contenders that compute another loss or gradient, or do not learn if it `learns`."""
    ours, theirs = (raced[name][0] for name in ("practicum", "trl"))
    for name in CHECKED:
        if not math.isclose(ours[name], theirs[name], rel_tol=TOLERANCE):
            raise ValueError(f"{name} differs: practicum {ours[name]:.6g}, trl {theirs[name]:.6g}")
    for name, found in raced.items():
        if learns and found[-1][LEARNT] >= found[-1][CHECKED[0]]:
            raise ValueError(f"{name} has not learnt: loss of the same rows {found[-1][LEARNT]:.6g}")


def main(titles: Sequence[str]) -> None:
    """Race these cases, and add to the results."""
    teacher_folder()
    raced = harness.stored("distill_step")
    settings = {
        "cases": CASES,
        "rounds": ROUNDS,
        "lr": LR,
        "trl_microbatch_rows": trl_peer.MICROBATCH,
        "steps_per_round": BLOCK,
    }
    for title in titles:
        print(f"distillation step, {title}")
        sizes: dict[str, Any] = dict(zip(SIZES, CASES[title], strict=True))
        contenders = [
            Contender(name, f"benchmarks.distill_step:{name}", sizes, sizes["threads"])
            for name in ("practicum", "trl")
        ]
        raced[title] = harness.race(contenders, ROUNDS)
        require_same(raced[title], learns=sizes["digits"] == MORE_DIGITS)
        harness.write_results("distill_step", {"settings": settings, "raced": raced})
    plots.bars(raced, "seconds", "seconds per distillation step", "distill_step")


if __name__ == "__main__":
    main(sys.argv[1:] or [*CASES])

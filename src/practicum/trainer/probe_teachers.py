"""Compare each teacher with the student on a few prompts before a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.concurrency.event_loop import run_async
from practicum.concurrency.gather import gather_all
from practicum.engines.protocol import Counter, Engine, GenerateRequest, Sampling, ScoreOptions, ScoreRequest
from practicum.engines.torch.make_torch import TorchKind
from practicum.models.load_model import load_tokenizer, stop_ids
from practicum.recipe.derived import traits_of
from practicum.recipe.schema.recipe import Recipe
from practicum.rewards.score_functions import RewardFunctions, RewardSample
from practicum.sessions.chat import make_encoder
from practicum.tasks.prompts import Prompt
from practicum.tasks.stream import make_stream
from practicum.teachers.load_teachers import load_teachers
from practicum.teachers.route import before_text, teacher_of
from practicum.teachers.shared_tokens import shared_tokens

PROMPTS, DRAWN = 8, 128
"""Number of prompts to probe each teacher on, and the number drawn to find them."""
TOP_K = 32
"""Default top-k if the recipe has none."""
TAIL = 0.01
"""Tail mass above which one bucket for the tail is too coarse."""
FAR = 0.5
"""Teacher mass on the student's top-k below which its scores of the student's responses say little."""
PROBE_S = 600.0


@dataclass(frozen=True, slots=True)
class Probe:
    """Comparison of teacher and student on the student's responses to the teacher's prompts."""

    overlap: float
    """Share of the teacher's top-k tokens that are in the student's."""
    mass: float
    """The teacher's mass on the student's top-k."""
    tail: float
    """The teacher's mass beyond its own top-k."""
    entropy_gap: float
    """The student's entropy minus the teacher's."""
    kl: float
    """KL(student || teacher), over the whole vocabulary."""
    scores: tuple[float, float]
    """Mean score of greedy responses: the teacher's and the student's."""

    @property
    def signal(self) -> str:
        return "top_k" if self.tail <= TAIL else "full"


def compare(student_MV: Tensor, teacher_MV: Tensor, top_k: int, scores: tuple[float, float]) -> Probe:
    """Compute the probe from log-probabilities of both models at the tokens of the student's responses."""
    k = min(top_k, student_MV.shape[1])
    p_MV, q_MV = student_MV.double().exp(), teacher_MV.double().exp()
    own_MK, best_MK = student_MV.topk(k).indices, teacher_MV.topk(k).indices
    entropies = [-(x.exp() * x).sum(-1).mean() for x in (student_MV.double(), teacher_MV.double())]
    return Probe(
        overlap=float((best_MK.unsqueeze(2) == own_MK.unsqueeze(1)).any(2).double().mean()),
        mass=float(q_MV.gather(1, own_MK).sum(1).mean()),
        tail=float(1 - q_MV.gather(1, best_MK).sum(1).mean()),
        entropy_gap=float(entropies[0] - entropies[1]),
        kl=float((p_MV * (student_MV.double() - teacher_MV.double())).sum(1).mean()),
        scores=scores,
    )


def probe_teachers(recipe: Recipe, model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Return a table of all teachers that can be loaded here, and warnings. Refuse unfit models."""
    specs = {
        name: teacher.model_copy(update={"placement": "colocated"})
        for name, teacher in recipe.teachers.items()
        if teacher.url is None and teacher.adapter is None and teacher.engine_traits.runs_transformers
    }
    for name in shared_tokens(recipe, load_tokenizer(recipe.model)):
        specs.pop(name, None)  # another tokenizer: `teacher_checks` reports what they share
    if not specs or recipe.on_ray:
        return [], []
    several_turns, vision = recipe.agent.loop != "single_turn", traits_of(model.config.to_dict()).vision
    if recipe.distill is None or several_turns or vision:
        load_teachers(specs, None, recipe.runtime, recipe.model, recipe.seed, model).close()
        return [], []
    stream = make_stream(recipe.tasks, recipe.seed, needs_answer=recipe.tasks_needing_answer)
    prompts: dict[str, list[Prompt]] = {}
    for prompt in stream.take(DRAWN):
        own = prompts.setdefault(teacher_of(prompt, recipe.route, recipe.teachers, recipe.seed), [])
        own += [prompt] * (len(own) < PROMPTS)
    engine = TorchKind().for_rollout(recipe.rollout, recipe.model.path, model)
    teachers = load_teachers(specs, None, recipe.runtime, recipe.model, recipe.seed, model)
    probes: dict[str, Probe] = {}
    with closing(teachers), closing(engine):
        prober = _Prober(recipe, engine, model)
        for name in specs:
            if name in prompts:
                with teachers.awake(name):
                    scorer: Engine = teachers.scorers[name].scorers[0]  # pyright: ignore[reportAssignmentType]
                    work = prober.probe(name, scorer, prompts[name])
                    probes[name] = run_async(work, timeout=PROBE_S, owner=f"the probe of teacher {name}")
    return table(probes), warnings_of(probes)


class _Prober:
    def __init__(self, recipe: Recipe, student: Engine, model: PreTrainedModel) -> None:
        self.recipe, self.student = recipe, student
        self.encode = make_encoder(recipe, load_tokenizer(recipe.model))
        self.functions = RewardFunctions(recipe.tasks, recipe.reward)
        config, rollout = getattr(model, "generation_config", None), recipe.rollout
        stop = stop_ids(config, self.encode.tokenizer, rollout.stop)
        self.sampled = Sampling(rollout.max_new_tokens, stop, temperature=rollout.temperature)
        self.greedy = Sampling(rollout.max_new_tokens, stop, greedy=True)

    async def probe(self, name: str, teacher: Engine, prompts: Sequence[Prompt]) -> Probe:
        ids = {prompt.uid: list(self.encode(prompt).ids) for prompt in prompts}
        before = {prompt.uid: self._before(name, prompt) for prompt in prompts}
        seen = {uid: before[uid] + own for uid, own in ids.items()}
        answers = await self._answers(self.student, ids, self.sampled)
        rows = [(seen[uid], ids[uid], answer) for uid, answer in answers.items() if answer]
        said = [
            torch.cat([await self._logprobs(who, row[which], row[2]) for row in rows])
            for who, which in ((self.student, 1), (teacher, 0))
        ]
        asked = (teacher, seen), (self.student, ids)
        greedy = [await self._answers(who, own, self.greedy) for who, own in asked]
        judged = [prompt for prompt in prompts if prompt.answer is not None]
        scores = [self._score(judged, found) for found in greedy]
        distill = self.recipe.distill
        top_k = distill.top_k if distill is not None and distill.signal == "top_k" else TOP_K
        width = min(x.shape[1] for x in said)
        return compare(said[0][:, :width], said[1][:, :width], top_k, (scores[0], scores[1]))

    def _before(self, name: str, prompt: Prompt) -> list[int]:
        text = before_text(self.recipe.teachers[name], prompt)
        return self.encode.tokenizer.encode(text, add_special_tokens=False)

    async def _answers(
        self, engine: Engine, ids: Mapping[int, list[int]], sampling: Sampling
    ) -> dict[int, list[int]]:
        counters = {uid: Counter(self.recipe.seed, uid) for uid in ids}
        asked = (engine.generate(GenerateRequest(ids[uid], sampling, counters[uid])) for uid in ids)
        return {uid: g.tokens.tolist() for uid, g in zip(ids, await gather_all(asked), strict=True)}

    async def _logprobs(self, engine: Engine, prompt: list[int], answer: list[int]) -> Tensor:
        scores = await engine.score(ScoreRequest([*prompt, *answer], len(prompt)), ScoreOptions(hidden=True))
        assert scores.hidden is not None
        head = engine.head()
        logits_RV = head.logits(scores.hidden.to(head.weight.device)).float().cpu()
        return (logits_RV / self.recipe.compare_temperature).log_softmax(-1)

    def _score(self, prompts: Sequence[Prompt], answers: Mapping[int, list[int]]) -> float:
        """Return the mean of the task's checker, or NaN if no prompt has an answer."""
        found = []
        for prompt in prompts:
            tokens = answers[prompt.uid]
            text = str(self.encode.tokenizer.decode(tokens, skip_special_tokens=True))
            known = (prompt.answer, prompt.row, prompt.task, prompt.domain)
            sample = RewardSample("", text, *known, finish="", key=str(prompt), response_tokens=len(tokens))
            found.append(self.functions.check(sample))
        return fmean(found) if found else math.nan


def table(probes: Mapping[str, Probe]) -> list[str]:
    if not probes:
        return []
    titles = ("teacher", "overlap", "mass", "tail", "entropy gap", "KL", "its score", "student's", "signal")
    rows = [titles] + [
        (
            *(name, f"{p.overlap:.2f}", f"{p.mass:.3f}", f"{p.tail:.4f}", f"{p.entropy_gap:+.2f}"),
            *(f"{p.kl:.3f}", *("–" if math.isnan(score) else f"{score:.2f}" for score in p.scores), p.signal),
        )
        for name, p in probes.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]


def warnings_of(probes: Mapping[str, Probe]) -> list[str]:
    warnings = []
    for name, probe in probes.items():
        teacher, student = probe.scores
        if teacher < student:
            warnings.append(
                f"teacher {name} scores less than the student on its prompts: {teacher:.2f} against "
                f"{student:.2f} (mean over greedy responses)"
            )
        if probe.mass < FAR:
            warnings.append(
                f"teacher {name} has {probe.mass:.0%} of its mass on the student's most likely tokens, so "
                "its scores say little: train on its responses first (algorithm.loss: supervised)"
            )
    return warnings

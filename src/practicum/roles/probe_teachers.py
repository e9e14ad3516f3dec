"""Compare each teacher with the student on a few prompts before a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from practicum.concurrency.event_loop import run_async
from practicum.concurrency.gather import gather_all
from practicum.engines.protocol import Counter, Engine, GenerateRequest, Sampling, ScoreOptions, ScoreRequest
from practicum.engines.torch.make_torch import TorchKind
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.models.load_model import load_tokenizer, stop_ids
from practicum.recipe.derived import traits_of
from practicum.recipe.schema.recipe import Recipe
from practicum.rewards.score_functions import RewardFunctions, RewardSample
from practicum.sessions.chat import make_encoder
from practicum.tasks.prompts import Encoder, Prompt
from practicum.tasks.stream import make_stream
from practicum.teachers.load_teachers import Teachers, load_teachers
from practicum.teachers.route import before_text, teacher_of
from practicum.teachers.shared_tokens import require_mass, shared_tokens

PROMPTS, DRAWN, POSITIONS = 8, 128, 64
"""Number of prompts to probe each teacher on, the number drawn to find them, and tokens of each response."""
TOP_K = 32
"""Default top-k if the recipe has none."""
TAIL = 0.01
"""Tail mass above which one bucket for the tail is too coarse."""
FAR = 0.5
"""Teacher mass on the student's top-k below which its scores of the student's responses say little."""
PROBE_S = 600.0
MEASURES = ("overlap", "mass", "tail", "entropy_gap", "kl")


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
    shared: bool = False
    """True if the teacher has another tokenizer: all numbers are of the tokens that both have."""

    @property
    def signal(self) -> str:
        return "shared" if self.shared else "top_k" if self.tail <= TAIL else "full"


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
        if teacher.url is None and teacher.engine_traits.runs_transformers
    }
    if not specs or recipe.on_ray:
        return [], []
    if not _comparable(recipe, model):
        load_teachers(specs, None, recipe.runtime, recipe.model, recipe.seed, model).close()
        return [], []
    engine = TorchKind().for_rollout(recipe.rollout, recipe.model.path, model)
    teachers = load_teachers(specs, None, recipe.runtime, recipe.model, recipe.seed, model)
    with closing(teachers), closing(engine):
        return compare_teachers(recipe, model, engine, teachers)


def compare_teachers(
    recipe: Recipe, model: PreTrainedModel, engine: Engine, teachers: Teachers
) -> tuple[list[str], list[str]]:
    """Return the same of these teachers, by the student's engine. Raise a TeacherError if one has too little
    in common with the student."""
    if not _comparable(recipe, model):
        return [], []
    stream = make_stream(recipe.tasks, recipe.seed, needs_answer=recipe.tasks_needing_answer)
    prompts: dict[str, list[Prompt]] = {}
    for prompt in stream.take(DRAWN):
        own = prompts.setdefault(teacher_of(prompt, recipe.route, recipe.teachers, recipe.seed), [])
        own += [prompt] * (len(own) < PROMPTS)
    probes: dict[str, Probe] = {}
    prober = _Prober(recipe, engine, model)
    for name, teacher in teachers.scorers.items():
        if name in prompts and isinstance(scorer := teacher.scorers[0], TorchEngine):
            with teachers.awake(name):
                work = prober.probe(name, scorer, teacher.adapter, prompts[name])
                probes[name] = run_async(work, timeout=PROBE_S, owner=f"the probe of teacher {name}")
    return table(probes), warnings_of(probes)


def _comparable(recipe: Recipe, model: PreTrainedModel) -> bool:
    single_turn, vision = recipe.agent.loop == "single_turn", traits_of(model.config.to_dict()).vision
    return recipe.distill is not None and single_turn and not vision


class _Prober:
    def __init__(self, recipe: Recipe, student: Engine, model: PreTrainedModel) -> None:
        self.recipe, self.student = recipe, student
        self.encode = make_encoder(recipe, load_tokenizer(recipe.model))
        self.functions = RewardFunctions(recipe.tasks, recipe.reward)
        self.shared = shared_tokens(recipe, self.encode.tokenizer)
        self.generation = getattr(model, "generation_config", None)

    async def probe(
        self, name: str, teacher: TorchEngine, adapter: str | None, prompts: Sequence[Prompt]
    ) -> Probe:
        shared = self.shared.get(name)
        encode = self.encode if shared is None else shared.encode
        ids = {prompt.uid: list(self.encode(prompt).ids) for prompt in prompts}
        seen = {p.uid: [*self._before(name, p, encode), *encode(p).ids] for p in prompts}
        answers = await self._answers(self.student, ids, self._sampling(self.encode, self.generation))
        judged = [prompt for prompt in prompts if prompt.answer is not None]
        scores = []
        for who, asked, coder in ((teacher, seen, encode), (self.student, ids, self.encode)):
            if who is teacher and adapter is not None:  # engines sample without adapters
                scores.append(math.nan)
                continue
            generation = self.generation if coder is self.encode else teacher.model.generation_config
            found = await self._answers(who, asked, self._sampling(coder, generation, greedy=True))
            scores.append(self._score(judged, found, coder))
        distill = self.recipe.distill
        top_k = distill.top_k if distill is not None and distill.signal != "full" else TOP_K
        sums, count = dict.fromkeys(MEASURES, 0.0), 0
        for uid, answer in answers.items():
            aligned = None if shared is None else shared.align(answer)
            own = await self._logprobs(self.student, ids[uid], answer)
            theirs = await self._logprobs(teacher, seen[uid], aligned.ids if aligned else answer, adapter)
            if aligned is not None and shared is not None:
                mine, places = aligned.pairs[(aligned.pairs < POSITIONS).all(1)].unbind(1)
                known = (shared.to_teacher >= 0).nonzero().squeeze(1)
                own, theirs = own[mine][:, known], theirs[places][:, shared.to_teacher[known]]
            width = min(own.shape[1], theirs.shape[1])
            if len(own):
                one = compare(own[:, :width], theirs[:, :width], top_k, (scores[0], scores[1]))
                sums = {what: total + len(own) * getattr(one, what) for what, total in sums.items()}
            count += len(own)
        if shared is not None:
            require_mass(name, sums["mass"] / max(1, count))
        means = {what: total / max(1, count) for what, total in sums.items()}
        return Probe(**means, scores=(scores[0], scores[1]), shared=shared is not None)

    def _sampling(self, encode: Encoder, generation: Any, *, greedy: bool = False) -> Sampling:
        rollout = self.recipe.rollout
        stop = stop_ids(generation, encode.tokenizer, rollout.stop if encode is self.encode else ())
        temperature = 1.0 if greedy else rollout.temperature
        return Sampling(rollout.max_new_tokens, stop, temperature=temperature, greedy=greedy)

    def _before(self, name: str, prompt: Prompt, encode: Encoder) -> list[int]:
        text = before_text(self.recipe.teachers[name], prompt)
        return encode.tokenizer.encode(text, add_special_tokens=False)

    async def _answers(
        self, engine: Engine, ids: Mapping[int, list[int]], sampling: Sampling
    ) -> dict[int, list[int]]:
        counters = {uid: Counter(self.recipe.seed, uid) for uid in ids}
        asked = (engine.generate(GenerateRequest(ids[uid], sampling, counters[uid])) for uid in ids)
        return {uid: g.tokens.tolist() for uid, g in zip(ids, await gather_all(asked), strict=True)}

    async def _logprobs(
        self, engine: Engine, prompt: list[int], answer: list[int], adapter: str | None = None
    ) -> Tensor:
        """Return log-probabilities at the first POSITIONS tokens of a response."""
        answer = answer[:POSITIONS]
        request = ScoreRequest([*prompt, *answer], len(prompt), adapter=adapter)
        scores = await engine.score(request, ScoreOptions(hidden=True))
        assert scores.hidden is not None
        head = engine.head()
        logits_RV = head.logits(scores.hidden.to(head.weight.device)).float().cpu()
        return (logits_RV / self.recipe.compare_temperature).log_softmax(-1)

    def _score(self, prompts: Sequence[Prompt], answers: Mapping[int, list[int]], encode: Encoder) -> float:
        """Return the mean of the task's checker, or NaN if no prompt has an answer."""
        found = []
        for prompt in prompts:
            tokens = answers[prompt.uid]
            text = str(encode.tokenizer.decode(tokens, skip_special_tokens=True))
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

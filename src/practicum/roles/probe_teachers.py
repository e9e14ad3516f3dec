"""Compare each teacher with the student on a few prompts before a run.

The student's engine samples the responses. A teacher may be in another process: it gets all its requests at
once (`Questions`). A server returns only the most likely tokens, so the table has a bound of the mass (≥), an
estimate of the KL from the student's tokens (~), and a dash for what the server can't return.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from torch import Tensor, tensor
from transformers import PreTrainedModel

from practicum.concurrency.event_loop import run_async
from practicum.concurrency.gather import gather_all, in_thread
from practicum.engines.protocol import (
    Counter,
    Engine,
    GenerateRequest,
    Sampling,
    ScoreOptions,
    Scorer,
    ScoreRequest,
    Scores,
)
from practicum.engines.torch.make_torch import TorchKind
from practicum.errors import EngineError, TeacherError
from practicum.models.attention import OutputHead
from practicum.models.load_model import load_tokenizer, stop_ids
from practicum.recipe.derived import parts_of, traits_of
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.teacher_sections import Teacher
from practicum.rewards.score_functions import RewardFunctions, RewardSample
from practicum.sessions.chat import make_encoder
from practicum.tasks.prompts import Encoder, Prompt
from practicum.tasks.stream import make_stream
from practicum.teachers.load_teachers import Teachers, load_teachers, top_k
from practicum.teachers.route import before_text, teacher_of
from practicum.teachers.shared_tokens import require_mass, shared_tokens
from practicum.teachers.teacher_checks import renderings
from practicum.teachers.teacher_scorer import TeacherScorer

PROMPTS, DRAWN, POSITIONS = 8, 128, 64
"""Number of prompts to probe each teacher on, the number drawn to find them, and tokens of each response."""
TOP_K = 32
"""Default top-k if the recipe has none."""
SERVED_K = 20
"""The same of teachers that return only their most likely tokens: vLLM's default limit."""
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
    """The teacher's mass on the student's top-k, or on those in its own top-k if `partial`."""
    tail: float
    """The teacher's mass beyond its own top-k."""
    entropy_gap: float
    """The student's entropy minus the teacher's."""
    kl: float
    """KL(student || teacher), over the whole vocabulary. If `partial`, the mean over the student's tokens."""
    scores: tuple[float, float]
    """Mean score of greedy responses: the teacher's and the student's."""
    shared: bool = False
    """True if the teacher has another tokenizer: all numbers are of the tokens that both have."""
    partial: bool = False
    """True if the teacher returns only its most likely tokens. Measures that need more are NaN."""

    @property
    def signal(self) -> str:
        wide = "sampled" if self.partial else "full"
        return "shared" if self.shared else "top_k" if self.tail <= TAIL else wide


@dataclass(frozen=True, slots=True)
class Questions:
    """Requests to a teacher: prompts to answer, and sequences to score."""

    prompts: Sequence[GenerateRequest]
    rows: Sequence[ScoreRequest]
    temperature: float
    vocab: int | None
    """Outputs of the student. None for a teacher with another tokenizer."""
    top_ks: Sequence[int]
    """If the teacher has no output head, ask for the first of these top-k that it accepts."""


Replies = tuple[Sequence[list[int]] | None, Sequence[Tensor | Scores]]
"""Responses, or None if the teacher can't sample, and of each row the log-probabilities of all tokens [R, V]
or the scores of the most likely ones."""
Ask = Callable[[Questions], Coroutine[Any, Any, Replies]]


def asks_of(teachers: Teachers) -> dict[str, Ask]:
    """Return how to ask each of these teachers, which are in this process or connected to it."""

    def ask_of(name: str) -> Ask:
        async def ask(questions: Questions) -> Replies:
            async with in_thread(teachers.awake(name)):
                return await _replies(teachers.scorers[name], questions)

        return ask

    return {name: ask_of(name) for name in teachers.scorers}


async def _replies(teacher: TeacherScorer, questions: Questions) -> Replies:
    engine, head = teacher.scorers[0], None
    rows = [replace(row, adapter=teacher.adapter) for row in questions.rows]
    try:
        head = await asyncio.to_thread(engine.head)
    except EngineError:  # a server
        scores = await _most_likely(engine, rows, questions)
    else:
        scores = await _distributions(engine, rows, head, questions.temperature)
    if teacher.adapter is not None:  # engines sample without adapters
        return None, scores
    generation = getattr(getattr(engine, "model", None), "generation_config", None)
    ends = getattr(generation, "eos_token_id", None)
    ends = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
    asked = [replace(p, sampling=replace(p.sampling, stop=p.sampling.stop | ends)) for p in questions.prompts]
    try:
        return await _answers(engine, asked), scores
    except EngineError:  # it only scores
        return None, scores


async def _answers(engine: Scorer, requests: Sequence[GenerateRequest]) -> list[list[int]]:
    return [answer.tokens.tolist() for answer in await gather_all(map(engine.generate, requests))]


async def _most_likely(
    engine: Scorer, rows: Sequence[ScoreRequest], questions: Questions
) -> Sequence[Scores]:
    *larger, last = questions.top_ks
    options = ScoreOptions(top_k=last, temperature=questions.temperature, vocab=questions.vocab)
    for k in larger:
        try:
            return await gather_all(engine.score(row, replace(options, top_k=k)) for row in rows)
        except (EngineError, TeacherError):  # above its limit, or the last one says what is wrong
            continue
    return await gather_all(engine.score(row, options) for row in rows)


async def _distributions(
    engine: Scorer, rows: Sequence[ScoreRequest], head: OutputHead, temperature: float
) -> list[Tensor]:
    """Return log-probabilities [R, V] of each row."""

    def logprobs(hidden_RH: Tensor | None) -> Tensor:
        assert hidden_RH is not None
        logits_RV = head.logits(hidden_RH.to(head.weight.device)).float().cpu()
        return (logits_RV / temperature).log_softmax(-1)

    scores = await gather_all(engine.score(row, ScoreOptions(hidden=True)) for row in rows)
    return [logprobs(score.hidden) for score in scores]


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


def compare_most_likely(
    student_MV: Tensor, teacher: Scores, tokens_M: Tensor, scores: tuple[float, float]
) -> Probe:
    """Compute as much of the probe as a teacher's logprobs of these tokens and of its top-k say."""
    overlap = mass = tail = math.nan
    if teacher.topk_ids is not None and teacher.topk_logprobs is not None:
        own_MK = student_MV.topk(teacher.topk_ids.shape[1]).indices
        both_MK = (teacher.topk_ids.unsqueeze(2) == own_MK.unsqueeze(1)).any(2).double()
        q_MK = teacher.topk_logprobs.double().exp()
        overlap, tail = float(both_MK.mean()), float(1 - q_MK.sum(1).mean())
        mass = float((both_MK * q_MK).sum(1).mean())
    own_M = student_MV.gather(1, tokens_M.unsqueeze(1)).squeeze(1)
    kl = float((own_M - teacher.logprobs).double().mean())
    return Probe(overlap, mass, tail, math.nan, kl, scores, partial=True)


def probe_teachers(recipe: Recipe, model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Return a table of all teachers that can be loaded here or have a URL, and warnings. Refuse unfit
    models."""
    specs = {
        name: teacher if teacher.url is not None else teacher.model_copy(update={"placement": "colocated"})
        for name, teacher in recipe.teachers.items()
        if _probed(teacher)
    }
    if not specs or recipe.on_ray:
        return [], []
    if not _comparable(recipe, model):
        load_teachers(specs, None, recipe.runtime, recipe.model, recipe.seed, model).close()
        return [], []
    engine = TorchKind().for_rollout(recipe.rollout, recipe.model.path, model)
    teachers = load_teachers(specs, None, recipe.runtime, recipe.model, recipe.seed, model)
    with closing(teachers), closing(engine):
        return compare_teachers(recipe, model, engine, asks_of(teachers))


def compare_teachers(
    recipe: Recipe, model: PreTrainedModel, engine: Engine, asks: Mapping[str, Ask]
) -> tuple[list[str], list[str]]:
    """Return the same of these teachers, by the student's engine: nothing if it has no output head. Raise a
    TeacherError if a teacher has too little in common with the student."""
    if not _comparable(recipe, model):
        return [], []
    try:
        prober = _Prober(recipe, engine, model)
    except EngineError:
        return [], []
    stream = make_stream(recipe.tasks, recipe.seed, needs_answer=recipe.tasks_needing_answer)
    parts = parts_of(recipe.teachers)
    prompts: dict[str, list[Prompt]] = {}
    for prompt in stream.take(DRAWN):
        routed = teacher_of(prompt, recipe.route, recipe.teachers, recipe.seed)
        for name in parts.get(routed, (routed,)):
            own = prompts.setdefault(name, [])
            own += [prompt] * (len(own) < PROMPTS)
    probes: dict[str, Probe] = {}
    for name, ask in asks.items():
        if name in prompts and _probed(recipe.teachers[name]):
            work, owner = prober.probe(name, ask, prompts[name]), f"the probe of teacher {name}"
            probes[name] = run_async(work, timeout=PROBE_S, owner=owner)
    words, _ = renderings(recipe, prober.encode.tokenizer, prober.shared)
    return table(probes, words), warnings_of(probes)


def _probed(teacher: Teacher) -> bool:
    return teacher.url is not None or teacher.engine_traits.runs_transformers


def _comparable(recipe: Recipe, model: PreTrainedModel) -> bool:
    single_turn, vision = recipe.agent.loop == "single_turn", traits_of(model.config.to_dict()).vision
    return recipe.distill is not None and single_turn and not vision


class _Prober:
    def __init__(self, recipe: Recipe, student: Engine, model: PreTrainedModel) -> None:
        self.recipe, self.student, self.head = recipe, student, student.head()
        self.encode = make_encoder(recipe, load_tokenizer(recipe.model))
        self.functions = RewardFunctions(recipe.tasks, recipe.reward)
        self.shared = shared_tokens(recipe, self.encode.tokenizer)
        self.generation = getattr(model, "generation_config", None)
        self.vocab = model.config.get_text_config().vocab_size

    async def probe(self, name: str, ask: Ask, prompts: Sequence[Prompt]) -> Probe:
        shared, temperature = self.shared.get(name), self.recipe.compare_temperature
        encode = self.encode if shared is None else shared.encode
        ids = {prompt.uid: list(self.encode(prompt).ids) for prompt in prompts}
        seen = {p.uid: [*self._before(name, p, encode), *encode(p).ids] for p in prompts}
        sampled = await _answers(self.student, self._requests(ids, self.encode))
        best = await _answers(self.student, self._requests(ids, self.encode, greedy=True))
        aligned = [None if shared is None else shared.align(answer) for answer in sampled]
        questions = Questions(
            self._requests(seen, encode, greedy=True),
            [
                _row(seen[uid], answer if found is None else found.ids)
                for uid, answer, found in zip(ids, sampled, aligned, strict=True)
            ],
            temperature,
            self.vocab if shared is None else None,
            self._top_ks() if shared is None else [0],
        )
        answers, theirs = await ask(questions)
        judged = self._score(prompts, answers, encode), self._score(prompts, best, self.encode)
        rows = [_row(ids[uid], answer) for uid, answer in zip(ids, sampled, strict=True)]
        mine = await _distributions(self.student, rows, self.head, temperature)
        distill = self.recipe.distill
        k = distill.top_k if distill is not None and distill.signal != "full" else TOP_K
        sums, count = dict.fromkeys(MEASURES, 0.0), 0
        for answer, own, their, found in zip(sampled, mine, theirs, aligned, strict=True):
            tokens = tensor(answer[:POSITIONS])
            if found is not None and shared is not None:
                at, places = found.pairs[(found.pairs < POSITIONS).all(1)].unbind(1)
                own, tokens, their = own[at], tokens[at], _picked(their, places)
                if isinstance(their, Tensor):
                    known = (shared.to_teacher >= 0).nonzero().squeeze(1)
                    own, their = own[:, known], their[:, shared.to_teacher[known]]
            if not len(own):
                continue
            if isinstance(their, Tensor):
                both = min(own.shape[1], their.shape[1])
                one = compare(own[:, :both], their[:, :both], k, judged)
            else:
                one = compare_most_likely(own, their, tokens, judged)
            sums = {what: total + len(own) * getattr(one, what) for what, total in sums.items()}
            count += len(own)
        means = {what: total / max(1, count) for what, total in sums.items()}
        if shared is not None and not math.isnan(means["mass"]):
            require_mass(name, means["mass"])
        partial = any(isinstance(their, Scores) for their in theirs)
        return Probe(**means, scores=judged, shared=shared is not None, partial=partial)

    def _top_ks(self) -> list[int]:
        asked = top_k(self.recipe.distill)
        return [asked] if asked else [SERVED_K, 0]

    def _requests(
        self, ids: Mapping[int, list[int]], encode: Encoder, *, greedy: bool = False
    ) -> list[GenerateRequest]:
        rollout, own = self.recipe.rollout, encode is self.encode
        stop = stop_ids(self.generation if own else None, encode.tokenizer, rollout.stop if own else ())
        temperature = 1.0 if greedy else rollout.temperature
        sampling = Sampling(rollout.max_new_tokens, stop, temperature=temperature, greedy=greedy)
        return [GenerateRequest(ids[uid], sampling, Counter(self.recipe.seed, uid)) for uid in ids]

    def _before(self, name: str, prompt: Prompt, encode: Encoder) -> list[int]:
        text = before_text(self.recipe.teachers[name], prompt)
        return encode.tokenizer.encode(text, add_special_tokens=False)

    def _score(
        self, prompts: Sequence[Prompt], answers: Sequence[list[int]] | None, encode: Encoder
    ) -> float:
        """Return the mean of the task's checker, or NaN without responses or if no prompt has an answer."""
        found = []
        for prompt, tokens in zip(prompts, answers or (), strict=answers is not None):
            if prompt.answer is None:
                continue
            text = str(encode.tokenizer.decode(tokens, skip_special_tokens=True))
            known = (prompt.answer, prompt.row, prompt.task, prompt.domain)
            sample = RewardSample("", text, *known, finish="", key=str(prompt), response_tokens=len(tokens))
            found.append(self.functions.check(sample))
        return fmean(found) if found else math.nan


def _row(prompt: Sequence[int], answer: Sequence[int]) -> ScoreRequest:
    return ScoreRequest([*prompt, *answer[:POSITIONS]], len(prompt), "a response of the probe")


def _picked(scored: Tensor | Scores, places: Tensor) -> Tensor | Scores:
    """Return the scores at these places, of a teacher with another tokenizer."""
    if isinstance(scored, Tensor):
        return scored[places]
    return replace(scored, logprobs=scored.logprobs[places])


def table(probes: Mapping[str, Probe], templates: Mapping[str, str]) -> list[str]:
    """Return the table's lines. `templates` has a word for each teacher if prompts have chat templates."""
    if not probes:
        return []
    titles = ("teacher", "overlap", "mass", "tail", "entropy gap", "KL", "its score", "student's", "signal")
    titles += ("template",) * bool(templates)
    rows = [titles] + [
        (
            *(name, _cell(p.overlap, ".2f"), _cell(p.mass, ".3f", "≥" * p.partial), _cell(p.tail, ".4f")),
            *(_cell(p.entropy_gap, "+.2f"), _cell(p.kl, ".3f", "~" * p.partial)),
            *(*(_cell(score, ".2f") for score in p.scores), p.signal),
            *((templates[name],) if templates else ()),
        )
        for name, p in probes.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]


def _cell(value: float, form: str, sign: str = "") -> str:
    return "–" if math.isnan(value) else f"{sign}{value:{form}}"


def warnings_of(probes: Mapping[str, Probe]) -> list[str]:
    warnings = []
    for name, probe in probes.items():
        teacher, student = probe.scores
        if teacher < student:
            warnings.append(
                f"teacher {name} scores less than the student on its prompts: {teacher:.2f} against "
                f"{student:.2f} (mean over greedy responses)"
            )
        if (mass := probe.mass + probe.tail * probe.partial) < FAR:
            most = "at most " * probe.partial
            warnings.append(
                f"teacher {name} has {most}{mass:.0%} of its mass on the student's most likely tokens, so "
                "its scores say little: train on its responses first (algorithm.loss: supervised)"
            )
    return warnings

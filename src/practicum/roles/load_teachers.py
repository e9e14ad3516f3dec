"""The start of the teachers: each is loaded, started or probed, and gives the learner what it needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from practicum.concurrency.event_loop import run_async
from practicum.devices import pick_device
from practicum.engines.protocol import ScoreOptions
from practicum.errors import RecipeError
from practicum.learning.distill_loss import DistillSettings, Head
from practicum.models.attention import OutputHead
from practicum.models.model_files import read_config
from practicum.places.adapter_teachers import AdapterTeacher, SharedBase, base_spec, share_base
from practicum.places.model_cache import ModelCache, Sleepable
from practicum.places.place import TeacherPlace
from practicum.places.remote_teacher import RemoteTeacher, probe_teacher
from practicum.places.torch_teacher import ColocatedTeacher, OwnTeacher, load_teacher
from practicum.places.vllm_base import VllmBase, share_vllm_base
from practicum.places.vllm_teacher import VllmTeacher
from practicum.recipe.derived import (
    base_groups,
    compare_temperature,
    has_own_process,
    has_policy_loss,
    own_options,
    teacher_numbers,
)
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.teacher_sections import Teacher
from practicum.roles.teachers import Teachers

GIB = 2**30


def probe_servers(recipe: Recipe, vocab: int, longest: Mapping[str, int]) -> list[str]:
    """Whether teachers behind URLs can do what the recipe asks, each for its longest sequence in tokens."""
    options = ScoreOptions(top_k=top_k(recipe))
    findings = []
    for name, teacher in recipe.teachers.items():
        if teacher.url is None:
            continue
        with closing(RemoteTeacher(name, teacher)) as place:
            probe = probe_teacher(place, options, vocab, longest[name])
            run_async(
                probe, timeout=teacher.deadline_s, owner=f"the probe of teacher {name} at {teacher.url}"
            )
        findings.append(f"teacher {name}: {teacher.url} scores prompts, twice the same")
    return findings


def load_teachers(
    recipe: Recipe,
    student: PreTrainedModel,
    others: Sequence[Sleepable] = (),
    *,
    names: Collection[str] | None = None,
    heads: Mapping[str, OutputHead] | None = None,
) -> Teachers:
    """The recipe's teachers (or those of these `names`), ready: colocated ones asleep, own ones loaded.

    Servers are taken as probed (`probe_servers`). If one teacher can't be had, none stays behind. `others`
    are colocated models that share the memory budgets; `heads` are output heads of teachers elsewhere.
    """
    chosen = recipe.teachers.keys() if names is None else names
    with ExitStack() as undo:
        places: dict[str, TeacherPlace] = {}
        for name, teacher in recipe.teachers.items():
            if name in chosen and name not in places:
                places |= _places(name, teacher, recipe, student, chosen)
                undo.callback(places[name].close)
        places = {name: places[name] for name in recipe.teachers if name in chosen}
        device = pick_device(recipe.model.device)  # the student may be without weights
        known = {name: _moved(head, device) for name, head in (heads or {}).items()}
        known |= _heads(recipe, places, (ColocatedTeacher, AdapterTeacher), device)
        residency = make_model_cache(recipe, [*_sleepers(places.values()), *others])
        for name, place in places.items():
            if isinstance(place, OwnTeacher):
                place.ready(own_options(recipe.teachers[name]).start_s)
        known |= _heads(recipe, places, (OwnTeacher,), device)
        _check_heads(known, student)
        undo.pop_all()
        return Teachers(places, residency, known)


def vllm_teacher(name: str, recipe: Recipe, student: PreTrainedModel | None, replicas: int) -> VllmTeacher:
    """A teacher that vLLM computes; the student is needed for a copy of it only."""
    return VllmTeacher(name, recipe.teachers[name], student, most=top_k(recipe), replicas=replicas)


def top_k(recipe: Recipe) -> int:
    """The largest top-k that teachers are asked for."""
    distill = recipe.distill
    return distill.top_k if distill is not None and distill.signal == "top_k" else 0


def make_model_cache(recipe: Recipe, sleepers: Sequence[Sleepable]) -> ModelCache:
    """Colocated models, put to sleep within the recipe's budgets."""
    return ModelCache(sleepers, _bytes(recipe.runtime.teachers_gb), _bytes(recipe.runtime.teachers_host_gb))


def signal_width(recipe: Recipe) -> int:
    """Hidden size of the widest teacher by their configs, if hidden states are what is written of them."""
    if recipe.distill is None or recipe.distill.signal != "full":
        return 0
    widths = []
    for teacher in recipe.teachers.values():
        on_student = teacher.student is not None or (teacher.adapter is not None and teacher.model is None)
        path = recipe.model.path if on_student else teacher.model
        if path is not None:
            widths.append(read_config(path).get_text_config().hidden_size)
        elif recipe.model.make is not None:
            widths.append(recipe.model.make.hidden)
    return max(widths)


def teacher_losses(recipe: Recipe, teachers: Teachers) -> DistillSettings:
    """What the learner needs to know, with teachers numbered in the recipe's order."""
    assert recipe.distill is not None
    numbers = teacher_numbers(recipe)
    shares = recipe.route.shares
    return DistillSettings(
        recipe.distill,
        compare_temperature(recipe),
        heads=[_cut_head(teachers.heads[name]) for name in numbers] if teachers.heads else (),
        alone=not has_policy_loss(recipe),
        shares=None if shares is None else {numbers[name]: share for name, share in shares.items()},
    )


def _places(
    name: str, teacher: Teacher, recipe: Recipe, student: PreTrainedModel, chosen: Collection[str]
) -> dict[str, TeacherPlace]:
    """Where a teacher lives; with it, those of the chosen ones that share its base."""
    group = next((group for group in base_groups(recipe.teachers) if name in group), [])
    if group:
        sharing = {member: recipe.teachers[member] for member in group if member in chosen}
        if teacher.engine == "torch":
            return dict(share_base(recipe, sharing, student))
        replicas = own_options(teacher).replicas
        return dict(share_vllm_base(recipe, sharing, student, most=top_k(recipe), replicas=replicas))
    if teacher.url is not None:
        return {name: RemoteTeacher(name, teacher)}
    if teacher.engine == "vllm":
        return {name: vllm_teacher(name, recipe, student, own_options(teacher).replicas)}
    if has_own_process(teacher.placement):
        spec = base_spec(recipe, teacher) if teacher.student is None else recipe.model
        place = OwnTeacher(name, teacher, model=spec, seed=recipe.seed)
        place.start()
        return {name: place}
    return {name: ColocatedTeacher(name, teacher, load_teacher(name, teacher, student))}


def _sleepers(places: Iterable[TeacherPlace]) -> list[Sleepable]:
    """The models that are woken when they are needed, each once."""
    sleepers: list[Sleepable] = []
    for place in places:
        if isinstance(place, AdapterTeacher):
            base = place.base
            assert isinstance(base, SharedBase | VllmBase)
            sleepers += [base] if base.sleeps and base not in sleepers else []
        elif isinstance(place, ColocatedTeacher | VllmTeacher) and place.sleeps:
            sleepers.append(place)
    return sleepers


def _heads(
    recipe: Recipe,
    places: dict[str, TeacherPlace],
    kinds: tuple[type[ColocatedTeacher | AdapterTeacher | OwnTeacher], ...],
    device: torch.device,
) -> dict[str, OutputHead]:
    """Output heads of the teachers of these kinds, on the student's device, if the signal needs them."""
    if recipe.distill is None or recipe.distill.signal != "full":
        return {}
    heads = {name: p.head() for name, p in places.items() if isinstance(p, kinds)}
    return {name: _moved(head, device) for name, head in heads.items()}


def _moved(head: OutputHead, device: torch.device) -> OutputHead:
    bias = None if head.bias is None else head.bias.to(device)
    return replace(head, weight=head.weight.to(device), bias=bias)


def _check_heads(heads: dict[str, OutputHead], student: PreTrainedModel) -> None:
    own = student.config.get_text_config().vocab_size
    for name, head in heads.items():
        if head.weight.shape[0] != own:
            raise RecipeError(
                f"teachers.{name}.model",
                f"an output head for {head.weight.shape[0]} tokens",
                f"{own}, the student's",
                "compare on the teacher's best tokens instead: distill.signal: top_k",
            )


def _cut_head(head: OutputHead) -> Head:
    """The head for hidden states that are filled up to the widest teacher's size."""
    width = head.weight.shape[1]
    return lambda hidden_MH: head.logits(hidden_MH[:, :width])


def _bytes(gigabytes: float | None) -> float | None:
    return None if gigabytes is None else gigabytes * GIB

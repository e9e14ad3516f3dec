"""All roles in this process: the learner and the engine share one model object."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from practicum.checks.watch import Watch
from practicum.dataplane.fields import check_padding_rules
from practicum.dataplane.memory import MemoryStore
from practicum.dataplane.plan import Plan, evaluation_plan
from practicum.dataplane.store import Store
from practicum.errors import RecipeError
from practicum.learning.critic import Critic
from practicum.learning.learner import Learner
from practicum.learning.scorer import Scorer
from practicum.learning.trunk import Trunk
from practicum.models.experts import routes_of
from practicum.models.load import context_length, load_model, load_tokenizer, stop_ids
from practicum.models.vision import AXES
from practicum.recipe.schema import Recipe
from practicum.recipe.ways import measures
from practicum.rollout.encoder import make_encoder
from practicum.rollout.protocol import Engine
from practicum.rollout.tools.toolbox import Toolbox
from practicum.rollout.torch_engine import TorchEngine
from practicum.runtime.credit import Credit
from practicum.runtime.faculty import Faculty, Staff
from practicum.runtime.hiring import hire, make_residency, teaching_of
from practicum.runtime.jury import Jury, Panel, seat
from practicum.runtime.practice import Practice, padding_fields
from practicum.runtime.student import Student
from practicum.runtime.valuation import Valuation
from practicum.tasks.rewards import Judge
from practicum.teachers.residency import Residency


@dataclass(frozen=True, slots=True)
class Hired:
    """Models beside the student: teachers, reward models, and where the colocated ones sleep."""

    staff: Staff | None
    panel: Panel
    residency: Residency

    def close(self) -> None:
        """Stop all of them."""
        with ExitStack() as stack:
            stack.callback(self.panel.close)
            if self.staff is not None:
                stack.callback(self.staff.close)


@dataclass(slots=True)
class Roles:
    """Everyone who takes part in a run."""

    store: Store
    tokenizer: PreTrainedTokenizerBase
    stop: frozenset[int]
    engine: Engine
    practice: Practice
    faculty: Faculty | None
    examiner: Practice
    student: Student
    credit: Credit
    valuation: Valuation | None
    hired: Hired
    toolbox: Toolbox
    ranks: int = 1
    """Data-parallel ranks of the learner."""

    def close(self) -> None:
        """Stop what runs in the background."""
        with ExitStack() as stack:
            stack.callback(self.engine.close)
            stack.callback(self.toolbox.close)
            stack.callback(self.hired.close)


def set_threads(threads: int | None) -> int:
    """Torch's threads: as the recipe says, else as OMP_NUM_THREADS says, else one per core."""
    wanted = threads or int(os.environ.get("OMP_NUM_THREADS", 0)) or (os.cpu_count() or 1)
    torch.set_num_threads(wanted)
    return wanted


def rollout_context(recipe: Recipe, model_context: int | None) -> int:
    """Tokens of KV memory for one sequence: the recipe's, else 1,024 of prompt and the answer."""
    if recipe.rollout.context is not None:
        return recipe.rollout.context
    needed = 1024 + recipe.rollout.max_new_tokens
    return needed if model_context is None else min(needed, model_context)


def load_reference(recipe: Recipe, student: PreTrainedModel) -> PreTrainedModel:
    """The reference policy: a model of the student's vocabulary, or the student's start."""
    path, key = recipe.algorithm.kl.reference, "algorithm.kl.reference"
    reference = load_model(recipe.model, recipe.seed, path=path, key=key)
    own, other = (m.config.get_text_config().vocab_size for m in (student, reference))
    if own != other:
        expected = f"a model of the student's vocabulary of {own}"
        raise RecipeError(key, f"{path} with a vocabulary of {other} tokens", expected)
    return reference


def hire_models(recipe: Recipe, plan: Plan, student: PreTrainedModel) -> Hired:
    """Teachers and reward models, as far as the plan or evaluations ask them."""
    panel = Panel()
    if recipe.reward.models and ("reward" in plan or measures(recipe)):
        # Another tokenizer may need more tokens than the student's for the same text.
        panel = seat(recipe, room=2 * rollout_context(recipe, None))
    with ExitStack() as undo:
        undo.callback(panel.close)
        staff = hire(recipe, student, panel.sleepers()) if "teachers" in plan else None
        residency = make_residency(recipe, panel.sleepers()) if staff is None else staff.residency
        undo.pop_all()
    return Hired(staff, panel, residency)


def start_local(recipe: Recipe, plan: Plan, watch: Watch) -> Roles:
    """Load the models and connect the roles; if that fails, nothing stays behind."""
    set_threads(recipe.runtime.threads)
    model = load_model(recipe.model, recipe.seed)
    hired = hire_models(recipe, plan, model)
    with ExitStack() as undo:
        undo.callback(hired.close)
        roles = _connect(recipe, plan, watch, model, hired)
        undo.pop_all()
    return roles


def _connect(recipe: Recipe, plan: Plan, watch: Watch, model: PreTrainedModel, hired: Hired) -> Roles:
    tokenizer, store, staff = load_tokenizer(recipe.model), MemoryStore(), hired.staff
    on_nonfinite = partial(watch, "finite")
    learner = Learner(
        model,
        recipe.train,
        recipe.algorithm,
        temperature=recipe.rollout.temperature,
        teaching=None if staff is None else teaching_of(recipe, staff),
        on_nonfinite=on_nonfinite,
    )
    reference = None
    if "ref_logprobs" in plan:
        reference = Scorer(Trunk(load_reference(recipe, model), recipe.train))
    context = rollout_context(recipe, context_length(model))
    slots, keep_tokens = recipe.rollout.slots, recipe.rollout.keep_tokens
    engine = TorchEngine(model, slots=slots, context=context, keep_tokens=keep_tokens)
    vocab = model.config.get_text_config().vocab_size
    faculty = None if staff is None else Faculty(recipe, plan, store, staff, engine, tokenizer, vocab=vocab)
    valuation = None
    if recipe.critic is not None:
        critic = Critic(model, recipe.train, recipe.critic, on_nonfinite=on_nonfinite)
        valuation = Valuation(recipe, plan, store, critic)
    judge, exam, toolbox = Judge(recipe.tasks, recipe.reward), evaluation_plan(), Toolbox(recipe.agent.tools)
    if "pad" in plan:
        check_padding_rules(padding_fields(plan))
    _check_routers(plan, model)
    practise = partial(
        Practice,
        recipe,
        store=store,
        engine=engine,
        encoder=make_encoder(recipe, tokenizer),
        judge=judge,
        toolbox=toolbox,
        context=context,
        config=model.config,
        widths=_widths(recipe, model, staff),
    )

    def jury(plan: Plan) -> Jury | None:
        asked = hired.panel.places and "reward" in plan
        return Jury(recipe, hired.panel, hired.residency, engine) if asked else None

    return Roles(
        store=store,
        tokenizer=tokenizer,
        stop=stop_ids(model, tokenizer, recipe.rollout.stop),
        engine=engine,
        practice=practise(plan, faculty=faculty, jury=jury(plan)),
        faculty=faculty,
        examiner=practise(exam, jury=jury(exam)),
        student=Student(recipe, plan, store, learner, reference, watch),
        credit=Credit(recipe, plan, store),
        valuation=valuation,
        hired=hired,
        toolbox=toolbox,
    )


def _check_routers(plan: Plan, model: PreTrainedModel) -> None:
    """A model whose experts are to be replayed has routers that can be recorded."""
    if not any("routed_experts" in stage.writes for stage in plan):
        return
    routes = routes_of(model)
    if routes is None or not routes.can_replay:
        found = f"true with {type(model).__name__}, whose routers can't be recorded and replayed"
        raise RecipeError("train.replay_experts", found, "false")


def _widths(recipe: Recipe, model: PreTrainedModel, staff: Staff | None) -> dict[str, int]:
    """The trailing axes of fields, by their letters in the fields table."""
    widths = {"D": AXES}
    if recipe.distill is not None:
        widths["K"] = recipe.distill.top_k
    if staff is not None:
        widths["H"] = staff.width
    if (routes := routes_of(model)) is not None:
        widths |= {"L": routes.layers, "E": routes.per_token}
    return widths

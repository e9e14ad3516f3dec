"""Reward models in each placement: this process, separate processes, or a server.

A new placement is a function in `PLACEMENTS`, and its recipe section.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial

from transformers import PreTrainedTokenizerBase

from practicum.concurrency.event_loop import run_async
from practicum.engines.protocol import Sleeper
from practicum.errors import RecipeError, RecipeErrors
from practicum.models.model_files import must_read, read_config, require_model_folder
from practicum.processes.dispatch import Dispatcher
from practicum.processes.host import Host
from practicum.recipe.checks.value_forms import fill
from practicum.recipe.schema.rollout_sections import Rollout
from practicum.recipe.schema.teacher_sections import RewardModel
from practicum.rewards.judge import CannotScore, Judge, JudgeInput, check_label
from practicum.rewards.local_judges import load_judge, load_tokenizer
from practicum.rewards.remote_judge import RemoteJudge

_CLASSIFIER = "ForSequenceClassification"


class RewardScorer:
    """A reward model: identical judges, a deadline for each case if they have none, and its recipe key."""

    def __init__(self, name: str, judges: Sequence[Judge], *, deadline_s: float | None) -> None:
        self.name, self.judges, self.sleeper = name, list(judges), judges[0].sleeper
        self.key = f"reward.models.{name}"
        self._deadline_s, self._dispatcher = deadline_s, Dispatcher(self.judges)

    async def judge(self, case: JudgeInput) -> float | CannotScore:
        """Return the model's score of a response, or the reason for none. A sleeping model must be awake."""
        try:
            return await self._dispatcher.run(
                lambda judge: judge.judge(case),
                # Load is measured in characters, independent of the tokenizer.
                load=len(case.prompt) + len(case.response),
                deadline_s=self._deadline_s,
                abort=lambda judge, why: judge.abort(why),
                names=(f"reward model {self.name}", case.name, f"{self.key}.deadline_s"),
            )
        except CannotScore as failure:
            return failure

    def close(self) -> None:
        with ExitStack() as stack:
            for judge in self.judges:
                stack.callback(judge.close)


class HostedJudge(Judge):
    """A judge in a separate process."""

    def __init__(self, host: Host) -> None:
        self.host, self.ready, self.abort, self.close = host, host.ready, host.kill, host.close

    async def judge(self, case: JudgeInput) -> float:
        return await self.host.ask(Judge.judge, case)


def _load_colocated(name: str, spec: RewardModel, room: int) -> list[Judge]:
    return [load_judge(name, spec, room)]


def _start_own(name: str, spec: RewardModel, room: int) -> list[Judge]:
    own = spec.own_options
    start = partial(
        Host,
        f"reward model {name}",
        partial(_load_colocated, name, spec, room),
        threads=own.threads,
        deadline_s=spec.deadline_s,
    )
    return [HostedJudge(start()) for _ in range(own.replicas)]


PLACEMENTS: dict[str, Callable[[str, RewardModel, int], list[Judge]]] = {
    "colocated": _load_colocated,
    "own": _start_own,
    "url": lambda name, spec, room: [RemoteJudge(name, spec)],
}


def place_model(name: str, spec: RewardModel, room: int) -> RewardScorer:
    """Start a reward model at its placement."""
    deadline_s = None if spec.url is not None else spec.deadline_s
    return RewardScorer(name, PLACEMENTS[spec.placement_name](name, spec, room), deadline_s=deadline_s)


def judge_room(rollout: Rollout) -> int:
    """Return the context that a reward model needs. Its tokenizer may use more tokens than the student's."""
    return 2 * rollout.context_for(None)


def load_reward_models(
    specs: Mapping[str, RewardModel], room: int, elsewhere: Mapping[str, RewardScorer] | None = None
) -> dict[str, RewardScorer]:
    """Load all reward models. If one fails, close the others.

    `room` is the length of the longest prompt and response in the model's tokens. Call `probe_reward_servers`
    before. Models `elsewhere` are used as they are.
    """
    scorers: dict[str, RewardScorer] = dict(elsewhere or {})
    with ExitStack() as undo:
        for name, spec in specs.items():
            if name not in scorers:
                scorers[name] = place_model(name, spec, room)
                undo.callback(scorers[name].close)
        for scorer in scorers.values():
            for judge in scorer.judges:
                judge.ready()
        undo.pop_all()
    return {name: scorers[name] for name in specs}


def sleeping_models(scorers: Mapping[str, RewardScorer]) -> dict[str, Sleeper]:
    """Return the models that may sleep, for the cache that wakes them."""
    return {scorer.key: scorer.sleeper for scorer in scorers.values() if scorer.sleeper is not None}


def probe_reward_servers(specs: Mapping[str, RewardModel], *, chat: bool) -> list[str]:
    """Check that reward models behind URLs can score. `chat` means that some prompts are conversations."""
    findings = []
    for name, spec in specs.items():
        if spec.url is not None:
            with closing(RemoteJudge(name, spec)) as judge:
                owner = f"the probe of reward model {name} at {spec.url}"
                finding = run_async(judge.probe(chat=chat), timeout=spec.deadline_s, owner=owner)
            findings.append(f"reward model {name}: {spec.url} {finding}")
    return findings


def check_reward_models(
    specs: Mapping[str, RewardModel], student: PreTrainedTokenizerBase, longest: int
) -> list[str]:
    """Describe each local reward model without its weights. Raise RecipeErrors with all mistakes."""
    findings, problems = [], []
    for name, spec in specs.items():
        if spec.url is None:
            try:
                described = _check(f"reward.models.{name}", spec, student, longest)
                findings.append(f"reward model {name}: {described}")
            except RecipeError as problem:
                problems.append(problem)
    if problems:
        raise RecipeErrors("reward.models", problems)
    return findings


def _check(path: str, spec: RewardModel, student: PreTrainedTokenizerBase, longest: int) -> str:
    require_model_folder(spec.model, f"{path}.model")
    with must_read(spec.model, f"{path}.model", "a model in HuggingFace format"):
        config = read_config(spec.model)
    named = next(iter(getattr(config, "architectures", None) or ()), type(config).__name__)
    is_classifier = named.endswith(_CLASSIFIER)
    if is_classifier != (spec.kind == "classifier"):
        expected, advice = "a causal language model", "set kind: classifier"
        if spec.kind == "classifier":
            expected = f"a model with an architecture …{_CLASSIFIER}"
            advice = "for a language model, set kind: judge"
        raise RecipeError(f"{path}.model", f"{spec.model}, a {named}", expected, advice)
    if is_classifier:
        check_label(path, spec.label, config.num_labels or 0)
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    tokenizer = load_tokenizer(spec.model, path)
    needed, parts = longest, f"prompt and response of {longest} tokens"
    if not is_classifier:
        template = len(tokenizer.encode(fill(spec.prompt, {"prompt": "", "response": "", "answer": ""})))
        needed += template + spec.max_new_tokens
        parts += f" + {template} of the judge's prompt + {spec.max_new_tokens} of the reply"
    # Lengths are only known if the model has the student's tokenizer.
    if context is not None and needed > context and tokenizer.get_vocab() == student.get_vocab():
        advice = "use a model with a longer context, or shorten prompts, responses or the judge's prompt"
        raise RecipeError(f"{path}.model", f"{parts} = {needed}", f"at most its context of {context}", advice)
    return f"{named}, " + (
        f"output {spec.label} of {config.num_labels}" if is_classifier else "replies with a number"
    )

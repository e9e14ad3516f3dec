"""The recipe: every option there is, with its one default and a sentence about it.

Paths are relative to the file they are in; models, data and modules that are not there are looked for in the
working directory.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field

from practicum.recipe.algorithm_traits import estimator_traits, loss_traits
from practicum.recipe.counts import Counts
from practicum.recipe.reward_traits import REWARDS, is_instant
from practicum.recipe.schema.algorithm_sections import ESTIMATES, Algorithm, CriticSection
from practicum.recipe.schema.rollout_sections import ON_RAY, Agent, Rollout
from practicum.recipe.schema.runtime_section import Pools, Runtime
from practicum.recipe.schema.section import OwnName, Section, key, or_short_form, own_name, read_if, read_with
from practicum.recipe.schema.teacher_sections import Distill, Held, RewardModel, Route, Teacher

_HEAD_DIM = read_with(".family", "qwen3", "llama", "qwen3_moe", "qwen3_5", refused=False)
_MOE = read_with(".family", "qwen3_moe")
_WITH_CRITIC = read_if(
    lambda recipe: estimator_traits(recipe.algorithm.advantage).critic,
    "with algorithm.advantage {0.algorithm.advantage}",
    "remove it, or set algorithm.advantage to gae",
)
_ON_POLICY = read_if(
    lambda r: not r.is_supervised, "with algorithm.loss supervised", "its rewards are not learnt from"
)
_BESIDE = read_if(
    lambda recipe: recipe.reward.weight == 0,
    "with reward.weight {0.reward.weight:g}",
    "rewards that are learnt from are in the metrics anyway: remove it",
)
_JUDGED = read_if(
    lambda r: r.computes_reward or r.evaluates, "while no answer is judged", "set reward.log_only: true"
)
_FOR_SOME_TASK = read_if(
    lambda r: any(task.rewards is None for task in r.tasks.values()), "as tasks have theirs", refused=False
)
_LIMITED = read_if(
    lambda function: not is_instant(function.use),
    "with the built-in reward {0.use}",
    "it has no limit: remove it",
    of_section=True,
)
_IN_CHAT = read_if(
    lambda task: task.chat or task.kind is None, "without chat: true", "set chat: true", of_section=True
)
_TAUGHT = read_if(lambda r: r.teachers or r.distill, "without teachers", "add teachers, or remove it")
_SHARED = read_if(
    lambda r: len(r.teachers) != 1, "with one teacher", "it takes every prompt and has all of the loss"
)
_DECAYS = read_if(
    lambda recipe: recipe.train.schedule != "constant",
    "with train.schedule constant",
    "remove it, or set train.schedule to linear or cosine",
)
_EVALUATED = read_with("eval.rows")
_FILE, _DATASET = read_with(".file"), read_with(".dataset")
_ROWS = read_if(
    lambda task: task.kind is None,
    "with the built-in task {0.kind}",
    "remove it, or set file or dataset in place of kind",
    of_section=True,
)


class MakeModel(Section):
    """A tiny model with random weights and a character tokenizer, made on the spot."""

    family: Literal["qwen3", "llama", "gpt2", "qwen3_moe", "qwen3_5", "qwen2_5_vl"] = key(
        "qwen3", "Architecture; qwen3_moe has experts, qwen3_5 layers with a state, qwen2_5_vl sees pictures."
    )
    hidden: int = key(128, "Width of the residual stream.", ge=8)
    layers: int = key(4, "Number of transformer layers.", ge=1)
    heads: int = key(4, "Attention heads, with half as many for keys and values (gpt2: as many).", ge=1)
    head_dim: int = key(32, "Width of one head (gpt2, qwen2_5_vl: hidden / heads).", _HEAD_DIM, ge=4)
    context: int = key(512, "Longest sequence in tokens.", ge=16)
    experts: int = key(8, "Experts of each layer, of which a token takes two (qwen3_moe).", _MOE, ge=2)

    @property
    def kv_heads(self) -> int:
        return self.heads if self.heads % 2 else self.heads // 2


class Lora(Section):
    """A LoRA adapter: only small matrices beside the linear layers are trained, the model stays as it is."""

    rank: int = key(16, "Rank of the matrices.", ge=1)
    alpha: float = key(32.0, "What the adapter adds is multiplied by alpha / rank.", gt=0)
    targets: Literal["all"] | list[str] = key(
        "all", "Every linear layer, experts included; or endings of names: [q_proj, v_proj].", min_length=1
    )


class Model(Held):
    """The student: where its weights come from and how they are held."""

    path: str | None = key(
        None,
        "Folder in HuggingFace format, hub name, run folder or checkpoint. Set path or random_init.",
    )
    random_init: MakeModel | None = key(None, "Make a tiny random model instead of loading one from a path.")
    tokenizer: str | None = key(None, "Folder or hub name; the model's own if unset.")
    lora: Lora | None = key(None, "Train a LoRA adapter on the model in place of its weights (extra lora).")


class RewardFunction(Section):
    """One reward; several are added with their weights."""

    use: str = key("checker", f"{', '.join(REWARDS)}, or package.module:function. checker is the task's own.")
    weight: float = key(1.0, "Factor of this reward in the sum.")
    timeout_s: float = key(30.0, "Seconds a call may take.", _LIMITED, gt=0)
    batch: bool = key(False, "The function takes a list of samples, returns a list.")


class Reward(Section):
    """How an answer is judged."""

    functions: list[RewardFunction] = key(
        [RewardFunction()], "The rewards to add; a name alone is short for {use: name}.", _FOR_SOME_TASK
    )
    on_error: Literal["stop", "skip"] = key(
        "stop", "A raising reward stops the run, or its sample is counted and left out."
    )
    models: dict[str, RewardModel] = key({}, "Models that judge too, by name.", _JUDGED)
    weight: float = key(
        1.0, "Weight of what is learnt from rewards, beside distill.weight.", _ON_POLICY, ge=0
    )
    log_only: bool = key(
        False, "Judge answers for the metrics even if nothing is learnt from it.", _ON_POLICY, _BESIDE
    )


class Task(Section):
    """Where prompts come from: a built-in task, files or a dataset."""

    kind: str | None = key(
        None, "Built-in task (see `practicum tasks`), or package.module:name; else file or dataset is needed."
    )
    options: dict[str, Any] = key(
        {}, "Options of the built-in task, such as length: [4, 8].", read_with(".kind")
    )
    file: str | list[str] | None = key(
        None, "JSONL, JSON, CSV or Parquet file of training rows, a pattern (data/*.jsonl), or a list."
    )
    eval_file: str | list[str] | None = key(None, "File or files of evaluation rows.", _FILE)
    dataset: str | None = key(
        None, "Folder or hub name of a dataset that the `datasets` library reads (extra datasets)."
    )
    subset: str | None = key(None, "Subset (configuration) of the dataset.", _DATASET)
    split: str = key("train", "Split of the dataset to train on.", _DATASET)
    eval_split: str | None = key(None, "Split of the dataset to evaluate on.", _DATASET)
    map: str | None = key(
        None, "package.module:function that takes each row, a dict, and returns the row to use.", _ROWS
    )
    prompt: str = key("prompt", "Column with the prompt: a string or chat messages.", _ROWS)
    answer: str = key("answer", "Column with the expected answer, for checkers.", _ROWS)
    too_long: Literal["error", "skip", "cut"] = key(
        "error", "Of rows longer than the context: error, skip, or cut: drop the prompt's beginning.", _ROWS
    )
    weight: float = key(1.0, "Share of this task among the prompts.", gt=0)
    domain: str | None = key(None, "Label in metrics; the task's name if unset.")
    chat: bool = key(False, "Wrap string prompts into a user message (chat template).")
    system: str | None = key(None, "System message put before chat prompts.", _IN_CHAT)
    rewards: list[RewardFunction] | None = key(None, "Rewards of this task, in place of reward.functions.")


Beta = Annotated[float, Field(ge=0, lt=1)]


class Train(Section):
    """The optimizer and the size of a step."""

    steps: int = key(100, "Training steps.", ge=0)
    prompts: int = key(32, "Prompts (demonstrations, if supervised) per step.", ge=1)
    epochs: int = key(1, "Passes over a step's batch.", ge=1)
    minibatches: int = key(1, "Optimizer steps in one pass over the batch.", ge=1)
    minibatch_size: int | None = key(
        None, "Rows of one optimizer step, in place of minibatches: their number follows the batch's.", ge=1
    )
    lr: float = key(1e-4, "Peak learning rate.", gt=0)
    schedule: Literal["constant", "linear", "cosine"] | OwnName = key(
        "constant", "Learning rate after the warm-up."
    )
    warmup_steps: int = key(0, "Steps of linear learning-rate warm-up.", ge=0)
    final_lr: float = key(0.0, "Learning rate at the last step of a decay.", _DECAYS, ge=0)
    optimizer: Literal["adamw", "adamw_8bit"] | OwnName = key(
        "adamw", "What changes the weights; adamw_8bit: AdamW whose moments take a quarter of the memory."
    )
    offload: Literal["none", "host"] = key(
        "none", "Where the optimizer's state is between updates: with the weights, or in host memory."
    )
    weight_decay: float = key(0.0, "AdamW weight decay of matrices.", ge=0)
    betas: tuple[Beta, Beta] = key((0.9, 0.999), "AdamW betas.", strict=False)
    eps: float = key(1e-8, "AdamW epsilon.", gt=0)
    max_grad_norm: float | None = key(1.0, "Clip the global gradient norm; off if null.", gt=0)
    microbatch_tokens: int = key(16_384, "Tokens of one forward and backward.", ge=1)
    autocast: Literal["off", "bfloat16"] = key("off", "Mixed precision of the compute.")
    gradient_checkpointing: bool = key(False, "Recompute activations to save memory.")


class Eval(Section):
    """Evaluation on held-out prompts, per domain."""

    every: int = key(0, "Steps between evaluations; 0 = only first and last.", ge=0)
    rows: int = key(128, "Prompts of each task; 0 = no evaluation.", ge=0)
    stop_at: float | None = key(None, "End the run as soon as an evaluation's eval/greedy is at least this.")
    samples: int = key(
        0, "Samples per prompt, at temperature 1, for mean@k and pass@k; 0 = none.", _EVALUATED, ge=0
    )


class Checkpoint(Section):
    """What is kept of a run."""

    every: int = key(0, "Steps between checkpoints, in addition to one every 10 minutes; 0 = none.", ge=0)
    keep_last: int = key(2, "Newest checkpoints kept, beside the one with the best evaluation.", ge=1)


def _tracker(name: str) -> str:
    is_known = name in ("tensorboard", "wandb", "trackio") or name.startswith(("wandb/", "trackio/"))
    return name if is_known else own_name(name)


class Track(Section):
    """Where metrics and samples go in addition to metrics.jsonl."""

    to: list[Annotated[str, AfterValidator(_tracker)]] = key(
        [], "tensorboard, wandb/PROJECT, trackio/PROJECT, or trackers of your own, as package.module:name."
    )
    record: Annotated[int, Field(ge=0)] | Literal["all", "none"] = key(
        2,
        "Groups of each step that are kept whole, with all their columns, in record/ and as text in "
        "samples.jsonl, the tasks taking turns; all: every row, whole; none: nothing.",
    )


Level = Literal["error", "warn", "off"]


class Checks(Section):
    """Invariants watched at run time; `checks: warn` is short for {level: warn}."""

    model_config = ConfigDict(json_schema_extra=or_short_form("level"))

    level: Level = key("error", "error stops the run, warn reports, off does not look.")
    logprob_gap_max: float = key(
        0.05, "Largest mean |difference| in nats between logprobs of the rollout and of the learner.", gt=0
    )
    own: list[OwnName] = key([], "Checks of your own, such as [package.module:name].")


class Expected(Section):
    """A score that the run should reach."""

    metric: str = key(..., "A metric, such as eval/greedy.")
    at_least: float = key(..., "Its least value in the last evaluation.")

    def __str__(self) -> str:
        return f"{self.metric} at least {self.at_least:g}"


class Recipe(Section):
    """A whole run."""

    name: str = key(..., "Name of the run; its folder is runs/<name>.")
    extends: str | None = key(None, "A recipe that this one builds on; its path is relative to this file.")
    out: str | None = key(None, "Run folder, in place of runs/<name>.")
    seed: int = key(0, "Seed of every random choice.", ge=0)
    expected: Expected | None = key(None, "What the run should reach.")
    model: Model = key(..., "The student.")
    tasks: dict[str, Task] = key(..., "Where prompts come from, by name.", min_length=1)
    reward: Reward = key(Reward(), "How an answer is judged.")
    teachers: dict[str, Teacher] = key({}, "Who corrects the student, by name; one takes every prompt.")
    route: Route = key(Route(), "Which teacher corrects which prompt.", _TAUGHT, _SHARED)
    distill: Distill | None = key(None, "What is learnt from the teachers.")
    rollout: Rollout = key(Rollout(), "How the student's answers are sampled.")
    agent: Agent = key(Agent(), "What happens in a session.")
    algorithm: Algorithm = key(Algorithm(), "What is learnt.")
    train: Train = key(Train(), "Optimizer and size of a step.")
    critic: CriticSection | None = key(None, "Value model; needed by advantage gae.", ESTIMATES, _WITH_CRITIC)
    stages: list[OwnName] = key([], "Stages of your own, as package.module:name, in order.")
    refills: int = key(
        0, "Further rollouts that replace groups with equal rewards (DAPO); 0: they are trained on.", ge=0
    )
    eval: Eval = key(Eval(), "Evaluation on held-out prompts.")
    checkpoint: Checkpoint = key(Checkpoint(), "What is kept.")
    track: Track = key(Track(), "Where metrics go.")
    checks: Checks = key(Checks(), "Invariants watched at run time.")
    runtime: Runtime = key(Runtime(), "Where the roles live.")
    pools: Pools = key(Pools(), "Who gets how much of a cluster.", ON_RAY)

    @property
    def is_supervised(self) -> bool:
        """The batch is answers to imitate: demonstrations, or answers of teachers."""
        return self.algorithm.loss == "supervised"

    @property
    def counts(self) -> Counts:
        train = self.train
        return Counts(
            supervised=self.demonstrates,
            steps=train.steps,
            prompts=train.prompts,
            samples=1 if self.demonstrates else self.rollout.samples,
            baselines=train.prompts if estimator_traits(self.algorithm.advantage).greedy_baseline else 0,
            epochs=train.epochs,
            minibatches=train.minibatches,
            minibatch_size=train.minibatch_size,
            refills=self.refills,
        )

    @property
    def sampling_engines(self) -> int:
        """Engines that sample in one process: one per unfinished step, or one for all."""
        return 1 if self.rollout.engine_traits.serves_versions else self.rollout.lag + 1

    @property
    def sampling_s(self) -> float:
        """Deadline in seconds for sampling a step, above those of rollouts and rewards."""
        return 2 * (1 + self.refills) * self.rollout.deadline_s + 60.0

    @property
    def teachers_answer(self) -> bool:
        """Teachers sample the answers of supervised training, and rewards choose among them."""
        return self.is_supervised and bool(self.teachers)

    @property
    def demonstrates(self) -> bool:
        """The tasks' demonstrations are the batch."""
        return self.is_supervised and not self.teachers

    @property
    def uses_reward(self) -> bool:
        return not self.is_supervised and self.reward.weight > 0

    def rewards_of(self, task: str) -> list[RewardFunction]:
        """Return the reward functions of a task: its own, else the recipe's."""
        own = self.tasks[task].rewards
        return self.reward.functions if own is None else own

    @property
    def tasks_needing_answer(self) -> set[str]:
        """Tasks whose rows must have an answer: for a reward, a loop or a demonstration."""
        needed = self.demonstrates or self.agent.loop == "retry"
        return {
            name
            for name in self.tasks
            if needed or any(f.use in REWARDS and REWARDS[f.use].needs_answer for f in self.rewards_of(name))
        }

    @property
    def computes_reward(self) -> bool:
        return self.uses_reward or self.teachers_answer or (self.reward.log_only and not self.is_supervised)

    @property
    def distils_by_loss(self) -> bool:
        """A divergence from the teachers is back-propagated."""
        return self.distill is not None and self.distill.apply_as == "loss"

    @property
    def distils_by_policy(self) -> bool:
        """Teachers change each token's advantage or reward."""
        return self.distill is not None and self.distill.apply_as != "loss"

    @property
    def has_policy_loss(self) -> bool:
        """The update has a policy loss, and so advantages."""
        return not self.is_supervised and (self.uses_reward or self.distils_by_policy)

    @property
    def has_advantage_estimator(self) -> bool:
        """algorithm.advantage is used."""
        through_reward = self.distill is not None and self.distill.apply_as == "reward"
        return not self.is_supervised and (self.uses_reward or through_reward)

    @property
    def recorded_groups(self) -> int | None:
        """Groups of a step that the run's record keeps; None: all."""
        record = self.track.record
        return record if isinstance(record, int) else None if record == "all" else 0

    @property
    def corrects_mismatch(self) -> bool:
        """The policy loss is weighted by the ratio of learner to engine probabilities."""
        return self.algorithm.mismatch.weights != "off"

    @property
    def uses_old_logprobs(self) -> bool:
        """The step needs logprobs of the policy before the update."""
        if not self.has_policy_loss:
            return False
        in_reward = self.algorithm.kl.place == "reward" or self.distils_by_policy
        return loss_traits(self.algorithm.loss).ratio or in_reward or self.corrects_mismatch

    @property
    def cuts_sampling(self) -> bool:
        return self.rollout.top_p < 1 or self.rollout.top_k > 0

    @property
    def is_own_base(self) -> bool:
        """The reference policy is the student without its adapter."""
        return self.model.lora is not None and self.algorithm.kl.reference is None

    @property
    def compare_temperature(self) -> float:
        chosen = self.distill.temperature if self.distill is not None else None
        return self.rollout.temperature if chosen is None else chosen

    @property
    def session_deadline(self) -> float:
        """Seconds one session may take: a loop that hangs fails before all sessions are late."""
        chosen = self.agent.deadline_s
        return 0.9 * self.rollout.deadline_s if chosen is None else chosen

    @property
    def evaluates(self) -> bool:
        return self.eval.rows > 0

    @property
    def teacher_numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.teachers)}

    @property
    def on_ray(self) -> bool:
        """The roles are actors of a Ray cluster."""
        return self.runtime.kind == "ray"

    @property
    def data_parallel(self) -> int:
        """Ranks of the learner: one on each device of the pool train; one in this process."""
        return self.pools.train.total if self.on_ray else 1

    @property
    def engine_replicas(self) -> int:
        if not self.on_ray:
            return 1
        devices = (self.pools.rollout or self.pools.train).total
        return self.rollout.replicas or max(1, devices // self.rollout.engine_devices)

    @property
    def own_models(self) -> dict[str, Teacher | RewardModel]:
        """Teachers and reward models in separate processes, by their path in the recipe."""
        models: dict[str, Teacher | RewardModel] = {f"teachers.{n}": t for n, t in self.teachers.items()}
        models |= {f"reward.models.{n}": m for n, m in self.reward.models.items()}
        return {path: m for path, m in models.items() if m.placement_name == "own"}

"""The recipe: every key with its default and description.

Paths are relative to the recipe's file. Models, data and modules that do not exist there are searched in the
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

_MOE = read_with(".family", "qwen3_moe")
_WITH_CRITIC = read_if(
    lambda recipe: estimator_traits(recipe.algorithm.advantage).critic,
    "with algorithm.advantage {0.algorithm.advantage}",
    "remove it, or set algorithm.advantage to gae",
)
_ON_POLICY = read_if(
    lambda r: not r.is_supervised,
    "with algorithm.loss supervised",
    "supervised training does not use rewards",
)
_BESIDE = read_if(
    lambda recipe: recipe.reward.weight == 0,
    "with reward.weight {0.reward.weight:g}",
    "rewards that are trained on are logged anyway: remove it",
)
_JUDGED = read_if(
    lambda r: r.computes_reward or r.evaluates, "while no reward is computed", "set reward.log_only: true"
)
_FOR_SOME_TASK = read_if(
    lambda r: any(task.rewards is None for task in r.tasks.values()),
    "as each task sets rewards",
    refused=False,
)
_LIMITED = read_if(
    lambda function: not is_instant(function.use),
    "with the built-in reward {0.use}",
    "built-in rewards have no time limit: remove it",
    of_section=True,
)
_IN_CHAT = read_if(
    lambda task: task.chat or task.kind is None, "without chat: true", "set chat: true", of_section=True
)
_TAUGHT = read_if(lambda r: r.teachers or r.distill, "without teachers", "add teachers, or remove it")
_SHARED = read_if(lambda r: len(r.teachers) != 1, "with one teacher", "a single teacher scores every prompt")
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
    """A tiny model with random weights and a character tokenizer."""

    family: Literal["qwen3", "llama", "gpt2", "qwen3_moe", "qwen3_5", "qwen2_5_vl"] = key(
        "qwen3", "Architecture. qwen3_moe has experts, qwen3_5 linear attention, qwen2_5_vl takes images."
    )
    hidden: int = key(128, "Width of the residual stream.", ge=8)
    layers: int = key(4, "Number of transformer layers.", ge=1)
    heads: int = key(
        4, "Attention heads, each hidden / heads wide. KV heads are half as many (gpt2: as many).", ge=1
    )
    context: int = key(512, "Longest sequence in tokens.", ge=16)
    experts: int = key(8, "Experts per layer, two of them active per token (qwen3_moe).", _MOE, ge=2)

    @property
    def kv_heads(self) -> int:
        return self.heads if self.heads % 2 else self.heads // 2

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class Lora(Section):
    """A LoRA adapter: low-rank matrices on the linear layers are trained, the model's weights are frozen."""

    rank: int = key(16, "Rank of the matrices.", ge=1)
    alpha: float = key(32.0, "LoRA alpha: the adapter's output is scaled by alpha / rank.", gt=0)
    targets: Literal["all"] | list[str] = key(
        "all",
        "Layers to adapt: all linear layers, including experts, or name endings such as [q_proj, v_proj].",
        min_length=1,
    )


class Model(Held):
    """The student model: source of its weights, dtype and adapter."""

    path: str | None = key(
        None, "Folder in HuggingFace format, hub name, run folder or checkpoint. Set this or random_init."
    )
    random_init: MakeModel | None = key(
        None, "Create a tiny model with random weights instead of loading one."
    )
    tokenizer: str | None = key(None, "Folder or hub name of the tokenizer. Default: the model's.")
    lora: Lora | None = key(None, "Train a LoRA adapter instead of the full weights (extra lora).")


class RewardFunction(Section):
    """A reward function. The reward is the weighted sum of all."""

    use: str = key(
        "checker", f"{', '.join(REWARDS)}, or package.module:function. checker is the task's checker."
    )
    weight: float = key(1.0, "Weight of this reward in the sum.")
    timeout_s: float = key(30.0, "Time limit of a call in seconds.", _LIMITED, gt=0)
    batch: bool = key(False, "The function takes a list of samples and returns a list of rewards.")


class Reward(Section):
    """Rewards of a response."""

    functions: list[RewardFunction] = key(
        [RewardFunction()], "Reward functions; a name is short for {use: name}.", _FOR_SOME_TASK
    )
    on_error: Literal["stop", "skip"] = key(
        "stop", "If a reward function raises: stop the run, or skip and count the sample."
    )
    models: dict[str, RewardModel] = key({}, "Reward models, by name.", _JUDGED)
    weight: float = key(1.0, "Weight of the rewards' loss, relative to distill.weight.", _ON_POLICY, ge=0)
    log_only: bool = key(
        False, "Compute rewards for the metrics even if they are not trained on.", _ON_POLICY, _BESIDE
    )


class Task(Section):
    """A source of prompts: a built-in task, files or a dataset."""

    kind: str | None = key(
        None, "Built-in task (see `practicum tasks`) or package.module:name. Set this, file or dataset."
    )
    options: dict[str, Any] = key(
        {}, "Options of the built-in task, such as length: [4, 8].", read_with(".kind")
    )
    file: str | list[str] | None = key(
        None, "JSONL, JSON, CSV or Parquet file of training rows, a glob pattern, or a list of files."
    )
    eval_file: str | list[str] | None = key(None, "File or files of evaluation rows.", _FILE)
    dataset: str | None = key(
        None, "Folder or hub name of a dataset for the `datasets` library (extra datasets)."
    )
    subset: str | None = key(None, "Subset (configuration) of the dataset.", _DATASET)
    split: str = key("train", "Split of the dataset to train on.", _DATASET)
    eval_split: str | None = key(None, "Split of the dataset to evaluate on.", _DATASET)
    map: str | None = key(
        None, "package.module:function that takes a row (a dict) and returns the row to use.", _ROWS
    )
    prompt: str = key("prompt", "Column with the prompt: a string or chat messages.", _ROWS)
    answer: str = key("answer", "Column with the expected answer, for checkers.", _ROWS)
    too_long: Literal["error", "skip", "cut"] = key(
        "error",
        "Rows longer than the context: raise an error, skip the row, or cut the start of its prompt.",
        _ROWS,
    )
    weight: float = key(1.0, "Relative weight of this task in the prompt mix.", gt=0)
    domain: str | None = key(None, "Label in metrics and routing. Default: the task's name.")
    chat: bool = key(False, "Apply the chat template, with string prompts as user messages.")
    system: str | None = key(None, "System message of chat prompts.", _IN_CHAT)
    rewards: list[RewardFunction] | None = key(None, "Rewards of this task, instead of reward.functions.")


Beta = Annotated[float, Field(ge=0, lt=1)]


class Train(Section):
    """Optimizer and batch size."""

    steps: int = key(100, "Training steps.", ge=0)
    prompts: int = key(32, "Prompts per step (examples, with algorithm.loss supervised).", ge=1)
    epochs: int = key(1, "Passes over each step's batch.", ge=1)
    minibatches: int = key(1, "Optimizer steps per pass over the batch.", ge=1)
    minibatch_size: int | None = key(None, "Rows per optimizer step. Set this or minibatches.", ge=1)
    lr: float = key(1e-4, "Peak learning rate.", gt=0)
    schedule: Literal["constant", "linear", "cosine"] | OwnName = key(
        "constant", "Learning-rate schedule after the warm-up."
    )
    warmup_steps: int = key(0, "Steps of linear learning-rate warm-up.", ge=0)
    final_lr: float = key(0.0, "Learning rate at the last step (linear, cosine).", _DECAYS, ge=0)
    optimizer: Literal["adamw", "adamw_8bit"] | OwnName = key(
        "adamw", "Optimizer. adamw_8bit stores AdamW's moments in a quarter of the memory."
    )
    offload: Literal["none", "host"] = key(
        "none", "Keep the optimizer state on the device, or move it to host memory between updates."
    )
    weight_decay: float = key(0.0, "AdamW weight decay, applied to matrices only.", ge=0)
    betas: tuple[Beta, Beta] = key((0.9, 0.999), "AdamW betas.", strict=False)
    max_grad_norm: float | None = key(1.0, "Maximum global gradient norm; null disables clipping.", gt=0)
    microbatch_tokens: int = key(16_384, "Maximum tokens per forward and backward pass.", ge=1)
    autocast: Literal["off", "bfloat16"] = key("off", "Mixed precision of forward and backward.")
    gradient_checkpointing: bool = key(False, "Recompute activations in the backward pass to save memory.")


class Eval(Section):
    """Evaluation on held-out prompts, per domain."""

    every: int = key(
        0, "Steps between evaluations; 0 evaluates only before the first and after the last step.", ge=0
    )
    rows: int = key(128, "Prompts per task; 0 disables evaluation.", ge=0)
    stop_at: float | None = key(None, "Stop the run when eval/greedy reaches this value.")
    samples: int = key(
        0,
        "Samples per prompt at temperature 1, for mean@k and pass@k; 0 disables sampling.",
        _EVALUATED,
        ge=0,
    )


class Checkpoint(Section):
    """Checkpoint intervals and retention."""

    every: int = key(0, "Steps between checkpoints, in addition to one every 10 minutes; 0 adds none.", ge=0)
    keep_last: int = key(2, "Number of recent checkpoints to keep, in addition to the best one.", ge=1)


def _tracker(name: str) -> str:
    is_known = name in ("tensorboard", "wandb", "trackio") or name.startswith(("wandb/", "trackio/"))
    return name if is_known else own_name(name)


class Track(Section):
    """Trackers and recorded samples, in addition to metrics.jsonl."""

    to: list[Annotated[str, AfterValidator(_tracker)]] = key(
        [], "tensorboard, wandb/PROJECT, trackio/PROJECT, or custom trackers as package.module:name."
    )
    record: Annotated[int, Field(ge=0)] | Literal["all", "none"] = key(
        2,
        "Groups per step to record with all columns in record/ and as text in samples.jsonl, from each "
        "task in turn; all records every group, none disables recording.",
    )


Level = Literal["error", "warn", "off"]


class Checks(Section):
    """Invariants that are checked during the run. `checks: warn` is short for {level: warn}."""

    model_config = ConfigDict(json_schema_extra=or_short_form("level"))

    level: Level = key(
        "error", "A violated invariant stops the run (error) or is logged (warn); off disables the checks."
    )
    logprob_gap_max: float = key(
        0.05, "Maximum mean |difference| in nats between the logprobs of engine and learner.", gt=0
    )
    own: list[OwnName] = key([], "Custom checks, such as [package.module:name].")


class Expected(Section):
    """A score that the run is expected to reach."""

    metric: str = key(..., "A metric, such as eval/greedy.")
    at_least: float = key(..., "Minimum value in the last evaluation.")

    def __str__(self) -> str:
        return f"{self.metric} at least {self.at_least:g}"


class Recipe(Section):
    """A training run."""

    name: str = key(..., "Name of the run; its folder is runs/<name>.")
    extends: str | None = key(None, "Base recipe that this one extends, as a path relative to this file.")
    out: str | None = key(None, "Run folder. Default: runs/<name>.")
    seed: int = key(0, "Random seed.", ge=0)
    expected: Expected | None = key(None, "Score that the run is expected to reach.")
    model: Model = key(..., "The student model.")
    tasks: dict[str, Task] = key(..., "Sources of prompts, by name.", min_length=1)
    reward: Reward = key(Reward(), "Reward functions and reward models.")
    teachers: dict[str, Teacher] = key({}, "Teachers, by name. A single teacher scores every prompt.")
    route: Route = key(Route(), "Which teacher scores which prompt.", _TAUGHT, _SHARED)
    distill: Distill | None = key(None, "Distillation loss.")
    rollout: Rollout = key(Rollout(), "Sampling of the student's responses.")
    agent: Agent = key(Agent(), "Agent loop, turns and tools.")
    algorithm: Algorithm = key(Algorithm(), "Advantages, policy loss and KL penalty.")
    train: Train = key(Train(), "Optimizer and batch size.")
    critic: CriticSection | None = key(
        None, "Value model, required by algorithm.advantage gae.", ESTIMATES, _WITH_CRITIC
    )
    stages: list[OwnName] = key([], "Custom stages as package.module:name, in order.")
    refills: int = key(
        0,
        "Further rollouts that replace groups with equal rewards (DAPO dynamic sampling); 0 keeps them.",
        ge=0,
    )
    eval: Eval = key(Eval(), "Evaluation on held-out prompts.")
    checkpoint: Checkpoint = key(Checkpoint(), "Checkpoint intervals and retention.")
    track: Track = key(Track(), "Trackers and recorded samples.")
    checks: Checks = key(Checks(), "Invariants that are checked during the run.")
    runtime: Runtime = key(Runtime(), "Local process or Ray cluster.")
    pools: Pools = key(Pools(), "Devices of the learner and the engines on a cluster.", ON_RAY)

    @property
    def is_supervised(self) -> bool:
        """Batches are SFT examples: answers of the tasks, or responses of teachers."""
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
        """Number of sampling engines in one process: one per unfinished step, or one for all."""
        return 1 if self.rollout.engine_traits.serves_versions else self.rollout.lag + 1

    @property
    def sampling_s(self) -> float:
        """Deadline in seconds for sampling a step, beyond those of rollouts and rewards."""
        return 2 * (1 + self.refills) * self.rollout.deadline_s + 60.0

    @property
    def teachers_answer(self) -> bool:
        """Teachers sample the responses of supervised training, and rewards select among them."""
        return self.is_supervised and bool(self.teachers)

    @property
    def demonstrates(self) -> bool:
        """Batches are the tasks' SFT examples."""
        return self.is_supervised and not self.teachers

    @property
    def uses_reward(self) -> bool:
        return not self.is_supervised and self.reward.weight > 0

    def rewards_of(self, task: str) -> list[RewardFunction]:
        """Return the reward functions of a task, by default those of the recipe."""
        own = self.tasks[task].rewards
        return self.reward.functions if own is None else own

    @property
    def tasks_needing_answer(self) -> set[str]:
        """Tasks whose rows must have an answer, for a reward, a loop or supervised training."""
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
        """The update has a policy loss, which needs advantages."""
        return not self.is_supervised and (self.uses_reward or self.distils_by_policy)

    @property
    def has_advantage_estimator(self) -> bool:
        """algorithm.advantage is used."""
        through_reward = self.distill is not None and self.distill.apply_as == "reward"
        return not self.is_supervised and (self.uses_reward or through_reward)

    @property
    def recorded_groups(self) -> int | None:
        """Number of groups recorded per step, or None for all."""
        record = self.track.record
        return record if isinstance(record, int) else None if record == "all" else 0

    @property
    def corrects_mismatch(self) -> bool:
        """The policy loss is weighted by the ratio of learner to engine probabilities."""
        return self.algorithm.mismatch != "off"

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
        """Deadline of a session in seconds, below the rollout's so that a hanging loop fails alone."""
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
        """Roles run as actors of a Ray cluster."""
        return self.runtime.kind == "ray"

    @property
    def data_parallel(self) -> int:
        """Number of learner ranks: one per device of pools.train on Ray, else one."""
        return self.pools.train.total if self.on_ray else 1

    @property
    def engine_replicas(self) -> int:
        if not self.on_ray:
            return 1
        devices = (self.pools.rollout or self.pools.train).total
        return max(1, devices // self.rollout.engine_devices)

    @property
    def own_models(self) -> dict[str, Teacher | RewardModel]:
        """Teachers and reward models in separate processes, by path in the recipe."""
        models: dict[str, Teacher | RewardModel] = {f"teachers.{n}": t for n, t in self.teachers.items()}
        models |= {f"reward.models.{n}": m for n, m in self.reward.models.items()}
        return {path: m for path, m in models.items() if m.placement_name == "own"}

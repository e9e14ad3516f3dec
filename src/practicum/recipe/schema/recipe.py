"""The recipe: every option there is, with its one default and a sentence about it.

Paths are relative to the file they are in; models, data and modules that are not there are looked for in the
working directory.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from practicum.devices import HELP as DEVICE_HELP
from practicum.recipe.algorithm_traits import ESTIMATORS, estimator_traits
from practicum.recipe.derived import computes_reward, evaluates, is_supervised
from practicum.recipe.schema.algorithm_sections import ESTIMATES, Algorithm, CriticSection
from practicum.recipe.schema.rollout_sections import ON_RAY, Agent, Rollout
from practicum.recipe.schema.runtime_section import Pools, Runtime
from practicum.recipe.schema.section import OwnName, Section, key, read_if, read_with
from practicum.recipe.schema.teacher_sections import Distill, RewardModel, Route, Teacher

_KV_HEADS = read_with(".family", "qwen3", "llama", "qwen3_moe", "qwen2_5_vl", refused=False)
_HEAD_DIM = read_with(".family", "qwen3", "llama", "qwen3_moe", refused=False)
_MOE = read_with(".family", "qwen3_moe")
_SAMPLED = read_with("eval.samples")
_WITH_CRITIC = read_if(
    lambda recipe: estimator_traits(recipe.algorithm.advantage).critic,
    "with algorithm.advantage {0.algorithm.advantage}",
    "remove it, or set algorithm.advantage to "
    + " or ".join(name for name, traits in ESTIMATORS.items() if traits.critic),
)
_ON_POLICY = read_if(
    lambda r: not is_supervised(r), "with algorithm.loss supervised", "demonstrations are not judged"
)
_BESIDE = read_if(
    lambda recipe: recipe.reward.weight == 0,
    "with reward.weight {0.reward.weight:g}",
    "rewards that are learnt from are in the metrics anyway: remove it",
)
_JUDGED = read_if(
    lambda r: computes_reward(r) or evaluates(r), "while no answer is judged", "set reward.watch: true"
)
_FOR_SOME_TASK = read_if(
    lambda r: any(task.rewards is None for task in r.tasks.values()), "as tasks have theirs", refused=False
)
_LIMITED = read_if(
    lambda function: function.use not in ("checker", "exact", "contains"),
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
_EVALUATED = read_if(evaluates, "with eval.greedy false and eval.samples 0", refused=False)
_FILE, _DATASET = read_with(".file"), read_with(".dataset")
_ROWS = read_if(
    lambda task: task.kind is None,
    "with the built-in task {0.kind}",
    "remove it, or set file or dataset in place of kind",
    of_section=True,
)


class MakeModel(Section):
    """A tiny model with random weights and a character tokenizer, made on the spot."""

    family: Literal["qwen3", "llama", "gpt2", "qwen3_moe", "qwen2_5_vl"] = key(
        "qwen3", "Architecture; qwen3_moe has experts, qwen2_5_vl sees pictures."
    )
    hidden: int = key(128, "Width of the residual stream.", ge=8)
    layers: int = key(4, "Number of transformer layers.", ge=1)
    heads: int = key(4, "Attention heads.", ge=1)
    kv_heads: int = key(2, "Key/value heads, a divisor of heads (not for gpt2).", _KV_HEADS, ge=1)
    head_dim: int = key(32, "Width of one head (gpt2, qwen2_5_vl: hidden / heads).", _HEAD_DIM, ge=4)
    context: int = key(512, "Longest sequence in tokens.", ge=16)
    experts: int = key(8, "Experts of each layer (qwen3_moe).", _MOE, ge=2)
    experts_per_token: int = key(2, "Experts that a token takes (qwen3_moe).", _MOE, ge=1)


class Lora(Section):
    """A LoRA adapter: only small matrices beside the linear layers are trained, the model stays as it is."""

    rank: int = key(16, "Rank of the matrices.", ge=1)
    alpha: float = key(32.0, "What the adapter adds is multiplied by alpha / rank.", gt=0)
    targets: Literal["all"] | list[str] = key(
        "all",
        "all: every linear layer of attention and MLP, experts included; or endings of their names, such as "
        "[q_proj, v_proj].",
        min_length=1,
    )
    dropout: float = key(0.0, "Only 0: sampling and training must see one distribution.", ge=0)
    init: Literal["kaiming", "gaussian"] = key(
        "kaiming", "How the first matrix begins; the second one begins at 0."
    )


class Model(Section):
    """The student: where its weights come from and how they are held."""

    path: str | None = key(
        None,
        "Folder in HuggingFace format, hub name, run folder or checkpoint; one of path and make is needed.",
    )
    make: MakeModel | None = key(None, "Make a tiny random model instead of loading one from a path.")
    tokenizer: str | None = key(None, "Folder or hub name; the model's own if unset.")
    dtype: Literal["float32", "bfloat16", "float64"] = key("float32", "Number type of the weights.")
    device: str = key("auto", DEVICE_HELP)
    lora: Lora | None = key(None, "Train a LoRA adapter on the model in place of its weights (extra lora).")


class RewardFunction(Section):
    """One reward; several are added with their weights."""

    use: str = key(
        "checker",
        "checker (the task's own), exact, contains, math_verify, reasoning_gym, or package.module:function.",
    )
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
    watch: bool = key(
        False, "Judge answers for the metrics even if nothing is learnt from it.", _ON_POLICY, _BESIDE
    )


class Task(Section):
    """Where prompts come from: a built-in task, files or a dataset."""

    kind: str | None = key(
        None,
        "Built-in task (see `practicum tasks`), or package.module:name; one of kind, file and dataset is "
        "needed.",
    )
    options: dict[str, Any] = key(
        {}, "Options of the built-in task, such as length: [4, 8].", read_with(".kind")
    )
    file: str | list[str] | None = key(
        None,
        "JSONL, JSON, CSV or Parquet file of training rows, beside the recipe or in the working directory; "
        "a pattern (data/*.jsonl), or a list of several.",
    )
    eval_file: str | list[str] | None = key(None, "File or files of evaluation rows.", _FILE)
    dataset: str | None = key(
        None, "Folder or hub name of a dataset that the `datasets` library reads (extra datasets)."
    )
    subset: str | None = key(None, "Subset (configuration) of the dataset.", _DATASET)
    split: str = key("train", "Split of the dataset to train on.", _DATASET)
    eval_split: str | None = key(None, "Split of the dataset to evaluate on.", _DATASET)
    streaming: bool = key(
        False, "Read the dataset's rows as they are needed, in its order, shuffled in blocks.", _DATASET
    )
    map: str | None = key(
        None, "package.module:function that takes each row, a dict, and returns the row to use.", _ROWS
    )
    prompt: str = key("prompt", "Column with the prompt: a string or chat messages.", _ROWS)
    answer: str = key("answer", "Column with the expected answer, for checkers.", _ROWS)
    images: str = key("images", "Column with the paths of a row's pictures.", _ROWS)
    too_long: Literal["error", "skip", "cut"] = key(
        "error",
        "Rows whose prompt and answer exceed the context: error; skip leaves them out; cut drops "
        "the beginning of plain prompts.",
        _ROWS,
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
    minibatch_rows: int | None = key(
        None, "Rows of one optimizer step, in place of minibatches: their number follows the batch's.", ge=1
    )
    lr: float = key(1e-4, "Peak learning rate.", gt=0)
    schedule: Literal["constant", "linear", "cosine"] | OwnName = key(
        "constant", "Learning rate after the warm-up."
    )
    warmup_steps: int = key(0, "Steps of linear learning-rate warm-up.", ge=0)
    final_lr: float = key(
        0.0,
        "Learning rate at the last step of a decay.",
        _DECAYS,
        ge=0,
    )
    optimizer: Literal["adamw", "adamw_8bit"] | OwnName = key(
        "adamw", "What changes the weights; adamw_8bit: AdamW whose moments take a quarter of the memory."
    )
    offload: Literal["none", "host", "disk"] = key(
        "none", "Where the optimizer's state is between updates: with the weights, in host memory, on disk."
    )
    weight_decay: float = key(0.0, "AdamW weight decay of matrices.", ge=0)
    betas: tuple[Beta, Beta] = key((0.9, 0.999), "AdamW betas.", strict=False)
    eps: float = key(1e-8, "AdamW epsilon.", gt=0)
    clip_norm: float | None = key(1.0, "Clip the global gradient norm; off if null.", gt=0)
    microbatch_tokens: int = key(16_384, "Tokens of one forward and backward.", ge=1)
    autocast: Literal["off", "bfloat16"] = key("off", "Mixed precision of the compute.")
    gradient_checkpointing: bool = key(False, "Recompute activations to save memory.")
    compile: bool = key(False, "Use torch.compile on the learner's model.")
    replay_experts: bool = key(True, "The learner takes the experts that the engine took (MoE models).")


class Buffer(Section):
    """Which finished groups are trained on."""

    filter_flat_groups: bool = key(False, "Leave out groups whose rewards are all equal, and refill (DAPO).")
    max_refills: int = key(
        4, "Further rollouts a step may make to refill.", read_with("buffer.filter_flat_groups"), ge=0
    )


class Async(Section):
    """Rollouts of later steps while the learner works on this one."""

    lag: int = key(
        0,
        "Steps between the weights that sample a batch and those that it trains: always this many, less only "
        "in the first steps. Each has an engine with its own copy of the weights. 0: one after the other.",
        ge=0,
        le=16,
    )


class Eval(Section):
    """Evaluation on held-out prompts, per domain."""

    every: int = key(0, "Steps between evaluations; 0 = only first and last.", ge=0)
    rows: int = key(128, "Prompts of each task.", _EVALUATED, ge=1)
    greedy: bool = key(True, "Report the greedy answer's score.")
    stop_at: float | None = key(None, "End the run as soon as an evaluation's eval/greedy is at least this.")
    samples: int = key(0, "Samples per prompt for mean@k and pass@k; 0 = none.", ge=0)
    temperature: float = key(1.0, "Temperature of those samples.", _SAMPLED, gt=0)
    pass_threshold: float = key(1.0, "Reward from which a sample counts as a pass.", _SAMPLED)


class Checkpoint(Section):
    """What is kept of a run."""

    every: int = key(0, "Steps between checkpoints; 0 = not by steps.", ge=0)
    every_minutes: float = key(
        10.0, "Minutes after which the next finished step is kept in a checkpoint; 0 = not by time.", ge=0
    )
    keep_last: int = key(2, "Newest checkpoints kept.", ge=1)
    keep_best: str | None = key(
        "auto",
        "Metric whose best checkpoint is kept too, such as eval/greedy; auto: eval/greedy, else eval/mean@k, "
        "if evaluations run during training; null: none.",
    )


class Track(Section):
    """Where metrics and samples go in addition to metrics.jsonl."""

    tensorboard: bool = key(False, "Write TensorBoard events into the run folder.")
    wandb: str | None = key(None, "Weights & Biases project to log to.")
    trackio: str | None = key(None, "trackio project on this machine to log to.")
    own: list[OwnName] = key([], "Trackers of your own, as package.module:name.")
    record: Annotated[int, Field(ge=0)] | Literal["all", "none"] = key(
        2,
        "Groups of each step that are kept whole, with all their columns, in record/ and as text in "
        "samples.jsonl, the tasks taking turns; all: every row, whole; none: nothing.",
    )
    eval_prompts: int | None = key(
        None, "Prompts per evaluation whose answers are written to eval.jsonl; unset: all.", _EVALUATED, ge=0
    )


Level = Literal["error", "warn", "off"]


class OwnCheck(Section):
    """A check of your own, called after each step."""

    use: OwnName = key(..., "The function, as package.module:name.")
    level: Level = key("error", "What happens when it finds something.")


def _own_check(value: Any) -> Any:
    return {"use": value} if isinstance(value, str) else value


class Checks(Section):
    """Invariants watched at run time: error stops the run, warn reports, off does not look."""

    weight_version: Level = key(
        "error", "The engine sampled with the weights that the step is to be sampled by."
    )
    fingerprint: Level = key(
        "error", "After each sync, engine and learner agree on the logprobs of a fixed sequence."
    )
    fingerprint_max: float | None = key(
        None,
        "Largest mean |difference| in nats that fingerprint accepts; unset: 1e-3, and 0.2 for models in "
        "bfloat16.",
        read_with("checks.fingerprint", "error", "warn", refused=False),
        gt=0,
    )
    logprob_gap: Level = key("error", "Rollout and learner logprobs agree on fresh rows.")
    logprob_gap_max: float = key(
        0.05,
        "Largest mean |difference| in nats that logprob_gap accepts.",
        read_with("checks.logprob_gap", "error", "warn", refused=False),
        gt=0,
    )
    sample_size: Level = key(
        "warn",
        "Rows that older weights sampled (async.lag) still tell of the policy that is trained.",
        read_with("async.lag", refused=False),
    )
    sample_size_min: float = key(
        0.5,
        "Least effective sample size, as a fraction of the tokens, that sample_size accepts.",
        read_with("async.lag", refused=False),
        read_with("checks.sample_size", "error", "warn", refused=False),
        gt=0,
        lt=1,
    )
    masks: Level = key("error", "Masks, lengths and loss denominators agree.")
    groups: Level = key("error", "Each prompt of a step is learnt from, with the sessions it should have.")
    advantages: Level = key(
        "error", "Advantages agree with the rewards of their sessions and add up to 0 in each group."
    )
    teacher_shares: Level = key(
        "warn", "Each teacher has at least a tenth of its target share of the gradient."
    )
    store_empty: Level = key("error", "Nothing of a finished step stays in the store.")
    finite: Level = key("error", "No non-finite loss or gradient reaches the optimizer.")
    own: list[Annotated[OwnCheck, BeforeValidator(_own_check)]] = key(
        [], "Checks of your own, such as [package.module:name]."
    )


class Recipe(Section):
    """A whole run."""

    name: str = key(..., "Name of the run; its folder is runs/<name>.")
    extends: str | None = key(None, "A recipe that this one builds on; its path is relative to this file.")
    out: str | None = key(None, "Run folder, in place of runs/<name>.")
    seed: int = key(0, "Seed of every random choice.", ge=0)
    expected: str | None = key(None, "What the run should reach, in words.")
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
    buffer: Buffer = key(Buffer(), "Which groups are trained on.")
    # A word of Python's own can't be written as an attribute: `derived.lag` reads it.
    __annotations__["async"] = "Async"
    locals()["async"] = key(Async(), "Rollouts while the learner works.")
    eval: Eval = key(Eval(), "Evaluation on held-out prompts.")
    checkpoint: Checkpoint = key(Checkpoint(), "What is kept.")
    track: Track = key(Track(), "Where metrics go.")
    checks: Checks = key(Checks(), "Invariants watched at run time.")
    runtime: Runtime = key(Runtime(), "Where the roles live.")
    pools: Pools = key(Pools(), "Who gets how much of a cluster.", ON_RAY)

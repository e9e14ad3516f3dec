"""What every engine offers: tokens in, tokens out. Text is made for people only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from practicum.models.images import Images

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens. A generation ends at a stop token (which is kept) or after max_new_tokens."""

    max_new_tokens: int
    stop: frozenset[int]
    greedy: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class Counter:
    """What the randomness of a generation is a function of, together with the token's position in it.

    So a sample does not depend on what else is in the batch, on order or on time.
    """

    seed: int
    prompt: int
    session: int = 0
    turn: int = 0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One answer to sample. Requests with equal prompts, pictures and experts share the prompt's work."""

    prompt_ids: Sequence[int]
    sampling: Sampling
    counter: Counter
    images: Images | None = None
    experts: Tensor | None = None
    """MoE models: experts [n, L, E] of the first tokens (`Generation.experts`), which take them again."""
    keep: bool = False
    """A later prompt is likely to begin with this one and its answer: an engine may keep what it computed.
    The answer is the same."""


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """What is asked of a sequence beside the logprobs of its tokens."""

    top_k: int = 0
    hidden: bool = False
    temperature: float = 1.0
    vocab: int | None = None
    """Outputs from here on do not count: some models have more outputs than tokens. None: all count."""


LOGPROBS_ONLY = ScoreOptions()


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A whole token sequence, unpadded, of which ids[start:] are scored; pictures come before `start`."""

    ids: Sequence[int]
    start: int
    name: str = ""
    """For errors, such as "prompt 3/session 1/trajectory 0"."""
    images: Images | None = None
    adapter: str | None = None
    """Of a model with several adapters, the one that scores it; None: the base alone."""


@dataclass(slots=True)
class Generation:
    """What the engine sampled. All tensors are on the CPU, and [R] where nothing else is said."""

    tokens: Tensor
    logprobs: Tensor
    """Under the distribution that was really sampled from (temperature and cuts applied; greedy: T = 1)."""
    plain_logprobs: Tensor
    """Under the model's own distribution: temperature 1, nothing cut."""
    finish: Finish
    version_min: int
    version_max: int
    experts: Tensor | None = None
    """MoE models: experts that each input token took [P + R - 1, L, E]; the last token was no input."""


@dataclass(slots=True)
class Scores:
    """What a model says of given tokens from position `start` on. All on the CPU, float32 but the ids."""

    logprobs: Tensor
    """Of the tokens themselves [R]."""
    topk_ids: Tensor | None
    topk_logprobs: Tensor | None
    """The most likely tokens of each position and their logprobs, best first [R, K]."""
    version: int
    hidden: Tensor | None = None
    """Last hidden state that predicts each token [R, H]: with the output head, the whole distribution."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes an engine holds, as measured from its tensors."""

    weights: int
    kv: int


class Engine(Protocol):
    """A model that samples and scores. `generate` and `score` are coroutines of one event loop."""

    version: int

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one answer."""
        ...

    async def score(self, request: ScoreRequest, options: ScoreOptions = LOGPROBS_ONLY) -> Scores:
        """Logprobs of ids[start:], each given all before it; their hidden states too, if asked."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take these weights; what was computed with older ones is never used again."""
        ...

    def sleep(self) -> Memory:
        """Free memory until `wake`; says what was freed. Asking a sleeping engine is an EngineError."""
        ...

    def wake(self) -> None:
        """Be ready again, with the weights as they were."""
        ...

    def memory(self) -> Memory:
        """Bytes held now."""
        ...

    def fingerprint(self) -> Tensor:
        """Logprobs of a fixed token sequence, `models.fingerprint`, to compare with the learner's.

        It is long enough that what the engine may have kept of it from older weights would show.
        """
        ...

    def close(self) -> None:
        """Stop; requests under way fail with an EngineError."""
        ...

"""The interface of engines: tokens in, tokens out. Text is for people only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from practicum.errors import EngineError
from practicum.models.attention import OutputHead
from practicum.models.offloaded_weights import OffloadTarget
from practicum.models.vision import Images

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings. A generation ends at a stop token (which is kept) or after max_new_tokens."""

    max_new_tokens: int
    stop: frozenset[int]
    greedy: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    report: int = 0
    """Most likely tokens of each position to return."""


@dataclass(frozen=True, slots=True)
class Counter:
    """Identity of a generation, which together with the token position determines its randomness. So a sample
    does not depend on the rest of the batch, on order or on time."""

    seed: int
    prompt: int
    session: int = 0
    turn: int = 0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request for a response. Requests with equal prompts, images and experts share the prompt's
    computation."""

    prompt_ids: Sequence[int]
    sampling: Sampling
    counter: Counter
    images: Images | None = None
    experts: Tensor | None = None
    """For MoE models, experts [n, L, E] of the first tokens (`Generation.experts`), which are replayed."""
    keep: bool = False
    """True if a later prompt is likely to extend this prompt and its response, so that the engine may cache
    it. Does not change the response."""

    def check(self, vocab: int, context: int) -> None:
        """Raise EngineError if an engine of these sizes can't serve the request."""
        sampling, length = self.sampling, len(self.prompt_ids)
        _check_ids(self.prompt_ids, "prompt", vocab)
        for name, is_good, expected in (
            ("max_new_tokens", sampling.max_new_tokens >= 1, "1 or more"),
            ("temperature", sampling.temperature > 0, "above 0 (for the best token, set greedy)"),
            ("top_k", sampling.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < sampling.top_p <= 1, "above 0 and up to 1 (off)"),
            ("min_p", 0 <= sampling.min_p < 1, "from 0 (off) to below 1"),
        ):
            if not is_good:
                raise EngineError(f"{name} is {getattr(sampling, name)}, expected {expected}")
        if length + sampling.max_new_tokens > context:
            raise EngineError(
                f"a prompt of {length} tokens and max_new_tokens {sampling.max_new_tokens} do not fit the "
                f"engine's context of {context} tokens: shorten one of them, or create the engine with a "
                "longer context"
            )


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """Scores to compute in addition to the logprobs of the tokens."""

    top_k: int = 0
    hidden: bool = False
    temperature: float = 1.0
    vocab: int | None = None
    """Ignore outputs from this index on, because some models have more outputs than tokens. None means
    none."""


LOGPROBS_ONLY = ScoreOptions()


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """An unpadded token sequence, of which ids[start:] are scored. Images must precede `start`."""

    ids: Sequence[int]
    start: int
    name: str = ""
    """Name for errors, such as "prompt 3/session 1/trajectory 0"."""
    images: Images | None = None
    adapter: str | None = None
    """The adapter that scores it, for a model with several. None means the base."""
    support: Tensor | None = None
    """Tokens [R, K] to score at each position, in place of the most likely ones."""

    def check(self, options: ScoreOptions, vocab: int, longest: int, max_top_k: int | None = None) -> None:
        """Raise EngineError if an engine of these sizes can't serve the request."""
        ids, start, outputs = self.ids, self.start, min(options.vocab or vocab, vocab)
        _check_ids(ids, "sequence to score", vocab)
        if not 1 <= start <= len(ids):
            raise EngineError(f"can't score from token {start}: start must be 1 to {len(ids)}")
        if len(ids) > longest:
            raise EngineError(f"a sequence of {len(ids)} tokens exceeds the engine's maximum of {longest}")
        if max(ids[start:], default=0) >= outputs:
            raise EngineError(f"the tokens to score have ids outside of 0 to {outputs - 1}, the vocabulary")
        if not 0 <= options.top_k <= (most := min(outputs, max_top_k or outputs)):
            raise EngineError(f"top_k is {options.top_k}, expected 0 to {most}")
        if options.temperature <= 0:
            raise EngineError(f"temperature is {options.temperature}, expected above 0")
        support = self.support
        if support is not None and (support.dim() != 2 or len(support) != len(ids) - start):
            raise EngineError(f"tokens to score {list(support.shape)} for {len(ids) - start} positions")
        if (
            support is not None
            and support.numel()
            and not 0 <= int(support.min()) <= int(support.max()) < outputs
        ):
            raise EngineError(f"the tokens to score have ids outside of 0 to {outputs - 1}, the vocabulary")


def _check_ids(ids: Sequence[int], what: str, vocab: int) -> None:
    if not ids:
        raise EngineError(f"the {what} is empty: at least one token is needed")
    if min(ids) < 0 or max(ids) >= vocab:
        raise EngineError(f"the {what} has token ids outside of 0 to {vocab - 1}")


@dataclass(slots=True)
class Generation:
    """A sampled response. Tensors are on the CPU, with shape [R] unless noted."""

    tokens: Tensor
    logprobs: Tensor
    """Logprobs under the sampling distribution, with temperature and truncation (greedy: temperature 1)."""
    plain_logprobs: Tensor
    """Logprobs under the model's distribution, at temperature 1 without truncation."""
    finish: Finish
    version_min: int
    version_max: int
    experts: Tensor | None = None
    """For MoE models, the experts of each input token [P + R - 1, L, E]. The last token was no input."""
    topk_ids: Tensor | None = None
    """The most likely tokens at each position [R, K], if `Sampling.report` asks for them."""
    shared: int = 0
    """Number of its tokens that the engine computed for another generation with equal tokens so far."""


@dataclass(slots=True)
class Scores:
    """Scores of given tokens from position `start` on. On the CPU, float32 except the ids."""

    logprobs: Tensor
    """Logprobs of the tokens [R]."""
    topk_ids: Tensor | None
    topk_logprobs: Tensor | None
    """The most likely tokens at each position and their logprobs, descending [R, K], or the support."""
    version: int
    hidden: Tensor | None = None
    """Last hidden states that predict each token [R, H]. The output head turns them into full
    distributions."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes an engine holds, as measured from its tensors."""

    weights: int
    kv: int


class Generates(Protocol):
    """Samples responses."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one response."""
        ...


class Scorer(Protocol):
    """A model that scores tokens, local or remote. Methods that are not overridden have no effect."""

    def ready(self) -> None:
        """Wait until it is ready. On failure, release all resources."""

    async def score(self, request: ScoreRequest, options: ScoreOptions = LOGPROBS_ONLY) -> Scores:
        """Return logprobs of ids[start:], each given its predecessors, and the scores in `options`."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one response."""
        raise EngineError("this model only scores and can't sample responses")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load these weights, and discard everything computed with older ones."""
        raise EngineError("this model can't load weights")

    def head(self) -> OutputHead:
        """Return the output head, which turns hidden states into distributions."""
        raise EngineError("this engine has no output head: use engine torch, or another distill.signal")

    @property
    def threads(self) -> int:
        """Number of compute threads in other processes."""
        return 0

    def describe(self) -> list[str]:
        """Return messages for the log: separate processes, devices other than the CPU, warnings."""
        return []

    def abort(self, why: str) -> None:
        """Kill the engine's process, if any, after a missed deadline."""

    def close(self) -> None:
        """Stop. Open requests fail with EngineError."""
        ...


class Sleeper(Protocol):
    """A model that can be used between `wake` and `sleep`. It starts awake."""

    owns_weights: bool = True
    """False if other models share the weights, which then stay in place."""

    @property
    def on_cpu(self) -> bool:
        """True if its memory is host memory, or if it holds none while asleep."""
        return True

    @property
    def own_bytes(self) -> int:
        """Bytes of weights that are not shared."""
        return 0

    def wake(self) -> None:
        """Become ready again, with the same weights."""
        ...

    def sleep(self) -> object:
        """Free memory until `wake`. Engines return the freed bytes. Using a sleeping engine is an
        EngineError."""
        ...

    def offload(self, where: OffloadTarget) -> object:
        """Move the weights of a sleeping model to host memory or disk, unless they are shared."""


class Engine(Scorer, Sleeper, Protocol):
    """A model that samples and scores. `generate` and `score` must run on one event loop."""

    version: int
    model: Any = None
    """The model object, if it is in this process."""

    def sleep(self) -> Memory: ...

    def memory(self) -> Memory:
        """Return the bytes that it holds."""
        ...

    def fingerprint(self) -> Tensor:
        """Return logprobs of the fixed token sequence of `models.fingerprint`, to compare with the learner's.
        It is long enough to expose a stale prefix cache."""
        ...

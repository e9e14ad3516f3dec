"""What every engine offers: tokens in, tokens out. Text is made for people only."""

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
    """One answer to sample. Requests with equal prompts, images and experts share the prompt's work."""

    prompt_ids: Sequence[int]
    sampling: Sampling
    counter: Counter
    images: Images | None = None
    experts: Tensor | None = None
    """MoE models: experts [n, L, E] of the first tokens (`Generation.experts`), which take them again."""
    keep: bool = False
    """A later prompt is likely to begin with this one and its answer: an engine may keep what it computed.
    The answer is the same."""

    def check(self, vocab: int, context: int) -> None:
        """Raise an EngineError if an engine of these sizes can't do it."""
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
                f"engine's context of {context} tokens: shorten one of them, or make the engine with a "
                "longer context"
            )


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
    """A whole token sequence, unpadded, of which ids[start:] are scored; images come before `start`."""

    ids: Sequence[int]
    start: int
    name: str = ""
    """For errors, such as "prompt 3/session 1/trajectory 0"."""
    images: Images | None = None
    adapter: str | None = None
    """Of a model with several adapters, the one that scores it; None: the base alone."""

    def check(self, options: ScoreOptions, vocab: int, longest: int, max_top_k: int | None = None) -> None:
        """Raise an EngineError if an engine of these sizes can't do it."""
        ids, start, outputs = self.ids, self.start, min(options.vocab or vocab, vocab)
        _check_ids(ids, "sequence to score", vocab)
        if not 1 <= start <= len(ids):
            raise EngineError(f"can't score {len(ids)} tokens from {start} on: start is 1 to {len(ids)}")
        if len(ids) > longest:
            raise EngineError(f"{len(ids)} tokens to score, the engine has room for {longest}")
        if max(ids[start:], default=0) >= outputs:
            raise EngineError(f"the tokens to score have ids outside of 0 to {outputs - 1}, the vocabulary")
        if not 0 <= options.top_k <= (most := min(outputs, max_top_k or outputs)):
            raise EngineError(f"top_k is {options.top_k}, expected 0 to {most}")
        if options.temperature <= 0:
            raise EngineError(f"temperature is {options.temperature}, expected above 0")


def _check_ids(ids: Sequence[int], what: str, vocab: int) -> None:
    if not ids:
        raise EngineError(f"the {what} is empty: at least one token is needed")
    if min(ids) < 0 or max(ids) >= vocab:
        raise EngineError(f"the {what} has token ids outside of 0 to {vocab - 1}")


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
    shared: int = 0
    """How many of its tokens were computed for another generation that was equal so far."""


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


class Generates(Protocol):
    """Samples responses."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one response."""
        ...


class Scorer(Protocol):
    """A model that scores tokens, here or elsewhere. What an implementation leaves out has no effect."""

    def ready(self) -> None:
        """Wait until it can work; if it can't, nothing of it stays behind."""

    async def score(self, request: ScoreRequest, options: ScoreOptions = LOGPROBS_ONLY) -> Scores:
        """Return logprobs of ids[start:], each given all before it, and what the options ask for."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one response."""
        raise EngineError("this model scores answers, and samples none")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take these weights; what was computed with older ones is never used again."""
        raise EngineError("this model does not take weights")

    def head(self) -> OutputHead:
        """Return the output head, which with hidden states makes the whole distribution."""
        raise EngineError("this engine has no output head: use engine torch, or another distill.signal")

    @property
    def threads(self) -> int:
        """Threads that compute in other processes."""
        return 0

    def describe(self) -> list[str]:
        """Return sentences for the log: separate processes, devices other than the CPU, warnings."""
        return []

    def abort(self, why: str) -> None:
        """End the engine's process after a missed deadline, if it has one."""

    def close(self) -> None:
        """Stop; open requests fail with an EngineError."""
        ...


class Sleeper(Protocol):
    """A model that works between `wake` and `sleep`; awake when it is made."""

    owns_weights: bool = True
    """False if others compute with the same weights, so that they stay where they are."""

    @property
    def on_cpu(self) -> bool:
        """True if its memory is the host's, or if it holds none while it sleeps."""
        return True

    @property
    def own_bytes(self) -> int:
        """Bytes of the weights that nobody else uses."""
        return 0

    def wake(self) -> None:
        """Be ready again, with the weights as they were."""
        ...

    def sleep(self) -> object:
        """Free memory until `wake`; an engine returns what it freed. Using it meanwhile is an EngineError."""
        ...

    def offload(self, where: OffloadTarget) -> object:
        """Move the weights of a sleeping model to the host's memory or to disk, if they are its own."""


class Engine(Scorer, Sleeper, Protocol):
    """A model that samples and scores. `generate` and `score` are coroutines of one event loop."""

    version: int
    model: Any = None
    """The model object that it computes with, if that is in this process."""

    def sleep(self) -> Memory: ...

    def memory(self) -> Memory:
        """Return the bytes it holds."""
        ...

    def fingerprint(self) -> Tensor:
        """Return logprobs of a fixed token sequence, `models.fingerprint`, to compare with the learner's.

        It is long enough to expose a stale prefix cache.
        """
        ...

"""The torch engine: any transformers causal LM, with continuous batching and KV memory that grows.

Equal prompts are computed once, and a prompt that continues a kept answer only from there on. Left out on
purpose: paging (all slots are as long as the longest running sequence) and reuse of prompts that merely begin
alike. This file is what callers use; the engine's work is `scheduler.step`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.engines.protocol import (
    LOGPROBS_ONLY,
    GenerateRequest,
    Generation,
    Memory,
    Sampling,
    ScoreOptions,
    ScoreRequest,
    Scores,
)
from practicum.engines.torch.engine_thread import EngineThread
from practicum.engines.torch.model_runner import ModelRunner
from practicum.engines.torch.prompt_cache import PromptKey
from practicum.engines.torch.request_queue import GenerateJob, ScoreJob
from practicum.engines.torch.sampler import Draw, stream_key
from practicum.engines.torch.scheduler import EngineStats, Scheduler
from practicum.engines.torch.score_batch import empty_scores, score_batch
from practicum.errors import EngineError
from practicum.models.fingerprint import fingerprint_ids
from practicum.models.images import Images
from practicum.models.load_model import context_length
from practicum.models.offloaded_weights import (
    OffloadedWeights,
    OffloadTarget,
    distinct_tensors,
    named_tensors,
    return_memory,
    take_weights,
)
from practicum.models.vision import picture_spans


class TorchEngine:
    """Samples and scores with the model object it is given; see `protocol.Engine`.

    `slots` sequences are decoded at once, each of up to `context` tokens with its prompt. One forward call
    takes up to `prefill_tokens` tokens of prompts, or `score_tokens` to score (a longer sequence goes alone).
    Answers that are to be kept take up to `keep_tokens` tokens with their prompts; unset: slots x context.
    Where numbers depend on the batch, a `repeatable` engine computes what it gives sequence by sequence.
    With `owns_weights`, a sleeping engine may offload them: nobody else may use the model then.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        context: int,
        version: int = 0,
        prefill_tokens: int = 8192,
        score_tokens: int = 8192,
        keep_tokens: int | None = None,
        owns_weights: bool = False,
        repeatable: bool = True,
    ) -> None:
        if slots < 1:
            raise EngineError(f"an engine needs at least 1 slot, not {slots}")
        longest = context_length(model)
        if longest is not None and context > longest:
            raise EngineError(f"a context of {context} tokens is more than the model's {longest}")
        self.version = version
        self._model, self._owns_weights = model, owns_weights
        self._context, self._longest = context, longest or context
        self.runner = ModelRunner(model)
        self.alone = repeatable and not self.runner.invariant
        """Whether turns are confirmed and sequences scored each by itself: `confirm.py`."""
        self.scheduler = Scheduler(
            self.runner,
            slots=slots,
            context=context,
            prefill_tokens=prefill_tokens,
            score_tokens=score_tokens,
            keep_tokens=slots * context if keep_tokens is None else keep_tokens,
            alone=self.alone,
        )
        self.scheduler.version = version
        self.offloaded: OffloadedWeights | None = None
        self.thread = EngineThread(self.scheduler.step, self.scheduler.reset, "torch engine")

    @property
    def awake(self) -> bool:
        """Whether it has its KV memory: neither asleep nor closed."""
        return self.scheduler.memory is not None

    @property
    def idle(self) -> bool:
        """Whether nobody waits for it and no sequence is in it."""
        return not self.thread.open_jobs and not self.scheduler.busy

    @property
    def closed(self) -> bool:
        """Whether it was stopped for good."""
        return self.thread.closed

    @property
    def stats(self) -> EngineStats:
        """What the engine has done since it was made."""
        return self.scheduler.stats

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one answer.

        With `keep`, what was computed is kept for a prompt that begins with this one and its answer, until
        one comes, others need the room, or the weights change.
        """
        prompt_ids, sampling = request.prompt_ids, request.sampling
        self._check_awake()
        self._check_ids(prompt_ids, "prompt")
        self._check_images(prompt_ids, request.images)
        _check_sampling(sampling)
        if len(prompt_ids) + sampling.max_new_tokens > self._context:
            raise EngineError(
                f"a prompt of {len(prompt_ids)} tokens and max_new_tokens {sampling.max_new_tokens} do not "
                f"fit the engine's context of {self._context} tokens: shorten one of them, or make the "
                "engine with a longer context"
            )
        prompt = PromptKey.of(prompt_ids, request.images, self._known_experts(prompt_ids, request.experts))
        job = GenerateJob(prompt, sampling, Draw.of(sampling), stream_key(request.counter), request.keep)
        return await self.thread.submit(job)

    async def score(self, request: ScoreRequest, options: ScoreOptions = LOGPROBS_ONLY) -> Scores:
        """Logprobs of ids[start:], each given all before it; their hidden states too, if asked.

        The numbers do not depend on what else is scored at the same time.
        """
        self._check_awake()
        ids, start = request.ids, request.start
        self._check_ids(ids, "sequence to score")
        if not 1 <= start <= len(ids):
            raise EngineError(f"can't score {len(ids)} tokens from {start} on: start is 1 to {len(ids)}")
        if len(ids) > self._longest:
            raise EngineError(f"{len(ids)} tokens to score are more than the model's {self._longest}")
        outputs = min(options.vocab or self.runner.vocab, self.runner.vocab)
        if max(ids[start:], default=0) >= outputs:
            raise EngineError(f"the tokens to score have ids outside of 0 to {outputs - 1}, the vocabulary")
        if not 0 <= options.top_k <= outputs:
            raise EngineError(f"top_k is {options.top_k}, expected 0 to {outputs}, the vocabulary's size")
        if options.temperature <= 0:
            raise EngineError(f"temperature is {options.temperature}, expected above 0")
        adapters = self.runner.adapters
        if request.adapter is not None and (adapters is None or request.adapter not in adapters.names):
            raise EngineError(f"the engine's model has no adapter {request.adapter}")
        self._check_images(ids[:start], request.images)
        if start == len(ids):
            return empty_scores(self.runner, options, self.version)
        return await self.thread.submit(ScoreJob(replace(request, ids=list(ids)), options))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take these weights by name, without a copy where they are the engine's own tensors already.

        An EngineError, with nothing changed, if they do not fit or while requests are under way.
        """
        if self.offloaded is not None:
            raise EngineError("the engine sleeps and its weights are offloaded: wake it to load weights")
        self._check_idle("load weights")
        with self.thread.turn:
            take_weights(self._model, weights)
            self.runner.forget_packed(named_tensors(self._model).values())
            self.scheduler.reset()
            self.version = self.scheduler.version = version
        self.thread.order.begin_anew(self.thread)

    def sleep(self) -> Memory:
        """Free KV memory and packed weights; says what was freed. `offload` then frees the weights too."""
        self._check_awake()
        self._check_idle("sleep")
        with self.thread.take_turn("go to sleep"):
            before = self.memory()
            self.scheduler.free()
            self.runner.forget_packed()
            packed = before.weights - self.memory().weights
            if self.runner.device.type != "cpu":  # a CPU's KV memory is in pages of its own
                return_memory(self.runner.device)
        return Memory(packed, before.kv)

    def offload(self, where: OffloadTarget) -> Memory:
        """Move a sleeping engine's weights to the host's memory or to disk; says what its device gained.

        On a CPU, its memory is the host's: only disk frees it.
        """
        if self.awake or not self._owns_weights:
            raise EngineError("only a sleeping engine that owns its weights can offload them")
        before = self.memory()
        if self.offloaded is None:
            self.offloaded = OffloadedWeights(self._model, where)
        else:
            self.offloaded.move(where)
        return_memory(self.runner.device)
        return Memory(before.weights - self.memory().weights, 0)

    def wake(self) -> None:
        """Be ready again, with the weights as they were. An engine that is awake stays as it is."""
        self._check_open()
        with self.thread.take_turn("wake"):
            if self.offloaded is not None:
                self.offloaded.restore()
                self.offloaded = None
            self.scheduler.allocate()

    def memory(self) -> Memory:
        """Bytes held now on the model's device: its weights, packed copies of them, and KV memory with what
        is kept beside it."""
        held = (t.nbytes for t in distinct_tensors(self._model) if t.device == self.runner.device)
        return Memory(sum(held) + self.runner.packed_bytes, self.scheduler.kv_bytes)

    @torch.no_grad()
    def fingerprint(self) -> Tensor:
        """Logprobs [15] of a fixed token sequence, to compare with the learner's."""
        if self.offloaded is not None:
            raise EngineError("the engine sleeps and its weights are offloaded: wake it for a fingerprint")
        job = ScoreJob(ScoreRequest(fingerprint_ids(self.runner.vocab), 1))
        with self.thread.turn:
            return score_batch(self.runner, [job], self.version)[0].logprobs

    def close(self) -> None:
        """Stop; requests under way fail with an EngineError. Offloaded weights are lost."""
        self.thread.close()
        self.scheduler.free()
        if self.offloaded is not None:
            self.offloaded.drop()

    def _check_open(self) -> None:
        if self.closed:
            raise EngineError("the engine is closed: make a new one")

    def _check_awake(self) -> None:
        self._check_open()
        if not self.awake:
            raise EngineError("the engine sleeps: call wake() first")

    def _check_idle(self, what: str) -> None:
        if count := self.thread.open_jobs:
            raise EngineError(f"can't {what} with {count} requests under way: await or cancel them first")

    def _check_ids(self, ids: Sequence[int], what: str) -> None:
        if not ids:
            raise EngineError(f"the {what} is empty: at least one token is needed")
        if min(ids) < 0 or max(ids) >= self.runner.vocab:
            raise EngineError(f"the {what} has token ids outside of 0 to {self.runner.vocab - 1}")

    def _known_experts(self, ids: Sequence[int], experts: Tensor | None) -> Tensor | None:
        """The experts that can be taken again: none, if routers weigh them in a way of their own."""
        routes = self.runner.routes
        if experts is None or routes is None or not routes.can_replay:
            return None
        if len(experts) > len(ids) or experts.shape[1:] != (routes.layers, routes.per_token):
            raise EngineError(
                f"experts {list(experts.shape)} do not fit a prompt of {len(ids)} tokens in a model with "
                f"{routes.layers} layers of {routes.per_token} experts for each token"
            )
        return experts

    def _check_images(self, ids: Sequence[int], images: Images | None) -> None:
        """Pictures that do not fit are the caller's error here, not every request's in the engine."""
        if images is None:
            return
        if not self.runner.sees:
            raise EngineError(f"{type(self._model).__name__} takes no pictures: it is not a vision model")
        picture_spans(self._model.config, ids, images)


def _check_sampling(sampling: Sampling) -> None:
    wanted = (
        ("max_new_tokens", sampling.max_new_tokens >= 1, "1 or more"),
        ("temperature", sampling.temperature > 0, "above 0 (for the best token, set greedy)"),
        ("top_k", sampling.top_k >= 0, "0 (off) or more"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0 and up to 1 (off)"),
        ("min_p", 0 <= sampling.min_p < 1, "from 0 (off) to below 1"),
    )
    for name, good, expected in wanted:
        if not good:
            raise EngineError(f"{name} is {getattr(sampling, name)}, expected {expected}")

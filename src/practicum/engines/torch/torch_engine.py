"""The torch engine: continuous batching with growing KV memory, for any transformers causal LM.

Equal prompts are computed once, and sessions decode as one sequence until their tokens differ. A prompt that
extends a cached sequence, or its beginning, is computed only from there. Paging (all slots are as long as the
longest running sequence) is intentionally left out. This file has the interface, and `scheduler.step` does
the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.devices import describe_device
from practicum.engines.protocol import (
    LOGPROBS_ONLY,
    Engine,
    GenerateRequest,
    Generation,
    Memory,
    ScoreOptions,
    ScoreRequest,
    Scores,
)
from practicum.engines.torch.engine_thread import EngineThread
from practicum.engines.torch.model_runner import ModelRunner
from practicum.engines.torch.prompt_cache import PromptKey
from practicum.engines.torch.request_queue import GenerateJob, ScoreJob
from practicum.engines.torch.sampler import Draw, stream_key
from practicum.engines.torch.scheduler import Scheduler
from practicum.engines.torch.score_batch import empty_scores, score_batch
from practicum.errors import EngineError
from practicum.models.attention import OutputHead
from practicum.models.fingerprint import fingerprint_ids
from practicum.models.load_model import context_length
from practicum.models.offloaded_weights import (
    OffloadedWeights,
    OffloadTarget,
    distinct_tensors,
    named_tensors,
    return_memory,
    take_weights,
)
from practicum.models.vision import Images, picture_spans
from practicum.recipe.counts import CPU_MICROBATCH_TOKENS


class TorchEngine(Engine):
    """Samples and scores with a model object. See `protocol.Engine`.

    Decodes `slots` sequences together, each of up to `context` tokens including its prompt. A forward pass
    takes up to `prefill_tokens` tokens of prompts, or `score_tokens` tokens to score (longer sequences run
    alone). The cache holds slots × context tokens. With `owns_weights`, a sleeping engine may offload the
    model, which must not be shared.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        context: int,
        prefill_tokens: int = 8192,
        score_tokens: int = 8192,
        owns_weights: bool = False,
    ) -> None:
        longest = context_length(model)
        if longest is not None and context > longest:
            raise EngineError(f"a context of {context} tokens exceeds the model's {longest}")
        self.version = 0
        self.model: PreTrainedModel = model
        self.owns_weights = owns_weights
        self._context, self._longest = context, longest or context
        self.runner = ModelRunner(model)
        if self.on_cpu:
            score_tokens = min(score_tokens, CPU_MICROBATCH_TOKENS)
        self.scheduler = Scheduler(self.runner, slots, context, prefill_tokens, score_tokens)
        self.stats = self.scheduler.stats
        self.offloaded: OffloadedWeights | None = None
        self.thread = EngineThread(self.scheduler.step, self.scheduler.reset, "torch engine")

    @property
    def awake(self) -> bool:
        """True if it has its KV memory: neither asleep nor closed."""
        return self.scheduler.memory is not None

    @property
    def idle(self) -> bool:
        """True if it has no requests."""
        return not self.thread.open_jobs and not self.scheduler.busy

    @property
    def closed(self) -> bool:
        return self.thread.closed

    @property
    def step_s(self) -> float:
        return self.thread.step_s

    @property
    def on_cpu(self) -> bool:
        return self.runner.device.type == "cpu"

    @property
    def own_bytes(self) -> int:
        own = distinct_tensors(self.model) if self.owns_weights else named_tensors(self.model).values()
        return sum(tensor.nbytes for tensor in own)

    def head(self) -> OutputHead:
        return OutputHead.of(self.model, copy=self.owns_weights)

    def describe(self) -> list[str]:
        lines = [] if self.on_cpu else [describe_device(self.runner.device)]
        if not self.runner.invariant:
            kind = f"{self.runner.device.type}, {str(self.model.dtype).removeprefix('torch.')}"
            lines.append(
                f"logprobs depend in their last bits on the rest of the engine's batch ({kind}), so each is "
                "computed alone to make runs repeatable"
            )
        return lines

    async def generate(self, request: GenerateRequest) -> Generation:
        ids, sampling = request.prompt_ids, request.sampling
        self._check_awake()
        request.check(self.runner.vocab, self._context)
        self._check_images(ids, request.images)
        routes, experts = self.runner.routes, request.experts
        if routes is None:  # experts, if any, can't be replayed
            experts = None
        elif experts is not None and (
            len(experts) > len(ids) or experts.shape[1:] != (routes.layers, routes.per_token)
        ):
            raise EngineError(
                f"experts {list(experts.shape)} do not fit a prompt of {len(ids)} tokens in a model with "
                f"{routes.layers} layers of {routes.per_token} experts for each token"
            )
        prompt, key = PromptKey.of(ids, request.images, experts), stream_key(request.counter)
        return await self.thread.submit(GenerateJob(prompt, sampling, Draw.of(sampling), key, request.keep))

    async def score(self, request: ScoreRequest, options: ScoreOptions = LOGPROBS_ONLY) -> Scores:
        ids, start = request.ids, request.start
        self._check_awake()
        request.check(options, self.runner.vocab, self._longest)
        adapters = self.runner.adapters
        if request.adapter is not None and (adapters is None or request.adapter not in adapters.names):
            raise EngineError(f"the engine's model has no adapter {request.adapter}")
        self._check_images(ids[:start], request.images)
        if start == len(ids):
            return empty_scores(self.runner, options, self.version, request.support)
        return await self.thread.submit(ScoreJob(replace(request, ids=list(ids)), options))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load these weights by name, without a copy if they are the engine's tensors. Raise EngineError
        without any change if they do not fit or requests are in flight."""
        self._check_idle("load weights")
        with self.thread.turn:
            take_weights(self.model, weights)
            self.runner.forget_packed(named_tensors(self.model).values())
            self.scheduler.reset()
            self.version = self.scheduler.version = version
        self.thread.order.mark_newest(self.thread)

    def sleep(self) -> Memory:
        """Free KV memory and packed weights. Return the freed bytes. `offload` can then free the weights
        too."""
        self._check_awake()
        self._check_idle("sleep")
        with self.thread.take_turn("go to sleep"):
            before = self.memory()
            self.scheduler.free()
            self.runner.forget_packed()
            packed = before.weights - self.memory().weights
            if not self.on_cpu:  # on a CPU, the pages of KV memory are returned automatically
                return_memory(self.runner.device)
        return Memory(packed, before.kv)

    def offload(self, where: OffloadTarget) -> Memory:
        """Move a sleeping engine's weights to host memory or disk. Return the freed bytes of its device. On a
        CPU, only moving to disk frees memory."""
        if self.awake:
            raise EngineError("only a sleeping engine can offload its weights")
        if not self.owns_weights:
            return Memory(0, 0)
        before = self.memory()
        if self.offloaded is None:
            self.offloaded = OffloadedWeights(self.model, where)
        else:
            self.offloaded.move(where)
        return_memory(self.runner.device)
        return Memory(before.weights - self.memory().weights, 0)

    def wake(self) -> None:
        if self.closed:
            raise EngineError("the engine is closed: create a new one")
        with self.thread.take_turn("wake"):
            if self.offloaded is not None:
                self.offloaded.restore()
                self.offloaded = None
            self.scheduler.allocate()

    def memory(self) -> Memory:
        """Return the bytes on the model's device: weights, packed copies of them, KV memory and cache."""
        held = (t.nbytes for t in distinct_tensors(self.model) if t.device == self.runner.device)
        return Memory(sum(held) + self.runner.packed_bytes, self.scheduler.kv_bytes)

    @torch.no_grad()
    def fingerprint(self) -> Tensor:
        self._check_weights("a fingerprint")
        job = ScoreJob(ScoreRequest(fingerprint_ids(self.runner.vocab), 1))
        with self.thread.turn:
            return score_batch(self.runner, [job], self.version)[0].logprobs

    def close(self) -> None:
        self.thread.close()
        self.scheduler.free()
        if self.offloaded is not None:
            self.offloaded.drop()

    def _check_awake(self) -> None:
        if not self.awake:
            why = "is closed: create a new one" if self.closed else "sleeps: call wake() first"
            raise EngineError(f"the engine {why}")

    def _check_weights(self, what: str) -> None:
        if self.offloaded is not None:
            raise EngineError(f"the engine sleeps and its weights are offloaded: wake it for {what}")

    def _check_idle(self, what: str) -> None:
        self._check_weights(f"this ({what})")
        if count := self.thread.open_jobs:
            raise EngineError(f"can't {what} with {count} requests in flight: await or cancel them first")

    def _check_images(self, ids: Sequence[int], images: Images | None) -> None:
        """Raise for images that do not fit, so that only this request fails."""
        if images is None:
            return
        if not self.runner.sees:
            raise EngineError(f"{type(self.model).__name__} takes no images: it is not a vision model")
        picture_spans(self.model.config, ids, images)

"""The vLLM engine: vLLM's AsyncLLM behind `protocol.Engine`."""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from practicum.compat.transformers import stored_weights
from practicum.engines.protocol import (
    LOGPROBS_ONLY,
    Engine,
    GenerateRequest,
    Generation,
    Memory,
    Sampling,
    ScoreOptions,
    ScoreRequest,
    Scores,
)
from practicum.engines.torch.sampler import stream_key
from practicum.engines.vllm.send_weights import Weights, WeightSender
from practicum.engines.vllm.vllm_setup import VllmSetup
from practicum.engines.vllm.vllm_thread import VllmThread
from practicum.errors import EngineError
from practicum.models.adapter_files import SavedAdapter
from practicum.models.fingerprint import LENGTH, fingerprint_ids
from practicum.models.load_model import skeleton
from practicum.recipe.schema.recipe import Model

_MEMORY = Path("/dev/shm")


class VllmFacts(NamedTuple):
    """Sizes that vLLM reports when it is ready, of all workers together. Threads are those of each."""

    weights: int = 0
    kv: int = 0
    vocab: int = 0
    threads: int = 0
    block: int = 0
    """Tokens of a block of KV memory. Prompts share whole blocks."""
    release: str = ""
    workers: int = 1


class VllmEngine(Engine):
    """Samples and scores with vLLM. See `protocol.Engine`.

    Weights are sent by `load_weights`, unless the setup lets vLLM load them. `weights` returns them for an
    engine that wakes, with their version. `folder` has the model's configuration, and goes with the engine.
    Score requests may name the `adapters` by their fingerprints. Without `wait`, call `ready` before anything
    else. `write_adapter` puts an adapter's weights into a folder in PEFT's format: then adapters are what
    `load_weights` sends.
    """

    def __init__(
        self,
        setup: VllmSetup,
        *,
        weights: Callable[[], tuple[Weights, int]] | None = None,
        folder: TemporaryDirectory[str] | None = None,
        write_adapter: Callable[[Path, Mapping[str, Tensor]], None] | None = None,
        adapters: Sequence[SavedAdapter] = (),
        wait: bool = True,
    ) -> None:
        self._setup, self._source, self._folder = setup, weights, folder
        self._write_adapter, self._first_adapters = write_adapter, adapters
        self.version = 0
        self.facts = VllmFacts()
        self._asleep, self._in_flight = False, 0
        self._broken: str | None = None if setup.loads else "no weights were loaded yet"
        self._adapters: dict[str, Any] = {}
        """vLLM's requests for adapters that requests may name."""
        self._sent_adapter: tuple[str, TemporaryDirectory[str]] | None = None
        self._numbers = itertools.count(1)
        self._scored_by: tuple[float, int] | None = None
        """Temperature and vocabulary of the prompts that are being scored."""
        self._scoring = 0
        self._score_turn = asyncio.Condition()
        self._sender: WeightSender | None = None
        self._closed = False
        self._vllm = VllmThread(setup)
        if wait:
            self.ready()

    def ready(self) -> None:
        """Wait until vLLM can work, with its adapters and weights. If it can't, its process is stopped."""
        if self._sender is not None:
            return
        try:
            greedy = Sampling(1, frozenset(), greedy=True)
            self._vllm.ready(lambda: self._run([0], _sampling_params(greedy), None))
            self._prepare()
            for saved in self._first_adapters:
                self._take_adapter(saved.fingerprint, str(saved.folder.resolve()))
            if self._source is not None:
                self.load_weights(*self._source())
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        import vllm

        config = self._vllm.llm.vllm_config
        vocab = int(config.model_config.get_vocab_size())
        self._workers("practicum_prepare", vocab, self._setup.keeps_weights)
        weights, kv, threads = zip(*self._workers("practicum_facts"), strict=True)
        block, release = config.cache_config.block_size, vllm.__version__  # pyright: ignore[reportAttributeAccessIssue]
        self.facts = VllmFacts(sum(weights), sum(kv), vocab, threads[0], block, release, len(threads))
        transfer = config.weight_transfer_config
        self._sender = WeightSender(
            self._vllm.call, len(threads), None if transfer is None else transfer.backend
        )
        self._own_sleep = bool(config.model_config.enable_sleep_mode)

    @property
    def pid(self) -> int:
        """The process id of vLLM's engine core."""
        return self._vllm.pid

    @property
    def threads(self) -> int:
        return self.facts.threads

    @property
    def own_bytes(self) -> int:
        return self.memory().weights

    def describe(self) -> list[str]:
        facts = self.facts
        workers = f" with {facts.workers} workers" if facts.workers > 1 else ""
        return [
            f"{self._setup.where}: vLLM {facts.release} in process {self.pid}{workers}, {facts.threads} "
            f"thread{'s' * (facts.threads > 1)}, "
            f"{facts.weights / 2**20:,.1f} MiB of weights, {facts.kv / 2**20:,.1f} MiB of KV memory"
        ]

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample a response. Prompts with a common prefix share full blocks of KV memory."""
        if request.images is not None or request.experts is not None:
            raise EngineError("images and replayed experts need the torch engine")
        request.check(self.facts.vocab, self._setup.context)
        params = _sampling_params(request.sampling, stream_key(request.counter) % 2**63)
        return await self._ask(lambda: self._generate(request.prompt_ids, params), "a generation")

    async def score(self, request: ScoreRequest, options: ScoreOptions = LOGPROBS_ONLY) -> Scores:
        """Return logprobs of ids[start:]. vLLM has no hidden states."""
        if request.images is not None or options.hidden:
            raise EngineError("images and hidden states need the torch engine")
        request.check(options, self.facts.vocab, self._setup.context - 1, self._setup.max_logprobs)
        if request.start == len(request.ids):
            empty = torch.empty(0, options.top_k + 1)
            return _scores(empty.long(), empty, self.version)
        return await self._ask(lambda: self._score(request, options), "a score")

    def load_weights(self, weights: Weights, version: int) -> None:
        """Load these weights. After an error, the engine can't be used until another load completes."""
        self._check_idle("load weights")
        if self._write_adapter is not None:
            self._send_adapter(dict(weights), version)
            return
        self._broken = "its weights were loaded only in part: load all of them"
        assert self._sender is not None
        if self._setup.has_states:
            weights = stored_weights(skeleton(Model(path=self._setup.model)), weights)
        self._sender.send(weights)
        self._reset_cache()
        self.version, self._broken = version, None

    def _send_adapter(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Write an adapter to a folder for vLLM, where it stays until the next one replaces it."""
        assert self._write_adapter is not None
        old, self._sent_adapter = self._sent_adapter, None
        if old is not None:
            self._vllm.call("remove_lora", self._adapters.pop(old[0]).lora_int_id)
            old[1].cleanup()
        name = f"of version {version}, number {next(self._numbers)}"
        folder = TemporaryDirectory(prefix="practicum-adapter-", dir=_MEMORY if _MEMORY.is_dir() else None)
        try:
            self._write_adapter(Path(folder.name), weights)
            self._take_adapter(name, folder.name)
        except BaseException:
            folder.cleanup()
            raise
        self._sent_adapter, self.version = (name, folder), version

    def _take_adapter(self, name: str, folder: str) -> None:
        """Load an adapter in PEFT's format, which requests may name. The folder must stay."""
        from vllm.lora.request import LoRARequest

        # vLLM caches prompts by the adapter's number, so numbers must be unique.
        request = LoRARequest(name, next(self._numbers), folder)
        self._add_adapter(request)
        self._adapters[name] = request

    def _add_adapter(self, request: Any) -> None:
        try:
            added = self._vllm.call("add_lora", request)
        except EngineError as error:
            raise EngineError(f"vLLM can't take the adapter {request.lora_name}: {error}") from error
        if not added or request.lora_int_id not in self._vllm.call("list_loras"):
            raise EngineError(f"vLLM did not take the adapter {request.lora_name}")

    def sleep(self) -> Memory:
        """Free weights and KV memory until `wake`. vLLM's other memory stays."""
        self._check_idle("sleep")
        if self._source is None and not self._has_folder_weights:
            raise EngineError(
                "a vLLM engine without a source of weights can't sleep: its weights could not be restored"
            )
        freed = self.memory() if self._write_adapter is None else Memory(0, self.facts.kv)
        self._reset_cache()
        if self._own_sleep:  # level 1 keeps the weights in the host's memory
            self._vllm.call("sleep", 1 if self._setup.keeps_weights else 2)
        else:
            self._workers("practicum_sleep")
        self._asleep = True
        return freed

    def wake(self) -> None:
        """Become ready again, with the same weights. Has no effect on an awake engine."""
        if not self._asleep:
            return
        if self._own_sleep:
            self._vllm.call("wake_up")
        else:
            self._workers("practicum_wake")
        self._asleep = False
        if self._write_adapter is None and self._has_folder_weights:
            assert self._sender is not None
            self._sender.load_file(None)  # which removes the adapters
            for adapter in self._adapters.values():
                self._add_adapter(adapter)
        else:
            assert self._source is not None
            self.load_weights(*self._source())

    @property
    def _has_folder_weights(self) -> bool:
        return self._setup.loads and self.version == 0

    def memory(self) -> Memory:
        """Return the bytes of vLLM's weights and KV memory."""
        if self._closed:
            return Memory(0, 0)
        if self._asleep:
            return Memory(self.facts.weights if self._write_adapter is not None else 0, 0)
        return Memory(self.facts.weights, self.facts.kv)

    def fingerprint(self) -> Tensor:
        """Return the logprobs of a fixed token sequence.

        The last one is that of a token sampled after the others, of which vLLM caches a whole block: a block
        of older weights shows in it. Scores never use the cache.
        """
        self._check_awake()
        ids = fingerprint_ids(self.facts.vocab, min(self._setup.context - 1, self.facts.block + LENGTH))
        params = _sampling_params(Sampling(1, frozenset(), greedy=True), only=ids[-1])
        # First, because a score of the sequence would cache a block of the new weights.
        sampled = self._vllm.wait(lambda: self._generate(ids[:-1], params), "a fingerprint")
        request = ScoreRequest(ids, 1)
        scored = self._vllm.wait(lambda: self._score(request, LOGPROBS_ONLY), "a fingerprint")
        return torch.cat([scored.logprobs[:-1], sampled.plain_logprobs])

    def close(self) -> None:
        """Stop. Requests in flight fail with an EngineError."""
        if self._closed:
            return
        self._closed = True
        if self._sender is not None:
            self._sender.close()
        self._vllm.close()
        for folder in (self._folder, None if self._sent_adapter is None else self._sent_adapter[1]):
            if folder is not None:
                folder.cleanup()

    async def _ask(self, work: Callable[[], Any], about: str) -> Any:
        self._check_awake()
        self._in_flight += 1
        try:
            return await self._vllm.ask(work, about)
        finally:
            self._in_flight -= 1

    # The following coroutines run on vLLM's loop.

    async def _generate(self, prompt_ids: Sequence[int], params: Any) -> Generation:
        output = (await self._run(prompt_ids, params, self._adapter(None))).outputs[0]
        sampled, plain = _tensor(output.logprobs.logprobs, np.float32).view(-1, 2).unbind(1)
        finish = "stop" if output.finish_reason == "stop" else "length"
        tokens, version = _tensor(output.token_ids, np.int64), self.version
        return Generation(tokens, sampled, plain, finish, version, version)

    async def _score(self, request: ScoreRequest, options: ScoreOptions) -> Scores:
        adapter = self._adapter(request.adapter)
        outputs = min(options.vocab or self.facts.vocab, self.facts.vocab)
        async with self._scored_with(options.temperature, outputs):
            params = _params(max_tokens=1, temperature=0.0, prompt_logprobs=options.top_k)
            output = await self._run(request.ids, params, adapter)
        flat, width, start = output.prompt_logprobs, options.top_k + 1, request.start - 1
        ids = _tensor(flat.token_ids, np.int64).view(-1, width)
        logprobs = _tensor(flat.logprobs, np.float32).view(-1, width)
        return _scores(ids[start:], logprobs[start:], self.version)

    @asynccontextmanager
    async def _scored_with(self, *wanted: Any) -> AsyncIterator[None]:
        """Wait until prompts with other settings are scored: vLLM's sampler has one setting at a time."""
        async with self._score_turn:
            await self._score_turn.wait_for(lambda: self._scored_by == wanted or not self._scoring)
            if self._scored_by != wanted:
                await self._vllm.llm.collective_rpc("practicum_score_by", args=wanted)
                self._scored_by = wanted
            self._scoring += 1
        try:
            yield
        finally:
            self._scoring -= 1
            async with self._score_turn:
                self._score_turn.notify_all()

    async def _run(self, ids: Sequence[int], params: Any, adapter: Any) -> Any:
        prompt, number = {"prompt_token_ids": list(ids)}, str(next(self._numbers))
        running = self._vllm.llm.generate(prompt, params, number, lora_request=adapter)
        return [output async for output in running][-1]

    def _workers(self, method: str, *args: Any) -> list[Any]:
        return self._vllm.call("collective_rpc", method, args=args)

    def _reset_cache(self) -> None:
        if not self._vllm.call("reset_prefix_cache"):
            raise EngineError("vLLM did not forget the prompts that it computed with older weights")

    def _adapter(self, name: str | None) -> Any:
        """Return the adapter of a request. It is the last one sent, if `load_weights` sends adapters. Raise
        an EngineError if the engine has no weights, or not all of them."""
        if self._broken is not None:
            raise EngineError(self._broken)
        if self._write_adapter is not None:
            if self._sent_adapter is None:
                raise EngineError("the engine has no adapter, or the last one failed to load: load another")
            name = self._sent_adapter[0]
        return None if name is None else self._adapters[name]

    def _check_awake(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed: create a new one")
        if self._asleep:
            raise EngineError("the engine sleeps: call wake() first")

    def _check_idle(self, what: str) -> None:
        self._check_awake()
        if self._in_flight:
            raise EngineError(f"can't {what} with {self._in_flight} requests in flight")


def _params(**chosen: Any) -> Any:
    from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]
    from vllm.sampling_params import RequestOutputKind

    final = RequestOutputKind.FINAL_ONLY
    return SamplingParams(detokenize=False, flat_logprobs=True, output_kind=final, **chosen)


def _sampling_params(how: Sampling, seed: int | None = None, only: int | None = None) -> Any:
    """Return vLLM's parameters. `only` is the one token that may be sampled."""
    drawn: dict[str, Any] = {"temperature": 0.0}
    if not how.greedy:
        drawn = {"temperature": how.temperature, "top_p": how.top_p, "top_k": how.top_k, "min_p": how.min_p}
        drawn["seed"] = seed
    return _params(
        max_tokens=how.max_new_tokens,
        stop_token_ids=sorted(how.stop),
        ignore_eos=True,  # stop tokens are those that the caller names
        logprobs=1,
        allowed_token_ids=None if only is None else [only],
        **drawn,
    )


def _tensor(numbers: Any, dtype: Any) -> Tensor:
    return torch.from_numpy(np.array(numbers, dtype))


def _scores(ids: Tensor, logprobs: Tensor, version: int) -> Scores:
    """Return scores from logprobs [R, 1 + K] of the tokens and of the K most likely, and their ids."""
    top = (ids[:, 1:], logprobs[:, 1:]) if ids.shape[1] > 1 else (None, None)
    return Scores(logprobs[:, 0].contiguous(), *top, version)

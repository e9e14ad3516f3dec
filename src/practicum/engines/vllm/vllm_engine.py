"""The vLLM engine as callers use it; vLLM itself runs in its own process, see `vllm_process`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
from practicum.engines.torch.sampler import stream_key
from practicum.engines.vllm import vllm_process as host
from practicum.engines.vllm.vllm_messages import (
    GenerateMessage,
    ScoreMessage,
    VllmFacts,
    VllmSetup,
    scores_of,
)
from practicum.engines.vllm.weight_sender import Weights, WeightSender, await_reply
from practicum.errors import EngineError
from practicum.models.fingerprint import LENGTH, fingerprint_ids
from practicum.models.images import Images
from practicum.processes.child_process import ChildProcess, end_processes

_GRACE_S = 3.0
_MEMORY = Path("/dev/shm")
"""Where files are in memory, if the system has it."""


class _SentAdapter(NamedTuple):
    """An adapter that was sent, by the name that vLLM knows it by, and its files."""

    name: str
    folder: TemporaryDirectory[str]


class VllmEngine:
    """Samples and scores by vLLM; see `protocol.Engine`.

    Weights are sent by `load_weights` unless the setup says that vLLM loads them. `weights` gives them again
    to an engine that was put to sleep, with their version. `folder` has the model's configuration, and goes
    with the engine. Without `wait`, it must be `ready` before anything is asked of it. `write_adapter`, for a
    setup with a rank, puts an adapter's weights into a folder in PEFT's format: they are what is sent then.
    """

    def __init__(
        self,
        setup: VllmSetup,
        *,
        start_s: float = 300.0,
        weights: Callable[[], tuple[Weights, int]] | None = None,
        folder: TemporaryDirectory[str] | None = None,
        write_adapter: Callable[[Path, Mapping[str, Tensor]], None] | None = None,
        wait: bool = True,
    ) -> None:
        self._write_adapter = write_adapter
        self._adapter: _SentAdapter | None = None
        self._sent = 0
        self._setup, self._start_s, self._source, self._folder = setup, start_s, weights, folder
        self.version = 0
        self._asleep = False
        self._open = 0
        self.weight_sender = WeightSender(lambda *asked: self._alive().send(*asked))
        self.facts = VllmFacts()
        """What vLLM told of itself when it started."""
        who = f"vLLM of {setup.where}"
        self._child: ChildProcess | None = ChildProcess(
            who, host.main, setup, error=EngineError, env=setup.environment()
        )
        self._child.start()
        if wait:
            self.ready()

    def ready(self) -> None:
        """Wait until vLLM can work; if it can't, its process is ended."""
        try:
            self.facts = self._alive().hello.result(self._start_s)
        except TimeoutError:
            self.close()
            raise EngineError(
                f"vLLM was not ready after {self._start_s:g} s: raise {self._setup.where}.vllm.start_s, or "
                "give the machine less to do"
            ) from None
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of vLLM's process."""
        return self._alive().pid

    def describe(self) -> str:
        """What was started, in a sentence for the log."""
        facts = self.facts
        workers = f" with {facts.workers} workers" if facts.workers > 1 else ""
        return (
            f"{self._setup.where}: vLLM {facts.release} in process {self.pid}{workers}, {facts.threads} "
            f"thread{'s' * (facts.threads > 1)} ({self._setup.where}.vllm.threads), "
            f"{facts.weights / 2**20:,.1f} MiB of weights, {facts.kv / 2**20:,.1f} MiB of KV memory"
        )

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one answer; prompts that begin alike share whole blocks of KV memory, kept or not."""
        prompt_ids, sampling = request.prompt_ids, request.sampling
        _refuse(request.images, request.experts)
        self._check_ids(prompt_ids, "prompt")
        if len(prompt_ids) + sampling.max_new_tokens > self._setup.context:
            raise EngineError(
                f"a prompt of {len(prompt_ids)} tokens and max_new_tokens {sampling.max_new_tokens} do not "
                f"fit the engine's context of {self._setup.context} tokens: shorten one of them, or make the "
                "engine with a longer context"
            )
        seed, adapter = stream_key(request.counter) % 2**63, self._named(None)
        wish = GenerateMessage(list(prompt_ids), sampling, seed, adapter=adapter)
        return await self._ask("generate", wish, "a generation")

    async def score(self, request: ScoreRequest, options: ScoreOptions = LOGPROBS_ONLY) -> Scores:
        """Logprobs of ids[start:], each given all before it. vLLM gives no hidden states."""
        _refuse(request.images, None)
        if options.hidden:
            raise EngineError("vLLM gives no hidden states: ask for top_k, or use the torch engine")
        question = self._question(request, options)
        if request.start == len(request.ids):
            nothing = torch.empty(0, options.top_k + 1)
            return scores_of(nothing.long(), nothing, self.version)
        return await self._ask("score", question, "a score")

    def load_weights(self, weights: Weights, version: int) -> None:
        """Take these weights; what was computed with older ones is never used again."""
        child = self._awake()
        if self._open:
            raise EngineError(f"can't load weights with {self._open} requests under way")
        if self._write_adapter is not None:
            self._send_adapter(child, dict(weights), version)
            return
        self.weight_sender.send(weights, version, self.facts)
        self.version = version

    def _send_adapter(self, child: ChildProcess, weights: Mapping[str, Tensor], version: int) -> None:
        """Put an adapter where vLLM finds it, and where it stays until the next one has taken its place."""
        assert self._write_adapter is not None
        old, self._adapter = self._adapter, None
        if old is not None:
            await_reply(child.send("drop", (old.name,), "removing an adapter"))
            old.folder.cleanup()
        self._sent += 1
        name = f"of version {version}, number {self._sent}"
        folder = TemporaryDirectory(prefix="practicum-adapter-", dir=_MEMORY if _MEMORY.is_dir() else None)
        try:
            self._write_adapter(Path(folder.name), weights)
            self.take_adapter(name, folder.name, version)
        except BaseException:
            folder.cleanup()
            raise
        self._adapter, self.version = _SentAdapter(name, folder), version

    def take_adapter(self, name: str, folder: str, version: int = 0) -> None:
        """Have an adapter in PEFT's format, which score requests may name; the folder must stay."""
        about = f"loading the adapter {name}"
        await_reply(self._awake().send("adapter", (name, folder, version), about))

    def sleep(self) -> Memory:
        """Free memory until `wake`; what vLLM needs beside weights and KV memory stays with its process."""
        child = self._awake()
        if self._open:
            raise EngineError(f"can't sleep with {self._open} requests under way")
        if self._source is None and not (self._setup.loads and self.version == 0):
            raise EngineError("a vLLM engine without a source of weights can't sleep: it would forget them")
        before = self.memory() if self._write_adapter is None else Memory(0, self.facts.kv)
        await_reply(child.send("sleep", (), "going to sleep"))
        self._asleep = True
        self.weight_sender.free()
        return before

    def wake(self) -> None:
        """Be ready again, with the weights as they were. An engine that is awake stays as it is."""
        child = self._alive()
        if not self._asleep:
            return
        await_reply(child.send("wake", (), "waking"))
        self._asleep = False
        if self._write_adapter is not None or not (self._setup.loads and self.version == 0):
            assert self._source is not None
            self.load_weights(*self._source())

    def memory(self) -> Memory:
        """Bytes of vLLM's weights and KV memory now."""
        if self._child is None:
            return Memory(0, 0)
        if self._asleep:
            return Memory(self.facts.weights if self._write_adapter is not None else 0, 0)
        return Memory(self.facts.weights, self.facts.kv)

    def fingerprint(self) -> Tensor:
        """Logprobs of a fixed token sequence, to compare with the learner's.

        The last is that of a token that is sampled after the others, of which vLLM keeps a whole block: if it
        was computed with older weights, and is still used, this shows it. Scores never use what is kept.
        """
        child, length = self._awake(), min(self._setup.context - 1, self.facts.block + LENGTH)
        ids = fingerprint_ids(self.facts.vocab, length)
        greedy, adapter = Sampling(1, frozenset(), greedy=True), self._named(None)
        wish = GenerateMessage(ids[:-1], greedy, 0, only=ids[-1], adapter=adapter)
        # First: a score of the sequence would leave a block of the new weights.
        sampled: Generation = await_reply(child.send("generate", (wish,), "a fingerprint"))
        question = self._question(ScoreRequest(ids, 1), LOGPROBS_ONLY)
        scored: Scores = await_reply(child.send("score", (question,), "a fingerprint"))
        return torch.cat([scored.logprobs[:-1], sampled.plain_logprobs])

    def close(self) -> None:
        """Stop; requests under way fail with an EngineError."""
        child, self._child = self._child, None
        if child is not None:
            end_processes([child], (_GRACE_S, _GRACE_S, _GRACE_S))
        self.weight_sender.close()
        for folder in (self._folder, None if self._adapter is None else self._adapter.folder):
            if folder is not None:
                folder.cleanup()

    def _alive(self) -> ChildProcess:
        if self._child is None:
            raise EngineError("the engine is closed: make a new one")
        return self._child

    def _awake(self) -> ChildProcess:
        child = self._alive()
        if self._asleep:
            raise EngineError("the engine sleeps: call wake() first")
        return child

    async def _ask(self, what: str, asked: GenerateMessage | ScoreMessage, about: str) -> Any:
        child = self._awake()
        self._open += 1
        try:
            return await child.ask(what, (asked,), about, len(asked.ids))
        finally:
            self._open -= 1

    def _question(self, request: ScoreRequest, options: ScoreOptions) -> ScoreMessage:
        ids, start, top_k = request.ids, request.start, options.top_k
        self._check_ids(ids, "sequence to score")
        if not 1 <= start <= len(ids):
            raise EngineError(f"can't score {len(ids)} tokens from {start} on: start is 1 to {len(ids)}")
        if len(ids) >= self._setup.context:
            raise EngineError(
                f"{len(ids)} tokens to score are more than the engine's {self._setup.context - 1}"
            )
        outputs = min(options.vocab or self.facts.vocab, self.facts.vocab)
        if max(ids[start:], default=0) >= outputs:
            raise EngineError(f"the tokens to score have ids outside of 0 to {outputs - 1}, the vocabulary")
        most = min(outputs, self._setup.max_logprobs)
        if not 0 <= top_k <= most:
            raise EngineError(f"top_k is {top_k}, expected 0 to {most}")
        if options.temperature <= 0:
            raise EngineError(f"temperature is {options.temperature}, expected above 0")
        adapter = self._named(request.adapter)
        return ScoreMessage(list(ids), start, top_k, options.temperature, outputs, adapter)

    def _named(self, adapter: str | None) -> str | None:
        """The adapter of a request, which is the one that was sent last if such are sent."""
        if self._write_adapter is None:
            return adapter
        if self._adapter is None:
            raise EngineError("the engine has no adapter, or the last one could not be loaded: load another")
        return self._adapter.name

    def _check_ids(self, ids: Sequence[int], what: str) -> None:
        if not ids:
            raise EngineError(f"the {what} is empty: at least one token is needed")
        if min(ids) < 0 or max(ids) >= self.facts.vocab:
            raise EngineError(f"the {what} has token ids outside of 0 to {self.facts.vocab - 1}")


def _refuse(images: Images | None, experts: Tensor | None) -> None:
    if images is not None:
        raise EngineError("pictures need the torch engine")
    if experts is not None:
        raise EngineError("experts that are to be taken again need the torch engine")

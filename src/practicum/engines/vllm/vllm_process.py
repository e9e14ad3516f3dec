"""The process of a vLLM engine: a thread runs vLLM step by step, requests come and go between the steps."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from practicum.engines.protocol import Generation, Sampling, Scores
from practicum.engines.vllm.vllm_errors import explain
from practicum.engines.vllm.vllm_messages import (
    GenerateMessage,
    ScoreMessage,
    VllmFacts,
    VllmSetup,
    scores_of,
)
from practicum.engines.vllm.weight_delivery import SLOT_BYTES
from practicum.engines.vllm.weight_layout import WeightLayout, plan_layout
from practicum.errors import EngineError
from practicum.processes.child_main import ChildRequest, serve

_ACTS = {
    "sleep": "_sleep",
    "wake": "_wake",
    "adapter": "_take_adapter",
    "drop": "_drop_adapter",
    "load": "_begin_load",
    "loaded": "_end_load",
}
"""What is done between two steps of the engine."""
_WORKERS_ACTS = {"way": "init_way", "weights": "take", "unused": "check_unused"}
"""What all workers do between two steps."""


def main(pipe: Connection, setup: VllmSetup) -> None:
    """Run the process from its start to its end.

    It answers `generate`: (GenerateMessage,); `score`: (ScoreMessage,); `load`: () begins a load, `weights`:
    (way, bucket) brings some, `unused`: (bucket,) those that it should have no use for, `loaded`: (version,)
    ends it, and gives the layout for the next one if there is one; `way`: (way, arguments) begins with one of
    vLLM's backends; `adapter`: (name, folder, version); `drop`: (name,); `sleep`: (); `wake`: ().
    """
    serve(pipe, lambda: _start(setup))


def _start(setup: VllmSetup) -> tuple[VllmProcess, VllmFacts]:
    with explain(setup):
        torch.set_num_threads(setup.threads)
        logging.getLogger("vllm").setLevel(logging.CRITICAL)  # what matters comes as an error
        process = VllmProcess(setup)
        return process, process.facts()


@dataclass(slots=True, eq=False)
class _Open:
    """A request that vLLM works on."""

    asked: GenerateMessage | ScoreMessage
    answered: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


@dataclass(frozen=True, slots=True)
class _Adapter:
    """An adapter that requests may name, as vLLM knows it."""

    request: Any
    version: int


class VllmProcess:
    """vLLM's engine in this process. All calls of it are made by one thread."""

    WORK: ClassVar[frozenset[str]] = frozenset({"generate", "score"})

    def __init__(self, setup: VllmSetup) -> None:
        from vllm import EngineArgs  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
        from vllm.v1.engine.llm_engine import LLMEngine  # pyright: ignore[reportMissingImports]

        self._setup = setup
        if setup.workers > 1:
            multiprocessing.current_process().daemon = False  # it has children: the workers
        self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**_here(setup) | setup.arguments()))
        self._vocab: int = self._engine.model_config.get_vocab_size()
        self._workers("prepare", setup, self._vocab)
        self._scored_by = 1.0, self._vocab
        """Temperature and vocabulary of the prompts that are scored now."""
        self._own_sleep = bool(self._engine.model_config.enable_sleep_mode)
        self.version = 0
        self._broken: str | None = None if setup.loads else "no weights were loaded yet"
        self._adapters: dict[str, _Adapter] = {}
        self._adapter_numbers = iter(range(1, 2**31))
        self._open: dict[str, _Open] = {}
        self._later: list[_Open] = []
        """Score requests with other settings than those under way."""
        self._numbers = iter(range(2**62))
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._try_once()
        self._thread = threading.Thread(target=self._run, name="vllm", daemon=True)
        self._thread.start()

    def facts(self) -> VllmFacts:
        """Of all workers together; threads are those of each."""
        import vllm  # pyright: ignore[reportMissingImports]

        found = self._workers("facts")
        return VllmFacts(
            weights=sum(one.weights for one in found),
            kv=sum(one.kv for one in found),
            vocab=self._vocab,
            threads=found[0].threads,
            block=self._engine.vllm_config.cache_config.block_size,
            release=vllm.__version__,  # pyright: ignore[reportAttributeAccessIssue]
            workers=len(found),
            gpus=tuple(one.gpu for one in found if one.gpu is not None),
        )

    async def answer(self, request: ChildRequest) -> Any:
        """Do what is asked, between two steps of the engine or in them."""
        loop = asyncio.get_running_loop()
        answered = loop.create_future()
        act = None
        if request.what in _ACTS:
            act = partial(getattr(self, _ACTS[request.what]), *request.args)
        elif request.what in _WORKERS_ACTS:
            act = partial(self._workers, _WORKERS_ACTS[request.what], *request.args)
        if act is not None:
            self._inbox.put(lambda: _settle(loop, answered, act))
            return await answered
        opened = _Open(request.args[0], answered, loop)
        self._inbox.put(lambda: self._begin(opened))
        try:
            return await answered
        except asyncio.CancelledError:
            self._inbox.put(lambda: self._abort(opened))
            raise

    def close(self) -> None:
        """Stop after the step under way."""
        self._inbox.put(None)
        self._thread.join(2.0)
        for worker in multiprocessing.active_children():  # those that are processes of their own
            worker.kill()
            worker.join(2.0)

    def _try_once(self) -> None:
        """Some models can be made but not run: find out now. Some code is compiled at the first step."""
        request = GenerateMessage([0], Sampling(1, frozenset(), greedy=True), 0)
        self._engine.add_request("try", {"prompt_token_ids": request.ids}, _params(request))
        while self._engine.has_unfinished_requests():
            self._engine.step()

    # The following methods run in the engine's thread.

    def _run(self) -> None:
        while True:
            idle = not self._open
            try:
                act = self._inbox.get(block=idle)
            except queue.Empty:
                self._step()
                continue
            if act is None:
                return
            act()

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:  # the state of all requests is unknown: all fail, and the engine too
            self._broken = f"vLLM failed in a step: {type(error).__name__}: {error}"
            opened, self._open, self._later = [*self._open.values(), *self._later], {}, []
            for one in opened:
                _fail(one, EngineError(self._broken))
            return
        for output in outputs:
            if output.finished and (one := self._open.pop(output.request_id, None)):
                _settle(one.loop, one.answered, lambda one=one, output=output: self._result(one, output))
        if not self._open and self._later:
            later, self._later = self._later, []
            for one in later:
                self._begin(one)

    def _begin(self, one: _Open) -> None:
        if one.answered.cancelled():
            return
        try:
            if self._broken is not None:
                raise EngineError(self._broken)
            if isinstance(one.asked, ScoreMessage) and not self._admit(one.asked):
                self._later.append(one)
                return
            number = str(next(self._numbers))
            prompt = {"prompt_token_ids": one.asked.ids}
            adapter = None if one.asked.adapter is None else self._adapters[one.asked.adapter].request
            self._engine.add_request(number, prompt, _params(one.asked), lora_request=adapter)
            self._open[number] = one
        except Exception as error:
            _fail(one, error)

    def _admit(self, asked: ScoreMessage) -> bool:
        """Whether it can be scored beside what is under way; the sampler knows one setting at a time."""
        wanted = asked.temperature, asked.vocab
        if wanted != self._scored_by:
            if any(isinstance(one.asked, ScoreMessage) for one in self._open.values()):
                return False
            self._workers("score_by", *wanted)
            self._scored_by = wanted
        return True

    def _abort(self, one: _Open) -> None:
        if one in self._later:
            self._later.remove(one)
        for number, other in list(self._open.items()):
            if other is one:
                self._engine.abort_request([number])
                del self._open[number]

    def _result(self, one: _Open, output: Any) -> Generation | Scores:
        named = one.asked.adapter
        version = self.version if named is None else self._adapters[named].version
        if isinstance(one.asked, ScoreMessage):
            found, width, start = output.prompt_logprobs, one.asked.top_k + 1, one.asked.start - 1
            ids = _tensor(found.token_ids, np.int64).view(-1, width)
            logprobs = _tensor(found.logprobs, np.float32).view(-1, width)
            return scores_of(ids[start:], logprobs[start:], version)
        answer = output.outputs[0]
        sampled, plain = _tensor(answer.logprobs.logprobs, np.float32).view(-1, 2).unbind(1)
        finish = "stop" if answer.finish_reason == "stop" else "length"
        return Generation(_tensor(answer.token_ids, np.int64), sampled, plain, finish, version, version)

    def _workers(self, what: str, *args: Any) -> list[Any]:
        """Have all workers do something (`WorkerPart`), and give what each of them answers."""
        replies = self._engine.collective_rpc("practicum_do", args=(what, args))
        for number, reply in enumerate(replies):
            if reply.error is not None:
                raise EngineError(reply.error if len(replies) == 1 else f"worker {number}: {reply.error}")
        return [reply.result for reply in replies]

    def _sleep(self) -> None:
        self._idle("sleep")
        self._broken = "it sleeps"
        self._forget()
        if self._own_sleep:  # weights that are kept go to the host's memory
            self._engine.sleep(level=1 if self._setup.keeps_weights else 2)
        else:
            self._workers("sleep")

    def _wake(self) -> None:
        """Have memory again, and the weights if they are those of the model's folder."""
        if self._own_sleep:
            self._engine.wake_up()
        else:
            self._workers("wake")
        if self._setup.keeps_weights:
            self._broken = None
            return
        self._broken = "no weights were loaded since it woke"
        if self._setup.loads and self.version == 0:
            self._workers("reload_folder")  # which removes the adapters
            for adapter in self._adapters.values():
                self._add_adapter(adapter.request)
            self._broken = None

    def _begin_load(self) -> None:
        """Expect new weights; until it has all of them, the engine refuses to work."""
        self._idle("load weights")
        self._broken = "its weights were loaded only in part: load all of them"
        self._workers("begin_load")

    def _end_load(self, version: int) -> WeightLayout | None:
        learnt = self._workers("end_load")
        self._forget()
        layout = None
        if all(one is not None for one in learnt):
            layout = plan_layout(learnt[0][0], [one[1] for one in learnt], SLOT_BYTES)
            numbers = range(len(learnt))
            self._workers("use_layout", [[b.arrivals[n] for b in layout.buckets] for n in numbers])
        self.version, self._broken = version, None
        return layout

    def _take_adapter(self, name: str, folder: str, version: int) -> None:
        """Have an adapter that requests may name from now on; its folder stays as long as it is held."""
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        # vLLM keeps what it computed of prompts by the adapter's name: no two may have the same one.
        request = LoRARequest(name, next(self._adapter_numbers), folder)
        self._add_adapter(request)
        self._adapters[name] = _Adapter(request, version)

    def _add_adapter(self, request: Any) -> None:
        try:
            is_there = self._engine.add_lora(request) and request.lora_int_id in self._engine.list_loras()
        except Exception as error:
            raise EngineError(f"vLLM can't take the adapter {request.lora_name}: {error}") from error
        if not is_there:
            raise EngineError(f"vLLM did not take the adapter {request.lora_name}")

    def _drop_adapter(self, name: str) -> None:
        if any(one.asked.adapter == name for one in (*self._open.values(), *self._later)):
            raise EngineError(f"can't remove the adapter {name} with requests under way that name it")
        self._engine.remove_lora(self._adapters.pop(name).request.lora_int_id)

    def _idle(self, what: str) -> None:
        if self._open:
            raise EngineError(f"can't {what} with {len(self._open)} requests under way")

    def _forget(self) -> None:
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not forget the prompts that it computed with older weights")


def _tensor(numbers: Any, dtype: Any) -> Tensor:
    return torch.from_numpy(np.array(numbers, dtype))


def _here(setup: VllmSetup) -> dict[str, Any]:
    """Arguments for this device; those of the setup take precedence."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    if not current_platform.is_cpu():
        return {"enable_sleep_mode": current_platform.is_sleep_mode_available()}
    # Of 128 tokens, as vLLM would have it, the samples of a short prompt share none. And a seeded sample of
    # a prompt that is computed in parts ends vLLM: the generators of a CPU can't be turned back.
    return {"block_size": 32} | ({"enable_chunked_prefill": False} if setup.samples else {})


def _params(asked: GenerateMessage | ScoreMessage) -> Any:
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    plain: dict[str, Any] = {"detokenize": False, "flat_logprobs": True}
    if isinstance(asked, ScoreMessage):
        return SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=asked.top_k, **plain)
    how = asked.sampling
    return SamplingParams(
        max_tokens=how.max_new_tokens,
        temperature=0.0 if how.greedy else how.temperature,
        top_p=1.0 if how.greedy else how.top_p,
        top_k=0 if how.greedy else how.top_k,
        min_p=0.0 if how.greedy else how.min_p,
        seed=None if how.greedy else asked.seed,
        stop_token_ids=sorted(how.stop),
        ignore_eos=True,  # stop tokens are those that the caller names
        logprobs=1,
        allowed_token_ids=None if asked.only is None else [asked.only],
        **plain,
    )


def _settle(loop: asyncio.AbstractEventLoop, answered: asyncio.Future[Any], make: Callable[[], Any]) -> None:
    """Answer with what `make` gives, or with its error."""
    try:
        result, error = make(), None
    except Exception as raised:
        result, error = None, raised

    def set_answer() -> None:
        if answered.done():
            return
        if error is None:
            answered.set_result(result)
        else:
            answered.set_exception(error)

    with suppress(RuntimeError):  # the loop is closed: the parent is gone, and nobody waits
        loop.call_soon_threadsafe(set_answer)


def _fail(one: _Open, error: Exception) -> None:
    def fail() -> Any:
        raise error

    _settle(one.loop, one.answered, fail)

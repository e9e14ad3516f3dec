"""A teacher's or reward model's process: loads it, then answers what comes through a pipe until that closes.

Nothing here imports torch before `main` runs, because the number of threads is read when torch is loaded.
Tensors travel as safetensors bytes: torch's own pickling would share memory with a process that may die.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Protocol, cast

from practicum.errors import PracticumError
from practicum.recipe.schema import Model
from practicum.recipe.teaching import RewardModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from practicum.rollout.torch_engine import TorchEngine
    from practicum.teachers.rewarders.local import Local

HELLO = 0
"""The number of the reply that nobody asked for: the model is loaded, or why it is not."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a process needs to know to become a teacher."""

    model: Model
    seed: int
    key: str
    """The recipe's key of the model, for errors."""
    threads: int
    batch_tokens: int
    context: int | None


@dataclass(frozen=True, slots=True)
class RewarderSetup:
    """What a process needs to know to become a reward model; see `rewarders.local.load_rewarder`."""

    name: str
    model: RewardModel
    room: int
    threads: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What a teacher's or reward model is like."""

    vocab: int
    hidden: int
    context: int | None
    """Longest sequence it may score; None if neither recipe nor model say."""
    threads: int


class Request(NamedTuple):
    """Something to do. `score`: (ids, start, top_k, temperature, hidden, vocab, pictures as safetensors);
    `load`: (path, version); `judge`: (case,).
    """

    number: int
    what: Literal["score", "load", "head", "judge", "cancel", "stop"]
    args: tuple[Any, ...] = ()


class Reply(NamedTuple):
    """What came of a request: a result, or the words of an error; and the seconds of scoring so far."""

    number: int
    result: Any
    error: str | None
    busy_s: float


def send(pipe: Connection, message: Any) -> None:
    """Write one message; plain pickle, so that nothing is shared with the other side."""
    pipe.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def receive(pipe: Connection) -> Any:
    """Read one message; EOFError or OSError when the other side is gone."""
    return pickle.loads(pipe.recv_bytes())


class _Served(Protocol):
    """A model that answers requests."""

    async def answer(self, request: Request) -> Any: ...

    def close(self) -> None: ...


def main(pipe: Connection, setup: Setup | RewarderSetup) -> None:
    """Run the process from its start to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group: the parent decides
    os.environ["OMP_NUM_THREADS"] = str(setup.threads)
    try:
        served, facts = _load(setup)
    except Exception as error:
        _send_if_heard(pipe, Reply(HELLO, None, _words(error), 0.0))
        _leave(1)
    if _send_if_heard(pipe, Reply(HELLO, facts, None, 0.0)):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(_Server(pipe, served).run())
        loop.close()
    served.close()
    _leave(0)


def _leave(code: int) -> NoReturn:
    """End now: taking torch apart would keep whoever closes the teacher waiting for seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _load(setup: Setup | RewarderSetup) -> tuple[_Served, Facts]:
    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(setup.threads)
    disable_progress_bar()  # bars of several processes would draw over each other
    return _load_rewarder(setup) if isinstance(setup, RewarderSetup) else _load_teacher(setup)


def _load_teacher(setup: Setup) -> tuple[_Served, Facts]:
    from practicum.models.load import context_length, load_model
    from practicum.rollout.torch_engine import TorchEngine
    from practicum.teachers.place import UNDECLARED

    model = load_model(setup.model, setup.seed, key=setup.key)
    longest = context_length(model)
    # Scoring needs no KV memory, so as little as there can be is set aside.
    context = min(2, longest) if longest is not None else setup.context or UNDECLARED
    engine = TorchEngine(model, slots=1, context=context, score_tokens=setup.batch_tokens)
    limits = [n for n in (setup.context, longest) if n is not None]
    return _Teacher(engine, model), _facts(model, min(limits, default=None))


def _load_rewarder(setup: RewarderSetup) -> tuple[_Served, Facts]:
    from practicum.models.load import context_length
    from practicum.teachers.rewarders.local import load_rewarder

    local = load_rewarder(setup.name, setup.model, setup.room)
    return _Rewarder(local), _facts(local.model, context_length(local.model))


def _facts(model: PreTrainedModel, context: int | None) -> Facts:
    import torch

    vocab, hidden = tuple(cast("torch.Tensor", model.get_input_embeddings().weight).shape)
    return Facts(vocab, hidden, context, torch.get_num_threads())


class _Server:
    """Answers requests side by side; those that came in one message are scored together."""

    def __init__(self, pipe: Connection, served: _Served) -> None:
        from practicum.teachers.place import OpenTime

        self._pipe, self._served = pipe, served
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ended = asyncio.Event()
        self._busy = OpenTime()

    async def run(self) -> None:
        """Serve until the parent says stop or is gone."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), name="requests", daemon=True).start()
        await self._ended.wait()
        left = list(self._tasks.values())
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                requests = receive(self._pipe)
            except (EOFError, OSError):
                requests = [Request(HELLO, "stop")]
            loop.call_soon_threadsafe(self._take, requests)
            if any(request.what == "stop" for request in requests):
                return

    def _take(self, requests: list[Request]) -> None:
        for request in requests:
            if request.what == "stop":
                self._ended.set()
            elif request.what == "cancel":
                if task := self._tasks.get(request.number):
                    task.cancel()
            else:
                task = self._tasks[request.number] = asyncio.ensure_future(self._answer(request))
                task.add_done_callback(lambda _, number=request.number: self._tasks.pop(number))

    async def _answer(self, request: Request) -> None:
        result, words = None, None
        try:
            result = await self._do(request)
        except Exception as error:
            words = _words(error)
        if not _send_if_heard(self._pipe, Reply(request.number, result, words, self._busy.seconds)):
            self._ended.set()

    async def _do(self, request: Request) -> Any:
        if request.what not in ("score", "judge"):
            return await self._served.answer(request)
        with self._busy.work():
            return await self._served.answer(request)


class _Rewarder:
    """A reward model: a case's score, or why it has none."""

    def __init__(self, local: Local) -> None:
        self._local, self.close = local, local.close

    async def answer(self, request: Request) -> Any:
        from practicum.teachers.rewarders.case import Unjudged

        try:
            return await self._local.judge(*request.args), None
        except Unjudged as failure:
            return None, str(failure)


class _Teacher:
    """A teacher's engine: scores, its output head, other weights."""

    def __init__(self, engine: TorchEngine, model: PreTrainedModel) -> None:
        self._engine, self._model, self.close = engine, model, engine.close

    async def answer(self, request: Request) -> Any:
        if request.what == "score":
            return await self._score(*request.args)
        if request.what == "load":
            return self._take_weights(*request.args)
        return self._head()

    async def _score(
        self,
        ids: list[int],
        start: int,
        top_k: int,
        temperature: float,
        hidden: bool,
        vocab: int | None,
        pictures: bytes | None,
    ) -> Any:
        from safetensors.torch import load, save

        from practicum.models.images import Images

        images = None if pictures is None else Images.from_inputs(load(pictures))
        scores = await self._engine.score(
            ids, start, top_k, temperature=temperature, hidden=hidden, vocab=vocab, images=images
        )
        tensors = {
            "logprobs": scores.logprobs,
            "topk_ids": scores.topk_ids,
            "topk_logprobs": scores.topk_logprobs,
            "hidden": scores.hidden,
        }
        return save({k: t.contiguous() for k, t in tensors.items() if t is not None}), scores.version

    def _take_weights(self, path: str, version: int) -> None:
        from safetensors.torch import load_file

        self._engine.load_weights(load_file(path).items(), version)

    def _head(self) -> Any:
        from safetensors.torch import save

        from practicum.teachers.head import OutputHead

        head = OutputHead.of(self._model)
        tensors = {"weight": head.weight} | ({} if head.bias is None else {"bias": head.bias})
        scalings = (head.logit_scale, head.logits_scaling, head.final_logit_softcapping)
        return save({k: t.cpu().contiguous() for k, t in tensors.items()}), scalings


def _send_if_heard(pipe: Connection, reply: Reply) -> bool:
    try:
        send(pipe, reply)
    except OSError:  # the parent is gone, and with it everyone who waits
        return False
    return True


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, PracticumError) else f"{type(error).__name__}: {error}"

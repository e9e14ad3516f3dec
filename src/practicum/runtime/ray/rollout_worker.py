"""A rollout replica: its own engines, the sessions on them, and a thread that writes their rows."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from practicum.concurrency.event_loop import event_loop
from practicum.concurrency.gather import gather_all
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.stages import Plan
from practicum.engines.vllm.make_vllm import takes_adapter
from practicum.errors import EngineError
from practicum.models.load_model import context_length, load_model, load_tokenizer
from practicum.models.lora import copy_on_base, has_adapter, merged_weights
from practicum.models.offloaded_weights import named_tensors, take_weights
from practicum.recipe.derived import rollout_context, sampling_engines
from practicum.records.recording_store import stage_span
from practicum.roles.make_engine import Weights, describe_engines, make_engines
from practicum.roles.rollout import SessionRow, SessionRunner
from practicum.roles.stage_table import evaluation_plan
from practicum.runtime.ray.weight_transport import Manifest, receive
from practicum.runtime.ray.worker import Worker
from practicum.sessions.attempts import Attempt
from practicum.sessions.chat import make_encoder
from practicum.sessions.session import SessionStart
from practicum.sessions.tools.toolbox import Toolbox, require_isolation
from practicum.tasks.prompts import Prompt
from practicum.tasks.rewards import RewardFunctions
from practicum.teachers.route import teacher_of


class RolloutRequest(NamedTuple):
    """Sessions to be run: for training or an evaluation, by weights of one version."""

    is_eval: bool
    engine: int
    """Which of the worker's engines samples them."""
    attempts: Sequence[Attempt]
    partition: str
    seed: int
    version: int
    eager: bool
    """Whether sessions are to be reported as they finish, because they are scored at once."""


class RolloutWorker(Worker):
    """An asynchronous actor: many requests at once share its engines, each with weights of its own."""

    async def begin(self, plan: Plan, manifests: Mapping[int, Manifest]) -> None:
        """Load the model and, for engines that have newer weights, these."""
        recipe = self.recipe
        require_isolation(recipe.agent.tools)
        model = load_model(recipe.model, recipe.seed)
        self._manifest: Manifest | None = None
        self._loading = threading.Lock()
        # What comes is the adapter alone; where vLLM does not take it, whole weights are merged here.
        merges = recipe.rollout.engine == "vllm" and has_adapter(model) and not takes_adapter(model)
        self._merged = model if merges else None
        models = [model, *(copy_on_base(model) for _ in range(1, sampling_engines(recipe)))]
        self.engines = make_engines(recipe, [each.requires_grad_(False) for each in models], self._weights)
        self.toolbox = Toolbox(recipe.agent.tools)
        sessions = partial(
            SessionRunner,
            recipe,
            store=self.store,
            encoder=make_encoder(recipe, load_tokenizer(recipe.model)),
            functions=RewardFunctions(recipe.tasks, recipe.reward),
            toolbox=self.toolbox,
            context=rollout_context(recipe, context_length(model)),
            config=model.config,
        )
        route = partial(teacher_of, route=recipe.route, teachers=recipe.teachers, seed=recipe.seed)
        taught = route if "teachers" in plan else None
        self._train = [sessions(plan, engine=engine, teacher_of=taught) for engine in self.engines]
        self._eval = [sessions(evaluation_plan(), engine=engine) for engine in self.engines]
        self._writer = RowWriter()
        for engine, manifest in manifests.items():
            self._load(engine, manifest)

    async def run(self, request: RolloutRequest) -> AsyncIterator[BatchRef]:
        """Run sessions; gives the rows of those that are finished and written, at the latest in the end."""
        version = self.engines[request.engine].version
        if version != request.version:
            raise EngineError(
                f"this engine has weights of version {version} and the request is for "
                f"{request.version}: it missed an update"
            )
        sessions = (self._eval if request.is_eval else self._train)[request.engine]
        prompts = {a.prompt.uid: a.prompt for a in request.attempts}
        starts = {uid: sessions.start(prompt) for uid, prompt in prompts.items()}
        # Each piece is a trip to the other event loop and back, and a put: sessions that nobody waits for
        # are one piece.
        pieces = [[a] for a in request.attempts] if request.eager else [list(request.attempts)]
        with stage_span(self.store, "rollout", request.attempts[0].prompt.step, rows=len(request.attempts)):
            running = [_begin(self._piece(sessions, piece, starts, request)) for piece in pieces]
            try:
                for done in asyncio.as_completed(running):
                    yield await done
            finally:
                for future in running:
                    future.cancel()

    async def demonstrate(self, prompts: Sequence[Prompt], partition: str) -> BatchRef:
        """Write what a demonstrator does with each prompt."""
        with stage_span(self.store, "demonstrate", prompts[0].step, rows=len(prompts)):
            sessions = self._train[0]
            running = [_begin(sessions.demonstrate(prompt)) for prompt in prompts]
            rows = [row for rows in await asyncio.gather(*running) for row in rows]
            writes = sessions.plan["demonstrate"].writes
            return await asyncio.to_thread(sessions.put, partition, rows, writes)

    async def load(self, engine: int, manifest: Manifest) -> None:
        """An engine takes the weights of a version; what was computed with older ones is never used again."""
        await asyncio.to_thread(self._load, engine, manifest)

    async def sleep(self) -> None:
        """Free memory for others until `wake`; without a lag there is one engine."""
        await asyncio.to_thread(self.engines[0].sleep)

    async def wake(self) -> None:
        """Take the memory back."""
        await asyncio.to_thread(self.engines[0].wake)

    async def describe(self) -> list[str]:
        """Its engine, if that has its own process."""
        return describe_engines(self.engines[0])

    async def fingerprint(self, engine: int) -> list[float]:
        """Logprobs of a fixed sequence by the weights that an engine has."""
        return (await asyncio.to_thread(self.engines[engine].fingerprint)).tolist()

    def _load(self, engine: int, manifest: Manifest) -> None:
        with self._loading:
            self._manifest = manifest
            self.engines[engine].load_weights(*self._weights())

    def _weights(self) -> tuple[Weights, int]:
        """Those that were given last, or of the model as it starts."""
        if self._manifest is None:
            model = self._merged or load_model(self.recipe.model, self.recipe.seed)
            return named_tensors(model).items() if takes_adapter(model) else merged_weights(model), 0
        received = receive(self._manifest, timeout=self.recipe.runtime.store_s)
        if self._merged is not None:
            take_weights(self._merged, received)
            received = merged_weights(self._merged)
        return received, self._manifest.version

    async def _piece(
        self,
        sessions: SessionRunner,
        piece: Sequence[Attempt],
        starts: Mapping[int, SessionStart],
        request: RolloutRequest,
    ) -> BatchRef:
        """Run sessions at once, and write their rows together."""
        finished = await gather_all(sessions.run(a, starts[a.prompt.uid], request.seed) for a in piece)
        rows = [row for session in finished for row in session]
        return await asyncio.wrap_future(self._writer.put(sessions, request.partition, rows))


def _begin(work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
    """Start on the process's event loop, to be awaited on the actor's."""
    return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, event_loop()))


class _Waiting(NamedTuple):
    sessions: SessionRunner
    partition: str
    rows: list[SessionRow]
    written: Future[BatchRef]


class RowWriter:
    """Writes the rows of finished sessions; those that came during one put go together into the next."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Waiting] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="practicum-writer", daemon=True).start()

    def put(self, sessions: SessionRunner, partition: str, rows: list[SessionRow]) -> Future[BatchRef]:
        """To be done when the rows are in the store."""
        waiting = _Waiting(sessions, partition, rows, Future())
        self._queue.put(waiting)
        return waiting.written

    def _run(self) -> None:
        while True:
            waiting = [self._queue.get()]
            while not self._queue.empty():
                waiting.append(self._queue.get())
            # Those of a cancelled request are nobody's; the others can't be cancelled from here on.
            waiting = [one for one in waiting if one.written.set_running_or_notify_cancel()]
            kinds = {(id(one.sessions), one.partition): one for one in waiting}
            for (sessions, partition), first in kinds.items():
                same = [one for one in waiting if (id(one.sessions), one.partition) == (sessions, partition)]
                self._write(first.sessions, partition, same)

    def _write(self, sessions: SessionRunner, partition: str, same: list[_Waiting]) -> None:
        try:
            rows = [row for one in same for row in one.rows]
            sessions.put(partition, rows, sessions.plan["rollout"].writes)
        except BaseException as error:
            for one in same:
                one.written.set_exception(error)
            return
        for one in same:
            keys = tuple(row.key for row in one.rows)
            one.written.set_result(BatchRef(partition, keys, tuple(row.tags for row in one.rows)))

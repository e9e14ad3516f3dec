"""A rollout replica: its engines, the sessions on them, and the puts of their rows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from practicum.concurrency.event_loop import event_loop
from practicum.concurrency.gather import gather_all
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.wire import Rows
from practicum.engines.kind import Weights
from practicum.engines.table import ENGINES
from practicum.errors import EngineError
from practicum.models.load_model import context_length, load_model, load_tokenizer
from practicum.models.lora import copy_on_base, merged_weights
from practicum.models.offloaded_weights import named_tensors, take_weights
from practicum.rewards.score_functions import RewardFunctions
from practicum.roles.probe_teachers import Ask, compare_teachers
from practicum.roles.rollout import SessionRow, SessionRunner
from practicum.roles.stage_table import evaluation_plan
from practicum.roles.sync import describe_engines, make_engines
from practicum.runtime.ray.actor_calls import pack_value, unpack_value
from practicum.runtime.ray.weight_transport import Manifest, receive
from practicum.runtime.ray.workers import Worker
from practicum.sessions.attempts import Attempt
from practicum.sessions.chat import make_encoder
from practicum.sessions.session import SessionStart
from practicum.sessions.tools.toolbox import Toolbox, require_sandbox
from practicum.tasks.prompts import Prompt
from practicum.teachers.route import teacher_of


class RolloutRequest(NamedTuple):
    """Sessions to be run: for training or an evaluation, by weights of one version."""

    is_eval: bool
    engine: int
    """Number of the worker's engine that samples them."""
    attempts: Sequence[Attempt]
    partition: str
    seed: int
    version: int
    eager: bool
    """True if sessions are reported as they finish, because they are scored immediately."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle prompts and sampling settings once, and the attempts as rows with their numbers."""
        prompts = {id(a.prompt): a.prompt for a in self.attempts}
        samplings = {id(a.sampling): a.sampling for a in self.attempts}
        number = {name: i for shared in (prompts, samplings) for i, name in enumerate(shared)}
        rows = [
            (number[id(a.prompt)], a.session, number[id(a.sampling)], a.is_baseline) for a in self.attempts
        ]
        shared = pack_value((list(prompts.values()), list(samplings.values())))
        return _request, (self._replace(attempts=())[:], Rows(rows), shared)


def _request(values: tuple[Any, ...], rows: Rows, packed: bytes) -> RolloutRequest:
    prompts, samplings = unpack_value(packed)
    attempts = [Attempt(prompts[p], session, samplings[s], greedy) for p, session, s, greedy in rows]
    return RolloutRequest(*values)._replace(attempts=attempts)


class RolloutWorker(Worker):
    """An asynchronous actor: many requests share its engines, each of which has its weights."""

    async def begin(self, manifests: Mapping[int, Manifest]) -> None:
        """Load the model and, for engines that have newer weights, these."""
        recipe = self.recipe
        require_sandbox(recipe.agent.tools)
        model = load_model(recipe.model, recipe.seed)
        self._manifest: Manifest | None = None
        self._loading = threading.Lock()
        # What comes is the adapter alone; for an engine that does not take it, weights are merged here.
        self._merged = model if ENGINES[recipe.rollout.engine].merges_adapter(model) else None
        models = [model, *(copy_on_base(model) for _ in range(1, recipe.sampling_engines))]
        frozen = [each.requires_grad_(False) for each in models]
        self.engines = make_engines(recipe.rollout, recipe.model.path, frozen, self._weights)
        self.toolbox = Toolbox(recipe.agent.tools)
        sessions = partial(
            SessionRunner,
            recipe.agent,
            recipe.session_deadline,
            store=self.store,
            encoder=make_encoder(recipe, load_tokenizer(recipe.model)),
            functions=RewardFunctions(recipe.tasks, recipe.reward),
            toolbox=self.toolbox,
            context=recipe.rollout.context_for(context_length(model)),
            config=model.config,
            recorder=self.recorder,
        )
        route = partial(teacher_of, route=recipe.route, teachers=recipe.teachers, seed=recipe.seed)
        taught = route if "teachers" in self.plan else None
        self._train = [sessions(self.plan, engine=engine, teacher_of=taught) for engine in self.engines]
        self._eval = [sessions(evaluation_plan(), engine=engine) for engine in self.engines]
        self._writer = RowWriter()
        for engine, manifest in manifests.items():
            self._load(engine, manifest)

    async def run(self, request: RolloutRequest) -> AsyncIterator[BatchRef]:
        """Run sessions. Yield the rows of those that are finished and written, at the latest in the end.
        Sessions that end together are reported together, because each report costs calls."""
        version = self.engines[request.engine].version
        if version != request.version:
            raise EngineError(
                f"the engine has weight version {version} but the request needs "
                f"{request.version}: it missed an update"
            )
        sessions = (self._eval if request.is_eval else self._train)[request.engine]
        prompts = {a.prompt.uid: a.prompt for a in request.attempts}
        starts = {uid: sessions.start(prompt) for uid, prompt in prompts.items()}
        # Each piece is a trip to the other event loop and back, and a put: sessions that nobody waits for
        # are one piece.
        pieces = [[a] for a in request.attempts] if request.eager else [list(request.attempts)]
        with self.recorder.span("rollout", request.attempts[0].prompt.step, rows=len(request.attempts)):
            running = [_begin(self._piece(sessions, piece, starts, request)) for piece in pieces]
            pending = set(running)
            try:
                while pending:
                    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    yield BatchRef.concat([future.result() for future in running if future in done])
            finally:
                for future in running:
                    future.cancel()

    async def _piece(
        self,
        sessions: SessionRunner,
        piece: Sequence[Attempt],
        starts: Mapping[int, SessionStart],
        request: RolloutRequest,
    ) -> BatchRef:
        rows: list[SessionRow] = []
        await gather_all(sessions.run(a, starts[a.prompt.uid], request.seed, rows.extend) for a in piece)
        await self._writer.put(sessions, request.partition, rows)
        return BatchRef(request.partition, tuple(row.key for row in rows), tuple(row.tags for row in rows))

    async def demonstrate(self, prompts: Sequence[Prompt], partition: str) -> BatchRef:
        with self.recorder.span("demonstrate", prompts[0].step, rows=len(prompts)):
            sessions = self._train[0]
            running = [_begin(sessions.demonstrate(prompt)) for prompt in prompts]
            rows = [row for rows in await asyncio.gather(*running) for row in rows]
            return await asyncio.to_thread(sessions.put, partition, rows, "demonstrate")

    async def compare_teachers(self, asks: Mapping[str, Ask]) -> tuple[list[str], list[str]]:
        engine = self.engines[0]
        if engine.model is None:
            return [], []
        return await asyncio.to_thread(compare_teachers, self.recipe, engine.model, engine, asks)

    async def load(self, engine: int, manifest: Manifest) -> None:
        """Load the weights of a version into an engine, and discard results of older ones."""
        await asyncio.to_thread(self._load, engine, manifest)

    async def sleep(self) -> None:
        """Free memory until `wake`. Used without a lag, where the worker has one engine."""
        await asyncio.to_thread(self.engines[0].sleep)

    async def wake(self) -> None:
        await asyncio.to_thread(self.engines[0].wake)

    async def describe(self) -> list[str]:
        return describe_engines(self.engines[0])

    async def fingerprint(self, engine: int) -> list[float]:
        return (await asyncio.to_thread(self.engines[engine].fingerprint)).tolist()

    def _load(self, engine: int, manifest: Manifest) -> None:
        with self._loading:
            self._manifest = manifest
            self.engines[engine].load_weights(*self._weights())

    def _weights(self) -> tuple[Weights, int]:
        """Return the latest weights, or the model's initial ones."""
        if self._manifest is None:
            if self._merged is not None:
                return merged_weights(self._merged), 0
            return named_tensors(load_model(self.recipe.model, self.recipe.seed)).items(), 0
        received = receive(self._manifest, timeout=self.recipe.runtime.store_s)
        if self._merged is not None:
            take_weights(self._merged, received)
            received = merged_weights(self._merged)
        return received, self._manifest.version


def _begin(work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
    """Start on the process's event loop, to be awaited on the actor's."""
    return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, event_loop()))


class RowWriter:
    """Writes rows of finished sessions. Those that come during a put go together into the next one."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[SessionRunner, str], tuple[list[SessionRow], asyncio.Task[None]]] = {}
        self._writing = asyncio.Lock()

    async def put(self, sessions: SessionRunner, partition: str, rows: Sequence[SessionRow]) -> None:
        """Return when the rows are in the store."""
        where = sessions, partition
        if where not in self._waiting:
            together: list[SessionRow] = []
            self._waiting[where] = together, asyncio.create_task(self._write(sessions, partition, together))
        together, task = self._waiting[where]
        together += rows
        await asyncio.shield(task)

    async def _write(self, sessions: SessionRunner, partition: str, rows: list[SessionRow]) -> None:
        async with self._writing:
            del self._waiting[sessions, partition]  # later rows go into the next put
            await asyncio.to_thread(sessions.put, partition, rows, "rollout")

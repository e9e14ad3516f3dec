"""Run and score sessions on Ray. The controller sends prompts and receives keys and tags."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any

import ray
from ray.exceptions import RayError

from practicum.concurrency.gather import gather_all, task_group
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.store import Store
from practicum.errors import DeadlineError
from practicum.recipe.schema.rollout_sections import Rollout
from practicum.rewards.score_functions import RewardFunctions
from practicum.roles.probe_teachers import PROBE_S, Questions, Replies
from practicum.roles.rollout import Finished
from practicum.runtime.ray.actor_calls import ask_async, each_report, located
from practicum.runtime.ray.replica_pool import ReplicaPool
from practicum.runtime.ray.rollout_worker import RolloutRequest, RolloutWorker
from practicum.runtime.ray.workers import RewardWorker, pack_prompts
from practicum.sessions.attempts import Attempt
from practicum.tasks.prompts import Prompt

_BLOCKED_S = 5.0
"""Deadline in seconds for workers to report if their event loops are blocked."""


@dataclass(slots=True)
class ReplicaPools:
    """The replicas that work on sessions, and the versions of the weights that engines have."""

    rollout: ReplicaPool
    reward: ReplicaPool
    teachers: dict[str, ReplicaPool]
    """Teachers in separate processes or on servers."""
    versions: dict[int, int] = field(default_factory=dict)
    """Weight version of each engine of a replica, initially 0."""
    busy_s: dict[str, dict[str, float]] = field(default_factory=dict)
    """Seconds of scoring of each teacher so far, by the process that reported them."""

    def pools(self) -> list[ReplicaPool]:
        return [self.rollout, self.reward, *self.teachers.values()]


class RayWorkers:
    """Sessions and their scoring by replicas: for training or for evaluations, on one engine of each.

    Each prompt's sessions go to one replica. Rows go from worker to worker through the store, never through
    here. See `roles.rollout.SessionWorkers`.
    """

    def __init__(
        self,
        rollout: Rollout,
        store: Store,
        pools: ReplicaPools,
        functions: RewardFunctions,
        teachers_s: Mapping[str, float],
        *,
        stage_s: float,
        engine: int,
        is_eval: bool,
    ) -> None:
        """`teachers_s` are the deadlines of teachers, `stage_s` that of engines that go to sleep or wake."""
        self.store, self.pools, self.engine, self.is_eval = store, pools, engine, is_eval
        self._functions, self._teachers_s, self._stage_s = functions, teachers_s, stage_s
        self._slots, self.reward_s = rollout.max_num_seqs, rollout.deadline_s

    async def demonstrate(self, prompts: Sequence[Prompt], partition: str) -> BatchRef:
        pool = self.pools.rollout
        size = ceil(len(prompts) / pool.count)

        async def demonstrate(part: Sequence[Prompt]) -> BatchRef:
            work = pool.calling(self.reward_s, RolloutWorker.demonstrate, part, partition)
            return await pool.run(work, load=len(part))

        parts = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        return BatchRef.concat(await gather_all(demonstrate(part) for part in parts))

    async def run(
        self,
        attempts: Sequence[Attempt],
        partition: str,
        seed: int,
        *,
        at_once: Callable[[Prompt], bool],
        finished: Finished,
    ) -> list[Key]:
        requests = self._requests(attempts, partition, seed, at_once)
        smallest = min(len(request.attempts) for request in requests)
        # Requests beyond these wait here, so that the replica that is done first takes the next one.
        room = asyncio.Semaphore(ceil(2 * self._slots / smallest) * self.pools.rollout.count)

        async def send(request: RolloutRequest) -> list[Key]:
            async with room:
                return await self._send(request, finished)

        return [key for keys in await gather_all(send(request) for request in requests) for key in keys]

    def _requests(
        self, attempts: Sequence[Attempt], partition: str, seed: int, at_once: Callable[[Prompt], bool]
    ) -> list[RolloutRequest]:
        """Return the sessions of each request to a replica: whole prompts. One prompt, if its single sessions
        are scored immediately. Otherwise, as many as fill an engine, because each request costs calls."""
        groups: dict[int, list[Attempt]] = {}
        for attempt in attempts:
            groups.setdefault(attempt.prompt.uid, []).append(attempt)
        version = self.pools.versions.get(self.engine, 0)
        request = partial(
            RolloutRequest, self.is_eval, self.engine, partition=partition, seed=seed, version=version
        )
        requests = [request(group, eager=True) for group in groups.values() if at_once(group[0].prompt)]
        patient = [group for group in groups.values() if not at_once(group[0].prompt)]
        most = min(self._slots, ceil(sum(map(len, patient)) / self.pools.rollout.count))
        together: list[Attempt] = []
        for group in patient:
            if together and len(together) + len(group) > most:
                requests.append(request(together, eager=False))
                together = []
            together = together + group
        return requests + ([request(together, eager=False)] if together else [])

    async def _send(self, request: RolloutRequest, finished: Finished) -> list[Key]:
        """Run sessions. After a replica's death, run those that it had not reported again."""
        sessions = {(attempt.prompt.uid, attempt.session) for attempt in request.attempts}
        reported: set[Key] = set()
        scoring: asyncio.TaskGroup

        async def work(worker: Any) -> None:
            done = {key[:2] for key in reported}
            left = [a for a in request.attempts if (a.prompt.uid, a.session) not in done]
            calls = worker.run.options(num_returns="streaming").remote(request._replace(attempts=left))
            async for rows in each_report(calls, who=self.pools.rollout.name_of(worker)):
                reported.update(rows.keys)
                if (score := finished(rows)) is not None:
                    scoring.create_task(score)

        async def clean_up() -> None:
            """Rows that the dead replica wrote and did not report would be there twice, or be old."""
            held = await asyncio.to_thread(self.store.batch, request.partition)
            ghosts = [key for key in held.keys if key[:2] in sessions and key not in reported]
            if ghosts:
                await asyncio.to_thread(self.store.clear, request.partition, ghosts)

        async with task_group() as scoring:
            await self.pools.rollout.run(work, load=len(request.attempts), again=clean_up)
        return list(reported)

    async def reward(self, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> None:
        pool = self.pools.reward

        async def reward(share: BatchRef) -> None:
            known = pack_prompts({key: prompts[key] for key in share.keys})
            work = pool.calling(self.reward_s, RewardWorker.reward, self.is_eval, share, known)
            await pool.run(work, load=len(share))

        # Whole prompts for each reward worker; everything for one, if a function takes a whole batch.
        divides = all(self._functions.divides(task) for task in {tags.task for tags in batch.tags})
        uids = list(dict.fromkeys(key.prompt for key in batch.keys))
        size = ceil(len(uids) / (pool.count if divides else 1))
        part_of = {uid: number // size for number, uid in enumerate(uids)}
        shares: dict[int, list[int]] = {}
        for row, key in enumerate(batch.keys):
            shares.setdefault(part_of[key.prompt], []).append(row)
        await gather_all(reward(batch.take(rows)) for rows in shares.values())

    async def teach(self, teacher: str, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> None:
        tokens = sum(tags.prompt_tokens + tags.response_tokens for tags in batch.tags)
        timeout = self._teachers_s[teacher] + 5

        async def work(worker: Any) -> None:
            call = worker.score.remote(batch, pack_prompts(prompts))
            busy_s = await ask_async(call, timeout=timeout, owner="rollout", who=f"teacher {teacher}")
            by_process = self.pools.busy_s.setdefault(teacher, {})
            by_process[str(worker)] = max(busy_s, by_process.get(str(worker), 0.0))  # replies may overtake

        # Sessions of one prompt go to one replica, which has the prompt in its cache.
        await self.pools.teachers[teacher].run(work, load=tokens, sticky=batch.keys[0].prompt)

    @contextmanager
    def engines_asleep(self) -> Iterator[None]:
        pool, timeout = self.pools.rollout, self._stage_s
        pool.call_each(timeout, RolloutWorker.sleep)
        try:
            yield
        finally:
            pool.call_each(timeout, RolloutWorker.wake)

    @contextmanager
    def named_blocks(self) -> Iterator[None]:
        try:
            yield
        except DeadlineError as late:
            calls = {
                worker.blocked.remote(): pool.name_of(worker)
                for pool in self.pools.pools()
                for worker in pool.replicas()
            }
            answered, silent = ray.wait(list(calls), num_returns=len(calls), timeout=_BLOCKED_S)
            for call in answered:
                with suppress(RayError):  # of a worker that is dead
                    if (blocked := ray.get(call, timeout=_BLOCKED_S)) is not None:
                        raise DeadlineError(f"{late}: {blocked}") from None
            if missing := [one for pool in self.pools.pools() for one in pool.missing()]:
                raise DeadlineError(f"{late}: {'; '.join(missing)}") from None
            if silent:
                names = ", ".join(located(call, calls[call]) for call in silent)
                raise DeadlineError(f"{late}: {names} gave no sign of life for {_BLOCKED_S:g} s") from None
            raise


@dataclass(frozen=True, slots=True)
class AskWorker:
    """Asks a teacher in an actor, from another actor. See `probe_teachers.Ask`."""

    name: str
    actor: Any

    async def __call__(self, questions: Questions) -> Replies:
        call, who = self.actor.ask.remote(self.name, questions), f"teacher {self.name}"
        return await ask_async(call, timeout=PROBE_S, owner="the probe", who=who)


async def output_head(teacher: ReplicaPool, timeout: float) -> Any:
    """Return a reference to a teacher's output head, for the learner. The head stays where it is."""

    async def work(worker: Any) -> Any:
        head = worker.head.remote()
        made, _ = await asyncio.to_thread(ray.wait, [head], timeout=timeout, fetch_local=False)
        if not made:
            raise DeadlineError(f"{teacher.role} sent no output head within {timeout:g} s")
        return head

    return await teacher.run(work, load=0)

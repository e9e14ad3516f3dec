"""Where sessions run and are scored on Ray: prompts go out from the controller, keys and tags come back."""

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

from practicum.concurrency.event_loop import run_async
from practicum.concurrency.gather import gather_all, task_group
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.store import Store
from practicum.errors import DeadlineError
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.rollout import Finished
from practicum.runtime.ray.actor_calls import ask_async, each_report
from practicum.runtime.ray.replica_pool import ReplicaPool
from practicum.runtime.ray.rollout_worker import RolloutRequest
from practicum.sessions.attempts import Attempt
from practicum.tasks.prompts import Prompt
from practicum.tasks.rewards import RewardFunctions

_BLOCKED_S = 5.0
"""Seconds that workers have to say whether their event loops are blocked."""


@dataclass(slots=True)
class ReplicaPools:
    """The replicas that work on sessions, and the versions of the weights that engines have."""

    rollout: ReplicaPool
    reward: ReplicaPool
    teachers: dict[str, ReplicaPool] = field(default_factory=dict)
    """Those with their own resources."""
    versions: dict[int, int] = field(default_factory=dict)
    """Of the weights that each engine of a replica has; 0 at first."""
    busy_s: dict[str, dict[str, float]] = field(default_factory=dict)
    """Seconds of scoring of each teacher so far, by the process that reported them."""

    def pools(self) -> list[ReplicaPool]:
        return [self.rollout, self.reward, *self.teachers.values()]


class RayWorkers:
    """Sessions and their scoring by replicas: for training or for evaluations, on one engine of each.

    Each prompt's sessions go to one replica. Rows go from worker to worker through the store, never through
    here; see `roles.rollout.SessionWorkers`.
    """

    def __init__(
        self, recipe: Recipe, store: Store, pools: ReplicaPools, *, engine: int, is_eval: bool
    ) -> None:
        self.recipe, self.store, self.pools, self.engine, self.is_eval = recipe, store, pools, engine, is_eval
        self._functions = RewardFunctions(recipe.tasks, recipe.reward)

    async def demonstrate(self, prompts: Sequence[Prompt], partition: str) -> BatchRef:
        size = ceil(len(prompts) / self.pools.rollout.count)
        parts = [prompts[i : i + size] for i in range(0, len(prompts), size)]

        async def demonstrate(part: Sequence[Prompt]) -> BatchRef:
            return await self._call(self.pools.rollout, "demonstrate", part, partition, load=len(part))

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
        places = ceil(2 * self.recipe.rollout.slots / smallest) * self.pools.rollout.count
        room = asyncio.Semaphore(places)

        async def send(request: RolloutRequest) -> list[Key]:
            async with room:
                return await self._send(request, finished)

        return [key for keys in await gather_all(send(request) for request in requests) for key in keys]

    def _requests(
        self, attempts: Sequence[Attempt], partition: str, seed: int, at_once: Callable[[Prompt], bool]
    ) -> list[RolloutRequest]:
        """Sessions that one replica is asked for at once: whole prompts.

        One prompt, if its single sessions are scored at once; else as many as fill an engine, because each
        request costs calls.
        """
        groups: dict[int, list[Attempt]] = {}
        for attempt in attempts:
            groups.setdefault(attempt.prompt.uid, []).append(attempt)
        version = self.pools.versions.get(self.engine, 0)
        request = partial(
            RolloutRequest, self.is_eval, self.engine, partition=partition, seed=seed, version=version
        )
        requests = [request(group, eager=True) for group in groups.values() if at_once(group[0].prompt)]
        patient = [group for group in groups.values() if not at_once(group[0].prompt)]
        fair = ceil(sum(map(len, patient)) / self.pools.rollout.count)
        most = min(self.recipe.rollout.slots, fair)
        together: list[Attempt] = []
        for group in patient:
            if together and len(together) + len(group) > most:
                requests.append(request(together, eager=False))
                together = []
            together = together + group
        return requests + ([request(together, eager=False)] if together else [])

    async def _send(self, request: RolloutRequest, finished: Finished) -> list[Key]:
        """Have sessions run; after a replica's death, those that it had not reported run again."""
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

        first = request.attempts[0].prompt.uid
        async with task_group() as scoring:
            await self.pools.rollout.run(work, load=len(request.attempts), sticky=first, again=clean_up)
        return list(reported)

    async def reward_session(self, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> None:
        await self._call(self.pools.reward, "reward", self.is_eval, batch, prompts, load=len(batch))

    def reward(self, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> None:
        async def reward_all() -> None:
            shares = self._shares(batch)
            works = (
                self.reward_session(share, {key: prompts[key] for key in share.keys}) for share in shares
            )
            await gather_all(works)

        with self.named_blocks():
            run_async(reward_all(), timeout=self.recipe.rollout.deadline_s, owner="reward")

    def _shares(self, batch: BatchRef) -> list[BatchRef]:
        """Whole prompts for each reward worker; everything for one, if a function takes a whole batch."""
        workers = self.pools.reward.count
        if any(not self._functions.divides(task) for task in {tags.task for tags in batch.tags}):
            workers = 1
        prompts = list(dict.fromkeys(key.prompt for key in batch.keys))
        size = ceil(len(prompts) / workers)
        parts = [set(prompts[i : i + size]) for i in range(0, len(prompts), size)]
        return [batch.where(lambda key, _, part=part: key.prompt in part) for part in parts]

    async def teach(self, teacher: str, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> None:
        tokens = sum(tags.prompt_tokens + tags.response_tokens for tags in batch.tags)
        timeout = self.recipe.teachers[teacher].deadline_s + 5

        async def work(worker: Any) -> None:
            call = worker.score.remote(batch, prompts)
            busy_s = await ask_async(call, timeout=timeout, owner="rollout", who=f"teacher {teacher}")
            by_process = self.pools.busy_s.setdefault(teacher, {})
            by_process[str(worker)] = max(busy_s, by_process.get(str(worker), 0.0))  # replies may overtake

        await self.pools.teachers[teacher].run(work, load=tokens, sticky=batch.keys[0].prompt)

    @contextmanager
    def engines_asleep(self) -> Iterator[None]:
        self._engines("sleep")
        try:
            yield
        finally:
            self._engines("wake")

    @contextmanager
    def named_blocks(self) -> Iterator[None]:
        try:
            yield
        except DeadlineError as late:
            replicas = [named for pool in self.pools.pools() for named in pool.named_replicas()]
            calls = {worker.blocked.remote(): name for name, worker in replicas}
            answered, silent = ray.wait(list(calls), num_returns=len(calls), timeout=_BLOCKED_S)
            for call in answered:
                with suppress(RayError):  # of a worker that is dead
                    if (blocked := ray.get(call, timeout=_BLOCKED_S)) is not None:
                        raise DeadlineError(f"{late}: {blocked}") from None
            if silent:
                names = ", ".join(calls[call] for call in silent)
                raise DeadlineError(f"{late}: {names} gave no sign of life for {_BLOCKED_S:g} s") from None
            raise

    def _engines(self, method: str) -> None:
        pool, timeout = self.pools.rollout, self.recipe.runtime.stage_s
        work = pool.each(pool.calling(method, timeout=timeout))
        run_async(work, timeout=timeout + 5, owner=f"{method} of the engines")

    async def _call(self, pool: ReplicaPool, method: str, *args: Any, load: float) -> Any:
        """Call a method of the least loaded replica."""
        return await pool.run(pool.calling(method, *args, timeout=self.recipe.rollout.deadline_s), load=load)


async def output_head(teacher: ReplicaPool, timeout: float) -> Any:
    """A reference to a teacher's output head, for the learner; it does not come into this process."""

    async def work(worker: Any) -> Any:
        head = worker.head.remote()
        made, _ = await asyncio.to_thread(ray.wait, [head], timeout=timeout, fetch_local=False)
        if not made:
            raise DeadlineError(f"{teacher.role} gave no output head in {timeout:g} s")
        return head

    return await teacher.run(work, load=0)

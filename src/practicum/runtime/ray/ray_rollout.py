"""The rollout role on Ray, as the controller runs it: prompts go out, keys and tags come back.

Each prompt's sessions go to one replica. What it reports is handed on at once to those who judge and correct
with resources of their own; rows go from worker to worker through the store, never through here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import ray

from practicum.concurrency.event_loop import run_async
from practicum.concurrency.gather import gather_all, task_group
from practicum.concurrency.open_time import OpenTime
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.plan import Plan
from practicum.dataplane.store import Store
from practicum.errors import DeadlineError
from practicum.recipe.derived import scores_during_rollout
from practicum.recipe.schema.recipe import Recipe
from practicum.runtime.ray.actor_calls import ask_async, each_report
from practicum.runtime.ray.replica_pool import ReplicaPool
from practicum.runtime.ray.rollout_worker import RolloutRequest
from practicum.sessions.attempts import Attempt
from practicum.tasks.prompts import Prompt
from practicum.tasks.rewards import RewardFunctions

SessionName = tuple[int, ...]


@dataclass(slots=True)
class ReplicaPools:
    """The replicas that work on sessions, and the version of the weights that engines have."""

    rollout: ReplicaPool
    reward: ReplicaPool
    teachers: dict[str, ReplicaPool] = field(default_factory=dict)
    """Those with resources of their own."""
    version: int = 0
    busy_s: dict[str, dict[str, float]] = field(default_factory=dict)
    """Seconds of scoring of each teacher so far, by the process that told them."""

    def pools(self) -> list[ReplicaPool]:
        return [self.rollout, self.reward, *self.teachers.values()]


class RayRolloutRole:
    """Rolls out and judges by the crew: one for training, one for evaluation (`exam`)."""

    def __init__(self, recipe: Recipe, plan: Plan, store: Store, crew: ReplicaPools, *, exam: bool) -> None:
        self.recipe, self.plan, self.store, self.crew, self.exam = recipe, plan, store, crew, exam
        self.prompts: dict[Key, Prompt] = {}
        self._judge = RewardFunctions(recipe.tasks, recipe.reward)
        self._waits = any(not scores_during_rollout(model) for model in recipe.reward.models.values())
        self._parts: dict[SessionName, dict[str, list[float]]] = {}
        """What was said of sessions that were judged during the rollout."""
        self._judged: set[SessionName] = set()
        self._streams = OpenTime()
        self._tail_s = self._streamed_s = 0.0
        self._last_report = 0.0

    def demonstrate(self, prompts: Sequence[Prompt], partition: str) -> BatchRef:
        """Have the replicas write what an expert does with each prompt."""
        size = ceil(len(prompts) / self.crew.rollout.count)
        parts = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        work = gather_all(self._demonstrate(part, partition) for part in parts)
        timeout = self.recipe.rollout.deadline_s
        batch = BatchRef.concat(run_async(work, timeout=timeout, owner="demonstrations"))
        by_uid = {prompt.uid: prompt for prompt in prompts}
        self.prompts.update((key, by_uid[key.prompt]) for key in batch.keys)
        return batch

    async def _demonstrate(self, prompts: Sequence[Prompt], partition: str) -> BatchRef:
        async def work(worker: Any) -> BatchRef:
            return await self._ask(worker.demonstrate.remote(prompts, partition), "a rollout worker")

        return await self.crew.rollout.run(work, load=len(prompts))

    def rollout(self, attempts: Sequence[Attempt], partition: str, *, seed: int) -> BatchRef:
        """Run sessions; each is judged and corrected as soon as it is done, where that is possible."""
        groups: dict[int, list[Attempt]] = {}
        for attempt in attempts:
            groups.setdefault(attempt.prompt.uid, []).append(attempt)
        before = self._streams.seconds
        self._last_report = time.perf_counter()
        work = self._roll_out(self._orders(list(groups.values())), partition, seed)
        timeout = self.recipe.rollout.deadline_s
        found = run_async(work, timeout=timeout, owner=f"rollout ({partition})")
        self._tail_s += time.perf_counter() - self._last_report
        self._streamed_s += self._streams.seconds - before
        # Sessions finish in any order; the batch is in the order of its keys.
        return self.store.batch(partition, sorted(found))

    def _orders(self, groups: Sequence[list[Attempt]]) -> list[list[Attempt]]:
        """Sessions that one replica is asked for at once: whole prompts.

        One prompt, if somebody waits for its single sessions; else as many as fill an engine, because each
        order costs calls.
        """
        orders = [group for group in groups if self._is_eager(group[0].prompt)]
        patient = [group for group in groups if not self._is_eager(group[0].prompt)]
        fair = ceil(sum(map(len, patient)) / self.crew.rollout.count)
        most = min(self.recipe.rollout.slots, fair)
        order: list[Attempt] = []
        for group in patient:
            if order and len(order) + len(group) > most:
                orders.append(order)
                order = []
            order = order + group
        return orders + ([order] if order else [])

    async def _roll_out(self, orders: Sequence[list[Attempt]], partition: str, seed: int) -> list[Key]:
        smallest = min(len(order) for order in orders)
        # Orders beyond these wait here, so that the replica that is done first takes the next one.
        places = ceil(2 * self.recipe.rollout.slots / smallest) * self.crew.rollout.count
        room = asyncio.Semaphore(places)

        async def one(order: list[Attempt]) -> list[Key]:
            async with room:
                return await self._order(order, partition, seed)

        return [key for keys in await gather_all(one(order) for order in orders) for key in keys]

    async def _order(self, attempts: Sequence[Attempt], partition: str, seed: int) -> list[Key]:
        """Have sessions run; of a replica that died, those that it had not reported run again."""
        prompts = {a.prompt.uid: a.prompt for a in attempts}
        first = attempts[0].prompt
        eager = self._is_eager(first)
        reported: dict[Key, SessionName] = {}
        handing_on: asyncio.TaskGroup

        async def work(worker: Any) -> None:
            done = set(reported.values())
            left = [a for a in attempts if (a.prompt.uid, a.session) not in done]
            order = RolloutRequest(self.exam, left, partition, seed, self.crew.version, eager)
            calls = worker.run.options(num_returns="streaming").remote(order)
            async for rows in each_report(calls, who="a rollout worker"):
                self._last_report = time.perf_counter()
                self.prompts.update((key, prompts[key.prompt]) for key in rows.keys)
                reported.update((key, key[:2]) for key in rows.keys)
                if eager:
                    handing_on.create_task(self._hand_on(rows, first))

        async def again() -> None:
            """Rows that the dead replica wrote and did not report would be there twice, or be old."""
            held = await asyncio.to_thread(self.store.batch, partition)
            ghosts = [key for key in held.keys if key.prompt in prompts and key not in reported]
            if ghosts:
                await asyncio.to_thread(self.store.clear, partition, ghosts)

        async with task_group() as handing_on:
            await self.crew.rollout.run(work, load=len(attempts), sticky=first.uid, again=again)
        return list(reported)

    def _is_eager(self, prompt: Prompt) -> bool:
        """Whether somebody waits for single sessions of this prompt."""
        taught = not self.exam and bool(self.crew.teachers)
        return taught or self._judges_at_once(prompt.task)

    def _judges_at_once(self, task: str) -> bool:
        if "reward" not in self.plan or self._waits or not self._judge.divides(task):
            return False
        return bool(self.recipe.reward.models) or self._judge.streams(task)

    async def _hand_on(self, rows: BatchRef, prompt: Prompt) -> None:
        """Have finished sessions judged and corrected by those with resources of their own."""
        rows = rows.where(lambda _, tags: tags.status == "ready")
        if not rows:
            return
        works = []
        unjudged = rows.where(lambda _, tags: tags.given_reward is None)
        if unjudged and self._judges_at_once(prompt.task):
            works.append(self._have_judged(unjudged))
        taught = rows.where(lambda _, tags: tags.teacher in self.crew.teachers and not tags.is_baseline)
        if taught:
            works.append(self._have_corrected(taught, prompt))
        if not works:
            return
        with self._streams.work():
            await gather_all(works)

    async def _have_judged(self, batch: BatchRef) -> None:
        parts = await self._reward(batch)
        self._judged.update(key[:2] for key in batch.keys)
        self._parts[batch.keys[0][:2]] = parts

    async def _reward(self, batch: BatchRef) -> dict[str, list[float]]:
        prompts = {key: self.prompts[key] for key in batch.keys}

        async def work(worker: Any) -> dict[str, list[float]]:
            return await self._ask(worker.reward.remote(self.exam, batch, prompts), "a reward worker")

        return await self.crew.reward.run(work, load=len(batch))

    async def _have_corrected(self, batch: BatchRef, prompt: Prompt) -> None:
        name = batch.tags[0].teacher
        assert name is not None
        asks_prompt = self.recipe.teachers[name].before is not None
        prompts = {key: prompt for key in batch.keys} if asks_prompt else {}
        tokens = sum(tags.prompt_tokens + tags.response_tokens for tags in batch.tags)

        async def work(worker: Any) -> None:
            timeout = self.recipe.teachers[name].deadline_s
            call = worker.correct.remote(batch, prompts)
            busy_s = await ask_async(call, timeout=timeout + 5, owner="rollout", who=f"teacher {name}")
            told = self.crew.busy_s.setdefault(name, {})
            told[str(worker)] = max(busy_s, told.get(str(worker), 0.0))  # answers may pass each other

        await self.crew.teachers[name].run(work, load=tokens, sticky=prompt.uid)

    def reward(self, batch: BatchRef) -> dict[str, list[float]]:
        """Judge the sessions that were not judged during the rollout; gives all that was said."""
        left = batch.where(lambda key, _: key[:2] not in self._judged)
        timeout = self.recipe.rollout.deadline_s
        said = [self._parts.pop(name) for name in {key[:2] for key in batch.keys} if name in self._parts]
        if left:
            said += run_async(self._reward_all(left), timeout=timeout, owner="reward")
        self._judged -= {key[:2] for key in batch.keys}
        parts: dict[str, list[float]] = {}
        for one in said:
            for name, scores in one.items():
                parts.setdefault(name, []).extend(scores)
        return parts

    async def _reward_all(self, batch: BatchRef) -> list[dict[str, list[float]]]:
        shares = self._shares(batch)
        if not self._waits:
            return await gather_all(self._reward(share) for share in shares)
        await self.rest(asleep=True)
        try:
            return await gather_all(self._reward(share) for share in shares)
        finally:
            await self.rest(asleep=False)

    def _shares(self, batch: BatchRef) -> list[BatchRef]:
        """Whole prompts for each reward worker; everything for one, if a function takes a whole batch."""
        workers = self.crew.reward.count
        if any(not self._judge.divides(task) for task in {tags.task for tags in batch.tags}):
            workers = 1
        prompts = list(dict.fromkeys(key.prompt for key in batch.keys))
        size = ceil(len(prompts) / workers)
        parts = [set(prompts[i : i + size]) for i in range(0, len(prompts), size)]
        return [batch.where(lambda key, _, mine=mine: key.prompt in mine) for mine in parts]

    async def rest(self, *, asleep: bool) -> None:
        """Put the student's engines to sleep, or wake them."""

        async def work(worker: Any) -> None:
            call = worker.sleep.remote() if asleep else worker.wake.remote()
            await self._ask(call, "a rollout worker")

        await self.crew.rollout.each(work)

    async def _ask(self, call: Any, who: str) -> Any:
        timeout = self.recipe.rollout.deadline_s
        return await ask_async(call, timeout=timeout, owner="the controller", who=who)

    def take_hidden_share(self) -> float | None:
        """As of `Practising`: how much of the streamed work the rollout hid."""
        tail, whole = self._tail_s, self._streamed_s
        self._tail_s = self._streamed_s = 0.0
        return 1.0 - min(1.0, tail / whole) if whole else None

    def forget(self, keys: Iterable[Key]) -> None:
        """Drop what is remembered of rows that leave the store."""
        for key in keys:
            self.prompts.pop(key, None)
            self._judged.discard(key[:2])
            self._parts.pop(key[:2], None)


async def output_head(teacher: ReplicaPool, timeout: float) -> Any:
    """A reference to a teacher's output head, for the learner; it does not come into this process."""

    async def work(worker: Any) -> Any:
        head = worker.head.remote()
        made, _ = await asyncio.to_thread(ray.wait, [head], timeout=timeout, fetch_local=False)
        if not made:
            raise DeadlineError(f"{teacher.role} gave no output head in {timeout:g} s")
        return head

    return await teacher.run(work, load=0)

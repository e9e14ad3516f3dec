"""Measure the controller alone: `python -m tests.hosts.control_plane RESULTS.json [ROWS …]`.

The step, the prompts, the dispatch to 1,000 replicas and the store's client are the product's. Workers and
the store's index are simulated in this process: they answer immediately, with the tags of finished rows, and
their time is counted apart. Seconds are those of the processor. What crosses between processes is pickled as
Ray would. Each size runs in a separate process. `streamed` scores every session on its own, as slow rewards
and teachers do.
"""

from __future__ import annotations

import gc
import json
import pickle
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle

from practicum.checks.watch import Watch
from practicum.concurrency.event_loop import run_async
from practicum.dataplane.batch import BatchRef, plain_keys, plain_tags
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.ray_store.ray_store import RayStore
from practicum.dataplane.ray_store.store_index import Put, RowLocations, decode_answer
from practicum.dataplane.wire import Rows
from practicum.recipe.schema.recipe import Recipe
from practicum.rewards.score_functions import RewardFunctions
from practicum.roles.rollout import RolloutRole
from practicum.roles.run_stage import StepInfo
from practicum.roles.stage_table import make_plan
from practicum.roles.student import UpdateReport
from practicum.runtime.ray.actor_calls import pack_value
from practicum.runtime.ray.ray_roles import RARE_COLLECTION
from practicum.runtime.ray.ray_rollout import RayWorkers, ReplicaPools
from practicum.runtime.ray.replica_pool import ReplicaPool
from practicum.tasks.stream import make_stream
from practicum.trainer.sample_step import StepSampler
from practicum.trainer.step import StepRunner

REPLICAS, REWARD_WORKERS, RANKS, SAMPLES = 1000, 64, 64, 8
ROWS = (10_000, 30_000, 100_000, 300_000, 1_000_000)
STREAMED = 30_000
"""Most rows of a step that are scored one by one."""
TWICE = 300_000
"""Most rows of a second step: its first step has imports too."""
spent: defaultdict[str, float] = defaultdict(float)
"""Seconds of simulated parts, and bytes that would leave or enter the controller."""


@contextmanager
def simulated(part: str) -> Iterator[None]:
    began = time.thread_time()
    yield
    spent[part] += time.thread_time() - began


def note_garbage(phase: str, _: object, began: list[float] = [0.0]) -> None:  # noqa: B006
    """Count the seconds of the garbage collector."""
    if phase == "start":
        began[0] = time.thread_time()
    else:
        spent["garbage"] += time.thread_time() - began[0]


class Store(RayStore):
    """The controller's side of the `ray` store; its index is simulated here."""

    def __init__(self) -> None:
        super().__init__(None, 60.0)
        self.rows = RowLocations()

    def _call(self, method: str, *args: object, refs: object = ()) -> Any:
        sent = pickle.dumps(args, protocol=5)
        with simulated("index"):
            result = getattr(self.rows, method)(*pickle.loads(sent))
            if method == "batch":  # as the index does
                result = Rows(result[1]), Rows(result[0]) if args[1] is None else None
            answer = pickle.dumps([] if method == "clear" else result, protocol=5), []
        spent["bytes"] += len(sent) + len(answer[0])
        return decode_answer(answer)


class Actor:
    """A simulated worker. Its methods are called as those of Ray's actors are."""

    def __init__(self, store: Store) -> None:
        self._store = store
        options = lambda **_: self.run  # noqa: E731
        self.run = SimpleNamespace(options=options, remote=self._run)
        self.reward = SimpleNamespace(remote=self._reward)

    async def _run(self, request: Any) -> AsyncIterator[Awaitable[BatchRef]]:
        data = cloudpickle.dumps(request)
        spent["bytes"] += len(data)
        pieces = [[a] for a in request.attempts] if request.eager else [request.attempts]
        for piece in pieces:
            with simulated("workers"):
                keys = tuple(Key(a.prompt.uid, a.session) for a in piece)
                known = {"prompt_tokens": 64, "response_tokens": 512, "sampled_tokens": 512, "finish": "stop"}
                prompts = [a.prompt for a in piece]
                tags = [Tags(task=p.task, domain=p.domain, step=p.step, turns=1, **known) for p in prompts]
                fields = "prompt_ids", "response_ids", "response_mask", "rollout_logprobs"
                spans = {"prompt": [64] * len(keys), "response": [512] * len(keys)}
                put = Put(request.partition, plain_keys(keys), plain_tags(tags), spans, fields, b"")
                self._store.rows.commit(put)
                reply = pickle.dumps(BatchRef(request.partition, keys, tuple(tags)))
            yield self._reply(reply)

    async def _reply(self, reply: bytes) -> Any:
        spent["bytes"] += len(reply)
        return pickle.loads(reply)

    async def _reward(self, is_eval: bool, batch: BatchRef, prompts: Any) -> None:
        data = cloudpickle.dumps((is_eval, batch, prompts))
        spent["bytes"] += len(data)
        with simulated("workers"):
            tags = [replace(t, reward=float(k.session % 2)) for k, t in batch]
            self._store.rows.tag(batch.partition, plain_keys(batch.keys), plain_tags(tags))


class Simulated:
    """The roles of a run, with simulated workers."""

    version, stop, ranks = 0, frozenset[int](), RANKS

    def __init__(self, recipe: Recipe, plan: Any) -> None:
        self.store, self._sent = Store(), None

        async def make(number: int) -> Actor:
            return Actor(self.store)

        pools = ReplicaPools(
            ReplicaPool("rollout", make, REPLICAS, max_deaths=0, start_s=60.0),
            ReplicaPool("reward", make, REWARD_WORKERS, max_deaths=0, start_s=60.0),
            {},
        )
        for pool in pools.pools():
            run_async(pool.start(), timeout=60, owner="the start")
        functions = RewardFunctions(recipe.tasks, recipe.reward)
        options: Any = {"stage_s": 60.0, "engine": 0, "is_eval": False}
        workers = RayWorkers(recipe.rollout, self.store, pools, functions, {}, **options)
        self.rollouts = [RolloutRole(plan, self.store, workers, functions, {}, {}, deadline_s=3600.0)]
        self.stages = {spec.name: self._stage(spec.name) for spec in plan}

    def _stage(self, name: str) -> Callable[[StepInfo], Any]:
        def run(step: StepInfo) -> Any:
            if name != "sync" and step is not self._sent:  # as RayRoles does
                self._sent = step
                spent["bytes"] += len(pack_value(step))
            return UpdateReport({}, None, 0) if name == "update_student" else None

        return run

    def refresh_copies(self, step: int) -> None: ...

    def incidents(self) -> dict[str, float]:
        return {}


def measure(rows: int, streamed: bool) -> dict[str, Any]:
    recipe = Recipe.model_validate(
        {
            "name": "controller",
            "model": {"random_init": {}},
            "tasks": {"copy": {"kind": "copy"}},
            "rollout": {"samples": SAMPLES, "max_num_seqs": 256},
            "train": {"prompts": rows // SAMPLES, "minibatches": 4},
            "track": {"record": "none"},
            "runtime": {"kind": "ray"},
            "pools": {"train": {"devices": RANKS}, "rollout": {"devices": REPLICAS}},
        }
    )
    plan = make_plan(recipe)
    roles: Any = Simulated(recipe, plan)
    if streamed:
        roles.rollouts[0]._rewards_early = lambda task: True
    stream = make_stream(recipe.tasks, recipe.seed)
    watch = Watch(recipe.checks, print)
    runner = StepRunner(recipe, plan, roles, StepSampler(recipe, plan, roles, stream), watch)
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # noqa: E731
    before, steps = peak(), []
    gc.callbacks.append(note_garbage)
    gc.set_threshold(*RARE_COLLECTION)
    for number in range(1, 4 if rows <= STREAMED else 3 if rows <= TWICE else 2):
        spent.clear()
        began = time.process_time()
        metrics = runner.step(number)
        seconds = time.process_time() - began
        stages = {
            name[5:]: x for name, x in metrics.items() if name.startswith("time/") and name != "time/step"
        }
        own = seconds - spent["workers"] - spent["index"]
        steps.append({"seconds": own, "stages": stages, **spent})
        if not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
    last = min(steps[1:] or steps, key=lambda step: step["seconds"])
    return {"rows": rows, "streamed": streamed, "peak_mib": peak() - before, **last}


def main() -> None:
    if sys.argv[1] == "--one":
        print(json.dumps(measure(int(sys.argv[2]), sys.argv[3] == "streamed")))
        return
    path = Path(sys.argv[1])
    results = json.loads(path.read_text()) if path.exists() else []
    for rows in map(int, sys.argv[2:] or ROWS):
        for way in ("together", "streamed")[: 1 + (rows <= STREAMED)]:
            command = [sys.executable, "-m", "tests.hosts.control_plane", "--one", str(rows), way]
            done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            found = json.loads(done.stdout.splitlines()[-1])
            print(json.dumps(found), flush=True)
            same = [one for one in results if (one["rows"], one["streamed"]) == (rows, found["streamed"])]
            results = [*(one for one in results if one not in same), found]
            path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

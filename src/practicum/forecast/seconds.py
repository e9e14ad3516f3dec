"""Seconds of each stage, by a simple model: arithmetic, bytes and fixed costs add up, nothing overlaps.

A device does `tflops`, reads `bandwidth_gbs`, and pays `layer_us` for each layer of each call. Ranks and
engines share tokens evenly; on a CPU they can't have more than its cores. What streams beside the rollout
costs what outlasts it. A measured run corrects the arithmetic of each stage by one factor: what it took over
what this model says of that run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

from practicum.dataplane.plan import Plan
from practicum.forecast.cluster_spec import Device
from practicum.forecast.device_memory import CPU_MICROBATCH
from practicum.forecast.measured_run import MeasuredRun
from practicum.forecast.model_sizes import BYTES, Sizes
from practicum.forecast.traffic import Traffic
from practicum.forecast.workload import Workload, decode_steps
from practicum.recipe.derived import own_options, scores_during_rollout
from practicum.recipe.schema.recipe import Recipe

TOKEN_S = 75e-6
"""Of the engine, for each token: sampling and the bookkeeping of its row (measured on a CPU)."""
ROW_S = {"reward": 80e-6, "advantages": 12e-6, "clear": 4e-6, "demonstrate": 300e-6}
"""For each row, of the stages that are Python (measured on a CPU)."""
CALL_S = 1.5e-3
"""A call of a Ray actor, there and back."""
SESSION_S = 1.2e-3
"""Of an engine on Ray, for each session: its rows go into the store by themselves."""
HOST_S = 1.5e-3
"""Of the controller, the store's index and the reward worker, for each row, while engines sample."""
STORE_S = 4e-3
"""A put or a get of a distributed store, beside its bytes."""
PLANE_BYTES_S = 1.5e9
"""Bytes a second of a put and a get through shared memory, packing included."""
ADAM_NUMBERS = 7
"""Numbers that Adam reads and writes for each parameter."""
SHARDED_LAYERS = 30
"""What an optimizer step on shards costs besides, for each layer, in times `layer_us`."""
ALIKE = {
    **dict.fromkeys(
        ("old_logprobs", "ref_logprobs", "values", "update_critic", "teachers"), "update_student"
    ),
    "update_student": "update_critic",
}
"""Whose factor a stage gets that the run did not have."""


@dataclass(frozen=True)
class StageSetup:
    """A step and what it runs on. `threads` are cores of one CPU device (1 for a GPU). Of the machine with
    the fewest `cores` for its actors, `sampling` and `learning` are the threads of engines and of ranks; a
    GPU's cores are never too few. `network_gbs` is None if weights stay on one machine."""

    recipe: Recipe
    plan: Plan
    sizes: Sizes
    reference: Sizes
    teachers: Mapping[str, Sizes]
    work: Workload
    moved: Traffic
    device: Device
    on_cpu: bool
    on_ray: bool
    ranks: int
    replicas: int
    threads: int = 1
    link_gbs: float = 1.0
    network_gbs: float | None = None
    cores: float = float("inf")
    sampling: int = 1
    learning: int = 1

    @property
    def flops(self) -> float:
        return self.device.tflops * 1e12 * self.threads

    @property
    def bandwidth(self) -> float:
        return self.device.bandwidth_gbs * 1e9 * self.threads


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a stage by their cause; `arithmetic` is what a run corrects."""

    arithmetic: float = 0.0
    links: float = 0.0
    """Between learner ranks, and what shards cost besides."""
    calls: float = 0.0
    plane: float = 0.0

    @property
    def seconds(self) -> float:
        return self.arithmetic + self.links + self.calls + self.plane

    @property
    def cause(self) -> str:
        """The largest part."""
        parts = ("arithmetic", "links", "calls", "plane")
        return max(parts, key=lambda name: getattr(self, name))


def costs(setup: StageSetup, factors: Mapping[str, float] | None = None) -> dict[str, Cost]:
    """The cost of each stage of the plan, its arithmetic times the run's factor."""
    factors = factors or {}
    models: dict[str, Callable[[StageSetup], tuple[float, float]]] = {
        "rollout": lambda s: (_rollout(s), 0.0),
        "teachers": lambda s: (_teachers(s, factors), 0.0),
        "old_logprobs": lambda s: _learner(s, s.sizes, 1.0, 1),
        "ref_logprobs": lambda s: _learner(s, s.reference, 1.0, 1),
        "values": lambda s: _learner(s, s.sizes, 1.0, 1),
        "update_critic": lambda s: _update(s, 0.0),
        "update_student": lambda s: _update(s, s.work.idle),
    }
    found = {}
    for stage in setup.plan:
        name = stage.name
        arithmetic, links = models[name](setup) if name in models else (_rows(setup, name), 0.0)
        if name != "teachers":
            arithmetic = _crowded(setup, name, arithmetic * factor_of(factors, name))
        calls, plane = _transport(setup, name) if setup.on_ray else (0.0, 0.0)
        found[name] = Cost(arithmetic, links, calls, plane)
    return found


def calibrate(setup: StageSetup, run: MeasuredRun) -> dict[str, float]:
    """For each stage of the run, the seconds of its arithmetic over what the model says of it."""
    factors: dict[str, float] = {}
    for name, cost in costs(setup).items():
        measured = run.seconds.get(name, 0.0) - (cost.seconds - cost.arithmetic)
        if measured > 0 and cost.arithmetic > 0:
            factors[name] = measured / cost.arithmetic
    return factors


def factor_of(factors: Mapping[str, float], name: str) -> float:
    """The factor of a stage, else that of one like it, else 1."""
    return factors.get(name, factors.get(ALIKE.get(name, name), 1.0))


def _crowded(setup: StageSetup, name: str, seconds: float) -> float:
    """What takes each actor so long by itself takes longer if their machine has too few cores."""
    if name in ROW_S:
        return seconds
    if name != "rollout":
        return max(seconds, setup.learning * seconds / setup.cores)
    beside = HOST_S * setup.work.rows if setup.on_ray else 0.0
    return max(seconds, (setup.sampling * seconds + beside) / setup.cores)


def _rollout(setup: StageSetup) -> float:
    """Decoding: a fixed cost of each forward call, and a cost of each token; prompts once."""
    work, sizes = setup.work, setup.sizes
    tokens = work.sampled / setup.replicas
    calls = decode_steps(work, setup.replicas, setup.recipe.rollout.slots)
    number = BYTES[setup.recipe.model.dtype]
    each = sizes.layers * setup.device.layer_us * 1e-6 + number * sizes.active / setup.bandwidth
    read = tokens * work.seen * sizes.token_kv() * number / setup.bandwidth
    prompts = work.prompts * work.prompt_tokens / setup.replicas
    done = sizes.flops(tokens, work.seen) + sizes.flops(prompts, work.prompt_tokens / 2)
    return calls * each + read + done / setup.flops + tokens * TOKEN_S


def _learner(setup: StageSetup, sizes: Sizes, passes: float, gathers: int) -> tuple[float, float]:
    """Forward passes of the learner over the batch, and the gathering of its shards for them."""
    train, work = setup.recipe.train, setup.work
    tokens = work.learnt / setup.ranks
    budget = min(train.microbatch_tokens, CPU_MICROBATCH) if setup.on_cpu else train.microbatch_tokens
    calls = max(1, ceil(tokens / budget))
    done = passes * sizes.flops(tokens, work.seen) / setup.flops
    fixed = passes * calls * sizes.layers * setup.device.layer_us * 1e-6
    shards = sizes.parameters * BYTES[setup.recipe.model.dtype] * (1 - 1 / setup.ranks)
    return done + fixed, gathers * calls * shards / (setup.link_gbs * 1e9)


def _update(setup: StageSetup, idle: float) -> tuple[float, float]:
    """Forward and backward of every epoch, and the optimizer's steps."""
    train, sizes = setup.recipe.train, setup.sizes
    backward = 3.0 if train.gradient_checkpointing else 2.0
    done, links = _learner(setup, sizes, 1.0 + backward * (1 - idle), 3)
    number = BYTES[setup.recipe.model.dtype]
    adam = ADAM_NUMBERS * number * sizes.parameters / setup.ranks / setup.bandwidth
    rows = train.minibatch_rows
    steps = train.minibatches if rows is None else max(1, setup.work.sessions // rows)
    sharded = SHARDED_LAYERS * sizes.layers * setup.device.layer_us * 1e-6 if setup.ranks > 1 else 0.0
    return train.epochs * (done + steps * adam), train.epochs * (links + steps * sharded)


def _teachers(setup: StageSetup, factors: Mapping[str, float]) -> float:
    """Colocated teachers one after the other; streamed ones as far as they outlast the rollout."""
    recipe, work = setup.recipe, setup.work
    if not setup.teachers:
        return 0.0
    share = 1 / len(setup.teachers)
    colocated, longest = 0.0, 0.0
    for name, sizes in setup.teachers.items():
        teacher = recipe.teachers[name]
        done = share * sizes.flops(work.scored, work.seen)
        calls = max(1, ceil(share * work.scored / teacher.batch_tokens))
        fixed = calls * sizes.layers * setup.device.layer_us * 1e-6
        if teacher.url is not None:
            continue
        if scores_during_rollout(teacher):
            own = own_options(teacher)
            speed = setup.device.tflops * 1e12 * (own.threads if setup.on_cpu else 1)
            longest = max(longest, (done / speed + fixed) / own.replicas)
        else:
            colocated += (done / setup.flops + fixed) / setup.ranks
    factor = factor_of(factors, "teachers")
    rolled = _crowded(setup, "rollout", _rollout(setup) * factor_of(factors, "rollout"))
    return _crowded(setup, "teachers", colocated * factor) + max(0.0, longest * factor - rolled)


def _rows(setup: StageSetup, name: str) -> float:
    """Stages of plain Python. Reward workers share them on Ray; all else is one process's."""
    workers = setup.recipe.runtime.reward_workers if name == "reward" and setup.on_ray else 1
    return setup.work.rows * ROW_S.get(name, 0.0) / workers


def _transport(setup: StageSetup, name: str) -> tuple[float, float]:
    """Seconds of calls and of bytes on Ray."""
    if name == "sync":
        weights = setup.moved.sync / setup.replicas
        sent = weights / (setup.network_gbs * 1e9) if setup.network_gbs is not None else 0.0
        gathered = weights * (1 - 1 / setup.ranks) / (setup.link_gbs * 1e9)
        return 2 * CALL_S, 2 * weights / PLANE_BYTES_S + gathered + sent
    moved = setup.moved.plane.get(name)
    if moved is None:
        return CALL_S, 0.0
    sharing = setup.replicas if name == "rollout" else setup.ranks
    if name in ("reward", "advantages", "demonstrate"):
        sharing = 1
    touches = (moved.read > 0) + (moved.written > 0)
    sessions = setup.work.rows / setup.replicas * SESSION_S if name == "rollout" else 0.0
    return CALL_S + sessions + touches * STORE_S, moved.both / sharing / PLANE_BYTES_S

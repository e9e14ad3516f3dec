"""Seconds of each stage, by a simple model: arithmetic, bytes and fixed costs add up, nothing overlaps.

A device does `tflops`, reads `bandwidth_gbs`, and pays `layer_us` for each layer of each call. Ranks and
engines share tokens evenly; on a CPU they share its cores. Teachers that score during the rollout cost only
what is left after it. A measured run corrects the arithmetic of each stage by one factor: what it took, over
what this model says of that run.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

from practicum.forecast.model_sizes import BYTES, Sizes, trained_bytes
from practicum.forecast.step_setup import StepSetup
from practicum.forecast.workload import MeasuredRun
from practicum.recipe.counts import CPU_MICROBATCH_TOKENS
from practicum.recipe.derived import own_options, scores_during_rollout

# Fitted to runs on a CPU.
TOKEN_S = 75e-6
"""An engine's sampling and bookkeeping for each token."""
ROW_S = {"reward": 80e-6, "advantages": 12e-6, "clear": 4e-6, "demonstrate": 300e-6}
"""Stages that are plain Python, for each row."""
CALL_S = 1.5e-3
"""A call of a Ray actor."""
STORE_S = 4e-3
"""A put or get of a store on Ray, besides its bytes."""
RAY_ROW_S = 1.3e-3
"""A row of a rollout on Ray: once for its engine's put, once for controller, index and reward worker."""
PLANE_BYTES_S = 1.5e9
"""Bytes a second of a put and a get through shared memory, packing included."""
ADAM_NUMBERS = 7
"""Numbers that Adam reads and writes for each parameter."""
SHARDED_LAYERS = 30
"""Extra cost of a sharded optimizer step per layer, as a multiple of `layer_us`."""
LEARNER = ("update_student", "update_critic", "old_logprobs", "ref_logprobs", "values", "teachers")
"""Stages of the same kind: one that the run did not have gets the factor of the first that it had."""


class Cost(NamedTuple):
    """Seconds of a stage by their cause: `links` between ranks, `transport` by calls and bytes on Ray.

    A measured run corrects `arithmetic`.
    """

    arithmetic: float = 0.0
    links: float = 0.0
    transport: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self)

    @property
    def cause(self) -> str:
        """The largest part."""
        return max(zip(self, self._fields, strict=True))[1]


def costs(setup: StepSetup, factors: Mapping[str, float] | None = None) -> dict[str, Cost]:
    """The cost of each stage of the plan; its arithmetic times the factor of a measured run."""
    factors = factors or {}
    return {
        stage.name: Cost(
            *_computing(setup, stage.name, factors), _transport(setup, stage.name) if setup.on_ray else 0.0
        )
        for stage in setup.plan
    }


def calibrate(setup: StepSetup, run: MeasuredRun) -> dict[str, float]:
    """For each stage of the run, the seconds of its arithmetic over what the model says of it."""
    factors: dict[str, float] = {}
    for name, cost in costs(setup).items():
        measured = run.seconds.get(name, 0.0) - (cost.seconds - cost.arithmetic)
        if measured > 0 and cost.arithmetic > 0:
            factors[name] = measured / cost.arithmetic
    return factors


def _factor(factors: Mapping[str, float], name: str) -> float:
    names = (name, *LEARNER) if name in LEARNER else (name,)
    return next((factors[like] for like in names if like in factors), 1.0)


def _computing(setup: StepSetup, name: str, factors: Mapping[str, float]) -> tuple[float, float]:
    """Seconds of arithmetic, and between ranks."""
    factor = _factor(factors, name)
    if name == "teachers":
        return _teachers(setup, factor, _factor(factors, "rollout")), 0.0
    if name == "rollout":
        return _rollout(setup, factor), 0.0
    if name in LEARNER:
        sizes = setup.models.reference if name == "ref_logprobs" else setup.models.student
        update = name.startswith("update_")
        idle = setup.work.idle if name == "update_student" else 0.0
        done, links = _update(setup, idle) if update else _forward(setup, sizes, 1.0, 1)
        return _on_cores(setup, done * factor), links
    workers = setup.recipe.runtime.reward_workers if name == "reward" and setup.on_ray else 1
    return factor * setup.work.rows * ROW_S.get(name, 0.0) / workers, 0.0


def _on_cores(setup: StepSetup, seconds: float) -> float:
    """Seconds of learner ranks that may have to share their machine's cores."""
    return max(seconds, setup.learning * seconds / setup.cores)


def _rollout(setup: StepSetup, factor: float) -> float:
    """Decoding: a fixed cost of each forward call and a cost of each token; prompts are computed once."""
    work, sizes = setup.work, setup.models.student
    tokens = work.sampled / setup.replicas
    calls = work.decode_steps(setup.replicas, setup.recipe.rollout.slots)
    number = BYTES[setup.recipe.model.dtype]
    each = sizes.layers * setup.device.layer_us * 1e-6 + number * sizes.active / setup.bandwidth
    read = tokens * work.attended * sizes.token_kv() * number / setup.bandwidth
    prompts = work.prompts * work.prompt_tokens / setup.replicas
    done = sizes.flops(tokens, work.attended) + sizes.flops(prompts, work.prompt_tokens / 2)
    seconds = factor * (calls * each + read + done / setup.flops + tokens * TOKEN_S)
    others = RAY_ROW_S * work.rows if setup.on_ray else 0.0
    return max(seconds, (setup.sampling * seconds + others) / setup.cores)


def _forward(setup: StepSetup, sizes: Sizes, passes: float, gathers: int) -> tuple[float, float]:
    """Forward passes of the learner over the batch, and gathering the shards for them."""
    train, work = setup.recipe.train, setup.work
    tokens = work.trained / setup.ranks
    budget = min(train.microbatch_tokens, CPU_MICROBATCH_TOKENS) if setup.on_cpu else train.microbatch_tokens
    calls = max(1, ceil(tokens / budget))
    done = passes * sizes.flops(tokens, work.attended) / setup.flops
    fixed = passes * calls * sizes.layers * setup.device.layer_us * 1e-6
    shards = sizes.parameters * BYTES[setup.recipe.model.dtype] * (1 - 1 / setup.ranks)
    return done + fixed, gathers * calls * shards / (setup.link_gbs * 1e9)


def _update(setup: StepSetup, idle: float) -> tuple[float, float]:
    """Forward and backward passes of every epoch, and the optimizer's steps."""
    train, sizes = setup.recipe.train, setup.models.student
    # Frozen weights have no gradient of their own: only what goes through them is computed.
    backward = 2.0 if setup.recipe.model.lora is None else 1.0
    backward += 1.0 if train.gradient_checkpointing else 0.0
    done, links = _forward(setup, sizes, 1.0 + backward * (1 - idle), 3)
    adam = ADAM_NUMBERS * trained_bytes(setup.recipe, sizes) / setup.ranks / setup.bandwidth
    rows = train.minibatch_rows
    steps = train.minibatches if rows is None else max(1, setup.work.sessions // rows)
    sharded = SHARDED_LAYERS * sizes.layers * setup.device.layer_us * 1e-6 if setup.ranks > 1 else 0.0
    return train.epochs * (done + steps * adam), train.epochs * (links + steps * sharded)


def _teachers(setup: StepSetup, factor: float, rollout_factor: float) -> float:
    """Colocated teachers one after the other; of those that score during the rollout, what outlasts it."""
    work, colocated, longest = setup.work, 0.0, 0.0
    for name, sizes in setup.teachers.items():
        teacher, tokens = setup.recipe.teachers[name], work.scored / len(setup.teachers)
        if teacher.url is not None:
            continue
        done = sizes.flops(tokens, work.attended)
        fixed = max(1, ceil(tokens / teacher.batch_tokens)) * sizes.layers * setup.device.layer_us * 1e-6
        if scores_during_rollout(teacher):
            own = own_options(teacher)
            speed = setup.device.tflops * 1e12 * (own.threads if setup.on_cpu else 1)
            longest = max(longest, (done / speed + fixed) / own.replicas)
        else:
            colocated += (done / setup.flops + fixed) / setup.ranks
    late = max(0.0, longest * factor - _rollout(setup, rollout_factor))
    return _on_cores(setup, colocated * factor) + late


def _transport(setup: StepSetup, name: str) -> float:
    """Seconds of calls and of bytes on Ray."""
    if name == "sync":
        weights = setup.traffic.sync / setup.replicas
        sent = weights / (setup.network_gbs * 1e9) if setup.network_gbs is not None else 0.0
        gathered = weights * (1 - 1 / setup.ranks) / (setup.link_gbs * 1e9)
        return 2 * CALL_S + 2 * weights / PLANE_BYTES_S + gathered + sent
    moved = setup.traffic.plane.get(name)
    if moved is None:
        return CALL_S
    workers = setup.replicas if name == "rollout" else setup.ranks
    if name in ("reward", "advantages", "demonstrate"):
        workers = 1
    accesses = (moved.read > 0) + (moved.written > 0)
    rows = setup.work.rows / setup.replicas * RAY_ROW_S if name == "rollout" else 0.0
    return CALL_S + rows + accesses * STORE_S + sum(moved) / workers / PLANE_BYTES_S

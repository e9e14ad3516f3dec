"""A forecast as text."""

from __future__ import annotations

from collections.abc import Iterator

from practicum.forecast.cluster_spec import GIB
from practicum.forecast.forecast import Forecast
from practicum.forecast.workload import metadata_bytes
from practicum.records.record_size import record_bytes
from practicum.runtime.ray.placement import ActorPlacement

_CAUSES = {
    "arithmetic": "computing",
    "links": "moving weights and gradients between ranks",
    "transport": "calls and bytes between processes",
}
_LEARNER = "more of pools.train (devices), or fewer train.epochs"
_ADVICE = {
    "rollout": "more engines (rollout.replicas, pools.rollout), or shorter answers (rollout.max_new_tokens)",
    "reward": "more of runtime.reward_workers",
    "teachers": "teachers in their own processes (placement: own), or more replicas of them",
    "sync": "engines on the learner's machines, or model.dtype bfloat16",
    **dict.fromkeys(("old_logprobs", "ref_logprobs", "values", "update_critic", "update_student"), _LEARNER),
}
_SHOWN = 0.0005
"""Stages that take a smaller fraction of the step are left out."""


def report(result: Forecast) -> str:
    """The text that `practicum plan` prints."""
    parts = [_title(result), _placement(result), _memory(result), _traffic(result), _seconds(result)]
    if result.notes:
        parts.append(["notes:", *(f"  {note}" for note in result.notes)])
    return "\n\n".join("\n".join(lines) for lines in parts)


def _title(result: Forecast) -> list[str]:
    setup, work = result.setup, result.setup.work
    parameters = _scaled(setup.models.student.parameters, {"B": 1e9, "M": 1e6, "k": 1e3}, ".3g")
    return [
        f"A step of {setup.recipe.name}: {parameters} parameters in {setup.recipe.model.dtype}, "
        f"{_plural(setup.ranks, 'learner rank')}, {_plural(setup.replicas, 'engine')}",
        f"  {work.prompts:,} prompts of {work.prompt_tokens:,.0f} tokens, {work.rows:,} answers of "
        f"{work.response_tokens:,.0f} ({work.source})",
    ]


def _placement(result: Forecast) -> list[str]:
    if result.layout is not None:
        bundle_lines = [f"  {line}" for line in result.layout.needs.lines()]
        return ["placement:", *bundle_lines, *_machines(result.layout)]
    return ["placement:", "  none found" if result.setup.on_ray else "  all roles in one process"]


def _machines(layout: ActorPlacement) -> Iterator[str]:
    """Each machine with its actors; machines without any on one line."""
    empty = []
    for place, node in enumerate(layout.nodes):
        roles: dict[str, list[int]] = {}
        for actor in layout.needs.actors:
            if actor.bundle is not None and layout.places[actor.bundle] == place:
                roles.setdefault(actor.role, []).append(actor.index)
        if roles:
            yield f"  on {node.name}: " + ", ".join(f"{role} {_ranges(n)}" for role, n in roles.items())
        else:
            empty.append(node.name)
    if empty:
        names = empty[0] if len(empty) == 1 else f"{empty[0]} to {empty[-1]}"
        yield f"  on {names}: nothing"


def _ranges(numbers: list[int]) -> str:
    """Numbers in order, neighbours joined: 0–3, 6."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}–{last}" for first, last in runs)


def _memory(result: Forecast) -> list[str]:
    lines = ["memory:"]
    for device in result.memory:
        verdict = "does not fit" if device.share > 1 else f"{device.share:.0%}"
        lines.append(f"  {device.title}: {_size(device.total)} of {_size(device.limit)}, {verdict}")
        parts = sorted(device.parts.items(), key=lambda part: -part[1])
        lines.append("    " + ", ".join(f"{name} {_size(size)}" for name, size in parts))
    return lines


def _traffic(result: Forecast) -> list[str]:
    setup, traffic = result.setup, result.setup.traffic
    if not setup.on_ray:
        rows = f"in one process nothing is sent; {_size(traffic.plane_bytes)} pass through the store"
        return ["bytes of a step:", f"  {rows}; {_size(_record(result))} are recorded (track.record)"]
    stages = sorted(traffic.plane.items(), key=lambda item: -sum(item[1]))[:4]
    largest = ", ".join(f"{name} {_size(read)} in {_size(written)} out" for name, (read, written) in stages)
    metadata = f"keys and tags only, {metadata_bytes():.0f} bytes a row"
    return [
        "bytes of a step:",
        f"  controller   {_size(traffic.controller):>10}   {metadata}",
        f"  data plane   {_size(traffic.plane_bytes):>10}   {largest}",
        f"  weight sync  {_size(traffic.sync):>10}   to {_plural(setup.replicas, 'engine')}",
        f"  record       {_size(_record(result)):>10}   written to the run's folder (track.record)",
    ]


def _record(result: Forecast) -> float:
    setup, work = result.setup, result.setup.work
    return record_bytes(setup.recipe, setup.plan, work.prompt_tokens, work.response_tokens)


def _seconds(result: Forecast) -> list[str]:
    total = result.seconds
    lines = [f"seconds: {_time(total)} a step", f"  {'stage':<15}{'seconds':>9}{'share':>7}"]
    for name, cost in result.stages.items():
        if cost.seconds >= _SHOWN * total:
            causes = {"links": cost.links, "transport": cost.transport}
            large = {cause: part for cause, part in causes.items() if part and part >= 0.1 * cost.seconds}
            why = ", ".join(f"{_CAUSES[cause]} {_time(part)}" for cause, part in large.items())
            lines.append(f"{_stage(name, cost.seconds, total)}  {why}".rstrip())
    if result.between >= _SHOWN * total:
        lines.append(_stage("between them", result.between, total))
    name = result.bottleneck
    cost = result.stages[name]
    advice = f"; shorter with {_ADVICE[name]}" if name in _ADVICE else ""
    cause = f"{cost.seconds / total:.0%} of the step, by {_CAUSES[cost.cause]}"
    return [*lines, f"  bottleneck: {name}, {cause}{advice}"]


def _stage(name: str, seconds: float, total: float) -> str:
    return f"  {name:<15}{_time(seconds):>9}{seconds / total:>7.0%}"


def _time(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}" if seconds >= 0.01 else f"{seconds:.4f}"


def _size(number: float) -> str:
    return _scaled(number, {" GiB": GIB, " MiB": 2**20, " KiB": 2**10}, ",.1f", " B")


def _scaled(number: float, units: dict[str, float], form: str, smallest: str = "") -> str:
    unit, size = next(((u, s) for u, s in units.items() if number >= s), (smallest, 1.0))
    return f"{number / size:{form if size > 1 else '.0f'}}{unit}"


def _plural(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"

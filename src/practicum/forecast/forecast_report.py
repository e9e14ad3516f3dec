"""A forecast in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from practicum.forecast.cluster_spec import GIB
from practicum.forecast.forecast import Forecast
from practicum.forecast.seconds import Cost
from practicum.forecast.traffic import row_bytes
from practicum.runtime.ray.placement import ActorPlacement

_CAUSES = {
    "arithmetic": "computing",
    "links": "moving weights and gradients between ranks",
    "calls": "calls of actors and of the store",
    "plane": "moving bytes",
}
_LEARNER = "more of pools.train (devices), or fewer train.epochs"
_WAYS = {
    "rollout": "more engines (rollout.replicas, pools.rollout), or shorter answers (rollout.max_new_tokens)",
    "reward": "more of runtime.reward_workers",
    "teachers": "teachers with a placement of their own, or more replicas of them",
    "sync": "engines on the learner's machines, or model.dtype bfloat16",
    **dict.fromkeys(("old_logprobs", "ref_logprobs", "values", "update_critic", "update_student"), _LEARNER),
}


def report(found: Forecast) -> str:
    """All of it, as text."""
    parts = [_title(found), _placement(found), _memory(found), _traffic(found), _seconds(found)]
    if found.notes:
        parts.append(["notes:", *(f"  {note}" for note in found.notes)])
    return "\n\n".join("\n".join(lines) for lines in parts)


def _title(found: Forecast) -> list[str]:
    setup, work = found.setup, found.setup.work
    model = f"{_count(setup.sizes.parameters)} parameters in {setup.recipe.model.dtype}"
    return [
        f"A step of {setup.recipe.name}: {model}, {_plural(setup.ranks, 'learner rank')}, "
        f"{_plural(setup.replicas, 'engine')}",
        f"  {work.prompts:,} prompts of {work.prompt_tokens:,.0f} tokens, {work.rows:,} answers of "
        f"{work.response_tokens:,.0f} ({work.told})",
    ]


def _placement(found: Forecast) -> list[str]:
    if found.layout is not None:
        wanted = [f"  {line}" for line in found.layout.needs.lines()]
        return ["placement:", *wanted, *_machines(found.layout)]
    return ["placement:", "  none found" if found.setup.on_ray else "  all roles in one process"]


def _machines(layout: ActorPlacement) -> Iterator[str]:
    """Each machine with the actors on it; machines without any together."""
    empty = []
    for place, node in enumerate(layout.nodes):
        roles: dict[str, list[int]] = {}
        for actor in layout.needs.actors:
            if actor.bundle is not None and layout.places[actor.bundle] == place:
                roles.setdefault(actor.role, []).append(actor.index)
        if roles:
            told = ", ".join(f"{role} {_ranges(numbers)}" for role, numbers in roles.items())
            yield f"  on {node.name}: {told}"
        else:
            empty.append(node.name)
    if empty:
        names = empty[0] if len(empty) == 1 else f"{empty[0]} to {empty[-1]}"
        yield f"  on {names}: nothing"


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in order, neighbours joined: 0–3, 6."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}–{last}" for first, last in runs)


def _memory(found: Forecast) -> list[str]:
    lines = ["memory:"]
    for one in found.held:
        verdict = "does not fit" if one.share > 1 else f"{one.share:.0%}"
        lines.append(f"  {one.title}: {_size(one.use.total)} of {_size(one.limit)}, {verdict}")
        parts = sorted(one.use.parts.items(), key=lambda part: -part[1])
        lines.append("    " + ", ".join(f"{name} {_size(size)}" for name, size in parts))
    return lines


def _traffic(found: Forecast) -> list[str]:
    setup, moved = found.setup, found.setup.moved
    if not setup.on_ray:
        rows = f"in one process nothing is sent; {_size(moved.plane_bytes)} pass through the store"
        return ["bytes of a step:", f"  {rows}"]
    stages = sorted(moved.plane.items(), key=lambda item: -item[1].both)
    told = ", ".join(f"{name} {_size(one.read)} in {_size(one.written)} out" for name, one in stages[:4])
    return [
        "bytes of a step:",
        f"  controller   {_size(moved.controller):>10}   keys and tags only, {row_bytes():.0f} bytes a row",
        f"  data plane   {_size(moved.plane_bytes):>10}   {told}",
        f"  weight sync  {_size(moved.sync):>10}   to {_plural(setup.replicas, 'engine')}",
    ]


def _seconds(found: Forecast) -> list[str]:
    whole = found.seconds
    lines = [f"seconds: {_time(whole)} a step", f"  {'stage':<15}{'seconds':>9}{'share':>7}"]
    for name, cost in found.stages.items():
        if cost.seconds >= 0.0005 * whole:
            lines.append(
                f"  {name:<15}{_time(cost.seconds):>9}{cost.seconds / whole:>7.0%}  {_why(cost)}".rstrip()
            )
    if found.between >= 0.0005 * whole:
        lines.append(f"  {'between them':<15}{_time(found.between):>9}{found.between / whole:>7.0%}")
    name = found.bottleneck
    cost = found.stages[name]
    way = f"; shorter with {_WAYS[name]}" if name in _WAYS else ""
    lines.append(
        f"  bottleneck: {name}, {cost.seconds / whole:.0%} of the step, by {_CAUSES[cost.cause]}{way}"
    )
    return lines


def _why(cost: Cost) -> str:
    """What the stage does besides computing, if it is a tenth of it or more."""
    parts: Iterator[tuple[str, float]] = ((name, getattr(cost, name)) for name in ("links", "calls", "plane"))
    told = [f"{_CAUSES[name]} {_time(seconds)}" for name, seconds in parts if seconds >= 0.1 * cost.seconds]
    return ", ".join(told)


def _time(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}" if seconds >= 0.01 else f"{seconds:.4f}"


def _size(number: float) -> str:
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number:.0f} B"


def _count(number: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def _plural(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"

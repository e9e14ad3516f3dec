"""Which bundle goes on which machine, or why they do not fit. Needs no Ray: a cluster is a list of nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from practicum.errors import ClusterError
from practicum.recipe.checks.bin_packing import Amounts, fit, total
from practicum.runtime.ray.needs import Bundle, Needs, amounts

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Node:
    """A machine and what is free on it. `name` is for people, `id` is Ray's."""

    name: str
    cpus: float
    gpus: float = 0.0
    memory: float = float("inf")
    object_store: float = float("inf")
    id: str = ""

    def __str__(self) -> str:
        sizes = {"memory": self.memory, "object store": self.object_store}
        known = [f"{size / GIB:.1f} GiB {what}" for what, size in sizes.items() if size != float("inf")]
        return ", ".join([f"{self.name}: {amounts(self.cpus, self.gpus)}", *known])


@dataclass(frozen=True)
class ActorPlacement:
    """For each bundle of `needs` the index of its node."""

    needs: Needs
    nodes: tuple[Node, ...]
    places: tuple[int, ...]

    def node_of(self, bundle: int) -> Node:
        """The machine of a bundle."""
        return self.nodes[self.places[bundle]]


def lay_out(needs: Needs, nodes: Sequence[Node], *, started_here: bool = False) -> ActorPlacement:
    """A node for each bundle: groups of a pool together if that is possible, else each bundle by itself.

    If they do not fit, a ClusterError says what is wanted, what there is, and what to do; `started_here` is
    for a cluster that the run starts itself.
    """
    bins = [(node.gpus, node.cpus, float(node.memory)) for node in nodes]
    if needs.object_store <= sum(node.object_store for node in nodes):
        for groups in (_groups(needs.bundles), [[number] for number in range(len(needs.bundles))]):
            nodes_of = fit([total([_amounts(needs.bundles[b]) for b in group]) for group in groups], bins)
            if nodes_of is not None:
                places = {b: place for group, place in zip(groups, nodes_of, strict=True) for b in group}
                ordered = tuple(places[b] for b in range(len(needs.bundles)))
                return ActorPlacement(needs, tuple(nodes), ordered)
    raise ClusterError(refusal(needs, nodes, started_here=started_here))


def refusal(needs: Needs, nodes: Sequence[Node], *, started_here: bool = False) -> str:
    """What is wanted and available, by resource and by node, and what to do."""
    wants = {"CPUs": needs.cpus, "GPUs": needs.gpus, "memory": needs.memory}
    wants |= {"object store": needs.object_store}
    keys = ("cpus", "gpus", "memory", "object_store")
    has = {what: sum(getattr(n, key) for n in nodes) for what, key in zip(wants, keys, strict=True)}
    short = [what for what in wants if wants[what] > has[what]]
    rows = [
        f"  {what:<14}{_number(what, wants[what]):>10}{_number(what, has[what]):>12}"
        + ("   ← too little" if what in short else "")
        for what in wants
        if wants[what] and has[what] != float("inf")
    ]
    reason = "" if short else ": what must be on one machine finds none with room for it"
    return "\n".join(
        [
            f"the cluster is too small for this recipe{reason}",
            f"  {'':<14}{'wanted':>10}{'available':>12}",
            *rows,
            "available by node:",
            *(f"  {node}" for node in nodes),
            "wanted:",
            *(f"  {line}" for line in needs.lines()),
            *(f"  → {line}" for line in _advice(needs, short, started_here)),
        ]
    )


def _advice(needs: Needs, short: Sequence[str], started_here: bool) -> Iterator[str]:
    """Keys that decide how much is wanted, and what makes the cluster larger."""
    if short != ["object store"]:
        pools = dict.fromkeys(bundle.pool for bundle in needs.bundles)
        yield f"lower {', '.join(_KEYS[pool] for pool in pools)}"
    if "GPUs" in short:
        yield "without GPUs: set device to cpu or auto where the recipe names a GPU"
    if "object store" in short:
        yield "lower train.prompts, rollout.samples or rollout.max_new_tokens"
    if not started_here:
        yield "or add machines to the cluster, or stop what else runs there"
    if started_here and "CPUs" in short:
        yield f"or set runtime.cpus to {ceil(needs.cpus)}: it may be more than the cores, to share them"
    if started_here and "object store" in short:
        yield f"or set runtime.object_store_gb to {needs.object_store / GIB:.2f}"


_KEYS = {
    "train": "pools.train",
    "rollout": "pools.rollout",
    "teachers": "placement.own.replicas and devices of teachers and reward models",
    "services": "runtime.reward_workers",
    "store": "runtime.store.units",
}


def _amounts(bundle: Bundle) -> Amounts:
    return bundle.gpus, bundle.cpus, float(bundle.memory)


def _groups(bundles: Sequence[Bundle]) -> list[list[int]]:
    """Bundles that should be on one machine, as indices."""
    groups: dict[tuple[str, int], list[int]] = {}
    for number, bundle in enumerate(bundles):
        groups.setdefault((bundle.pool, bundle.group), []).append(number)
    return list(groups.values())


def _number(what: str, amount: float) -> str:
    return f"{amount:g}" if what.endswith("s") else f"{amount / GIB:.2f} GiB"

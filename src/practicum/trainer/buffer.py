"""The replay buffer: which finished groups are trained on next. It holds keys and tags, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key, Tags
from practicum.recipe.schema.recipe import Buffer
from practicum.recipe.schema.rollout_sections import OnFailure


@dataclass(frozen=True, slots=True)
class Group:
    """All finished sessions of one prompt, failed ones too."""

    prompt: int
    rows: tuple[tuple[Key, Tags], ...]

    def rewards(self) -> list[float]:
        """The reward of each session that has one, counted once; the baseline's is not among them."""
        by_session = {
            key.session: tags.reward
            for key, tags in self.rows
            if tags.status == "ready" and not tags.is_baseline
        }
        return [reward for reward in by_session.values() if reward is not None]

    @property
    def has_failed(self) -> bool:
        """Some session of it failed."""
        return any(tags.status == "failed" for _, tags in self.rows)

    @property
    def is_flat(self) -> bool:
        """No two sessions differ in reward, so a relative estimator learns nothing from it."""
        return len(set(self.rewards())) < 2


def groups_of(batch: BatchRef) -> list[Group]:
    """The rows of a batch by prompt, in order of first appearance."""
    by_prompt: dict[int, list[tuple[Key, Tags]]] = {}
    for key, tags in batch:
        by_prompt.setdefault(key.prompt, []).append((key, tags))
    return [Group(prompt, tuple(rows)) for prompt, rows in by_prompt.items()]


@dataclass(frozen=True, slots=True)
class TakenGroups:
    """What a step trains on, and the rows of its groups that are not trained on and can be cleared."""

    batch: BatchRef
    baselines: dict[int, float]
    spent: list[Key]


class ReplayBuffer:
    """Complete prompt groups, oldest first."""

    def __init__(self, rules: Buffer, partition: str, on_failure: OnFailure = "keep_rest") -> None:
        self.rules, self.partition, self.on_failure = rules, partition, on_failure
        self._groups: list[Group] = []

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, groups: Sequence[Group]) -> list[Group]:
        """Take in finished groups; gives back those left out for having no signal or a failed session."""
        left_out = [g for g in groups if self._leaves_out(g)]
        self._groups += [g for g in groups if g not in left_out]
        self._groups.sort(key=lambda group: group.prompt)
        return left_out

    def _leaves_out(self, group: Group) -> bool:
        dropped = self.on_failure == "drop_group" and group.has_failed
        return dropped or (self.rules.filter_flat_groups and group.is_flat)

    def take(self, count: int) -> TakenGroups:
        """The oldest `count` groups, or all if there are fewer.

        The batch has the rows to train on: ready, and not a baseline.
        """
        chosen, self._groups = self._groups[:count], self._groups[count:]
        rows = [row for group in chosen for row in group.rows]
        kept = [(k, t) for k, t in rows if t.status == "ready" and not t.is_baseline]
        baselines = {k.prompt: t.reward for k, t in rows if t.is_baseline and t.reward is not None}
        train = {key for key, _ in kept}
        batch = BatchRef(self.partition, tuple(k for k, _ in kept), tuple(t for _, t in kept))
        return TakenGroups(batch, baselines, [key for key, _ in rows if key not in train])

    def keys(self) -> list[Key]:
        """Every row that waits here."""
        return [key for group in self._groups for key, _ in group.rows]

    def restore(self, batch: BatchRef) -> None:
        """Hold again what a checkpoint held; nothing is filtered twice."""
        self._groups = sorted(groups_of(batch), key=lambda group: group.prompt)

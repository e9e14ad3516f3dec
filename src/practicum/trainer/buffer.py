"""The replay buffer: which finished groups of a step are trained on. It holds keys and tags, no tensors."""

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
    """What a step trains on, and the rewards of greedy sessions by prompt."""

    batch: BatchRef
    baselines: dict[int, float]


class ReplayBuffer:
    """Complete prompt groups, oldest first."""

    def __init__(self, rules: Buffer, partition: str, on_failure: OnFailure = "keep_rest") -> None:
        self.rules, self.partition, self.on_failure = rules, partition, on_failure
        self._groups: list[Group] = []

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, groups: Sequence[Group]) -> None:
        """Take in finished groups, but those without a signal or with a failed session, as the rules say."""
        self._groups += [group for group in groups if not self._leaves_out(group)]
        self._groups.sort(key=lambda group: group.prompt)

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
        batch = BatchRef(self.partition, tuple(k for k, _ in kept), tuple(t for _, t in kept))
        return TakenGroups(batch, baselines)

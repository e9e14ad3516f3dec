"""The data-parallel ranks as one: called together, with a deadline, and what they say as one answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray import ObjectRef

from practicum.checks.watch import Watch
from practicum.errors import PracticumError
from practicum.runtime.ray.actor_calls import ask, first_death
from practicum.runtime.ray.worker import RankReply

NEWS_S = 5.0
"""Seconds in which Ray tells of a death that the other ranks have felt already."""


class TrainGroup:
    """Ranks of the learner, in order. A rank that dies ends the call at once with its name."""

    def __init__(self, workers: Sequence[Any], watch: Watch, timeout_s: float) -> None:
        self.workers, self.watch, self.timeout_s = list(workers), watch, timeout_s
        self.names = [f"rank {rank} of {len(workers)} of the learner" for rank in range(len(workers))]

    def __len__(self) -> int:
        return len(self.workers)

    def all(self, method: str, *args: Any) -> Any:
        """Call all ranks alike; the first one's answer is everybody's."""
        return self.each(method, [args] * len(self))[0]

    def first(self, method: str, *args: Any) -> Any:
        """Call the first rank alone, with what needs the whole batch in one place."""
        return self.each(method, [args])[0]

    def each(self, method: str, args: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list[Any]:
        """Call as many ranks as there are arguments, each with its own; their answers in order."""
        asked = list(zip(self.workers, self.names, args, strict=False))
        refs: list[ObjectRef[Any]] = [getattr(worker, method).remote(*mine) for worker, _, mine in asked]
        names = [name for _, name, _ in asked]
        try:
            answers = ask(refs, timeout=timeout_s or self.timeout_s, owner=f"stage {method}", who=names)
        except PracticumError:
            raise
        except Exception as error:  # a rank that lost another one says only that a connection broke
            if (death := first_death(refs, names, timeout=NEWS_S)) is not None:
                raise death from error
            raise
        return [self._heard(answer, loud=rank == 0) for rank, answer in enumerate(answers)]

    def _heard(self, answer: Any, *, loud: bool) -> Any:
        """The answer's value. Ranks check the same numbers, so one of them is listened to."""
        if not isinstance(answer, RankReply):
            return answer
        if loud:
            for sentence in answer.sentences:
                self.watch.report(sentence)
            self.watch.fired.update(answer.fired)
        return answer.value


def spread(tokens: Sequence[int], ranks: int) -> list[list[int]]:
    """Rows over ranks that work apart from each other, longest first to the least loaded; none is idle."""
    parts: list[list[int]] = [[] for _ in range(min(ranks, len(tokens)))]
    loads = [0] * len(parts)
    for row in sorted(range(len(tokens)), key=lambda row: (-tokens[row], row)):
        least = loads.index(min(loads))
        parts[least].append(row)
        loads[least] += tokens[row]
    return [sorted(part) for part in parts]

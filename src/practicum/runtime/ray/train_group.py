"""The data-parallel ranks as one: called together, with a deadline, and their replies as one."""

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
        """Call a method of all ranks alike; the first one's answer is everybody's."""
        return self.each(method, [args] * len(self))[0]

    def first(self, method: str, *args: Any) -> Any:
        """Call the first rank alone, with what needs the whole batch in one place."""
        return self.each(method, [args])[0]

    def each(self, method: str, args: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list[Any]:
        """Call as many ranks as there are arguments, each with its own; their answers in order."""
        workers, names = self.workers[: len(args)], self.names[: len(args)]
        refs: list[ObjectRef[Any]] = [
            worker.call.remote(method, *own) for worker, own in zip(workers, args, strict=True)
        ]
        owner = f"stage {args[0][0]}" if method == "run" else method
        try:
            replies = ask(refs, timeout=timeout_s or self.timeout_s, owner=owner, who=names)
        except PracticumError:
            raise
        except Exception as error:  # a rank that lost another one says only that a connection broke
            if (death := first_death(refs, names, timeout=NEWS_S)) is not None:
                raise death from error
            raise
        # Ranks check the same numbers, so the first one's reports are enough.
        first: RankReply = replies[0]
        for sentence in first.sentences:
            self.watch.report(sentence)
        self.watch.fired.update(first.fired)
        return [reply.value for reply in replies]

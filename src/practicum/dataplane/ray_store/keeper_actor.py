"""Keepers: one actor on each node that copies what workers put into objects of the index.

An object of Ray's store dies with the process that put it, and the result of a call belongs to who
called. So the index has a keeper return the pack: the copy lives on as long as the index does.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


class Keeper:
    """Gives back what it is given. Stateless, so it may be restarted at any time."""

    def copy(self, pack: Any) -> tuple[Any, bool]:
        """The pack, as an object that belongs to the caller; and a sign that it is there."""
        return pack, True


def start_keeper(node: str) -> Any:
    """A keeper on that node; it ends with the process that starts it."""
    return (
        ray.remote(Keeper)
        .options(
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=3,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote()
    )

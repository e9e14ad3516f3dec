"""Train and print a line of JSON after each step: `python -m tests.hosts.driver RECIPE.json [--forward]`.

`--forward` is the control for measurements: before each stage of the learner, the controller reads the
columns that the stage needs and writes them again, as trainers do that pass batches from worker to worker.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import practicum as pr
from practicum.roles.run_stage import StepInfo
from practicum.runtime.ray import ray_roles


def forward_columns() -> None:
    """Have the controller of every run in this process forward the columns that its stages read."""
    original = ray_roles.RayRoles.__init__

    def make(self: ray_roles.RayRoles, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        store = self.handle.connect(self.recipe.runtime.store_s)

        def forwarding(name: str, run: Callable[[StepInfo], Any]) -> Callable[[StepInfo], Any]:
            def stage(step: StepInfo) -> Any:
                batch, fields = step.batch.real(), self.plan[name].reads
                if fields:
                    store.put(batch, store.get(batch, fields), keep_tags=True)
                return run(step)

            return stage

        stages = {name: forwarding(name, run) for name, run in self.stages.items() if name != "sync"}
        self.stages.update(stages)

    ray_roles.RayRoles.__init__ = make


def main() -> None:
    recipe = json.loads(Path(sys.argv[1]).read_text())
    if "--forward" in sys.argv:
        forward_columns()

    def report(metrics: dict[str, Any]) -> None:
        mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"at": time.time(), "peak_mib": mib} | metrics), flush=True)

    pr.train(recipe, on_step=report, fresh=True, quiet=True)


if __name__ == "__main__":
    main()

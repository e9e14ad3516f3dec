"""Train, and print a line of JSON after each step: `python -m tests.hosts.driver RECIPE.json`.

After each line it waits for one from its standard input. `forward` makes the next step the control for
measurements: before each stage, the controller reads the columns that the stage needs and writes
them again, as trainers do that pass batches from worker to worker.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import practicum as pr
from practicum.roles.run_stage import StepInfo
from practicum.runtime.ray import ray_roles

forwards = False
"""True in steps in which the controller forwards columns."""


def forward_columns() -> None:
    """Have the controller of every run in this process forward the columns that its stages read, if asked."""
    original = ray_roles.RayRoles.__init__

    def make(self: ray_roles.RayRoles, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        store = self.handle.connect(self.recipe.runtime.store_s)

        def forwarding(name: str, run: Callable[[StepInfo], Any]) -> Callable[[StepInfo], Any]:
            def stage(step: StepInfo) -> Any:
                batch, fields = step.batch.real(), self.plan[name].reads
                if forwards and fields:
                    store.put(batch, store.get(batch, fields), keep_tags=True)
                return run(step)

            return stage

        stages = {name: forwarding(name, run) for name, run in self.stages.items() if name != "sync"}
        self.stages.update(stages)

    ray_roles.RayRoles.__init__ = make


def memory_mib(name: str) -> float:
    """Return the resident memory of this process (VmRSS), or its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def main() -> None:
    recipe, before = json.loads(Path(sys.argv[1]).read_text()), 0.0
    forward_columns()

    def report(metrics: dict[str, Any]) -> None:
        global forwards
        nonlocal before
        if not metrics["step"]:  # before the first step
            return
        added = {"added_mib": memory_mib("VmHWM") - before}
        print(json.dumps(added | metrics, default=float), flush=True)
        forwards = sys.stdin.readline().strip() == "forward"
        Path("/proc/self/clear_refs").write_text("5")  # the peak is the present memory again
        before = memory_mib("VmRSS")

    pr.train(recipe, on_step=report, fresh=True, quiet=True)


if __name__ == "__main__":
    main()

"""One run folder, disturbed several times: strike, wait for what happens, resume, compare."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from tests.campaign.child import Run
from tests.campaign.processes import Family, Server, shared_memory
from tests.campaign.scenarios import STEPS, Scenario, Victim

BOUND_S = 900.0
"""In which a disturbed run must continue or end: several times its longest deadline."""
FIND_S = 20.0
_TIMED = re.compile(
    r"time/.*|.*/tokens_per_second|teacher/.*/(seconds|wakes)|teachers/overlap_fraction|shared/.*|cluster/.*"
)
"""Metrics that the clock or a death makes."""
GONE_S = 30.0
"""Seconds in which processes and shared memory of a run that has ended must be gone."""


@dataclass(frozen=True)
class Strike:
    """What is done to whom, and when: a stage of a step, and a fraction of its time."""

    victim: Victim
    signal: str
    step: int
    stage: float
    """Which of the step's stages, as a fraction."""
    delay: float
    which: float
    """Which of several such processes, as a fraction."""


@dataclass
class Outcome:
    """How a strike ended, as the results have it."""

    scenario: str
    victim: str
    signal: str
    step: int
    stage: str
    end: str = ""
    """continued, resumed, or missed if there was no such process then."""
    seconds: float = 0.0
    """From the strike to the run's end, or to the end of the step after it."""
    problems: list[str] = field(default_factory=list)


class Folder:
    """A run folder of a scenario, and all its starts; `slow` is a factor of the runs' deadlines."""

    def __init__(
        self, scenario: Scenario, folder: Path, models: Path, server: Server, family: Family, slow: float
    ) -> None:
        folder.mkdir(parents=True)
        self.scenario, self.folder, self.server, self.family = scenario, folder, server, family
        self.recipe = scenario.write(folder, models, server.url, slow)
        text = self.recipe.read_text()
        self._is_served = server.url in text
        self._lag: int = yaml.safe_load(text).get("rollout", {}).get("lag", 0)
        self._stopped: set[int] = set()
        """Who was stopped and never let go."""
        self.out = folder / "run"
        self._starts = 0
        self._struck = 0.0
        self._shared = shared_memory()

    def start(self) -> Run:
        """Start the run, or continue it if it has a checkpoint."""
        if self._is_served:
            self.server.ensure()
        self._starts += 1
        again = "--resume" if list(self.out.glob("checkpoints/step-*")) else "--fresh"
        options = ["--out", str(self.out), *([again] if self.out.exists() else [])]
        log = self.folder / f"start-{self._starts}.txt"
        return Run([str(self.recipe), *options], log)

    def wait(self, run: Run, there: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the run is `there` (then True), ends by itself, or it has been too long."""
        deadline = time.monotonic() + BOUND_S
        while run.code is None and time.monotonic() < deadline:
            if there():
                return True
            run.listen(0.5)
            self.family.look()
        return False

    def finish(self, run: Run) -> list[str]:
        """Wait for a run that is to be done; what is wrong with it."""
        self.wait(run)
        problems = []
        if run.code is None:
            problems.append(f"hangs in {run.stage} of step {run.step}")
            self._kill()
        elif run.code:
            problems.append(f"exit code {run.code}: {last_words(run.printed())}")
        problems += left_behind(self.family, self.server.pids, self._shared)
        self._kill()
        return problems

    def _kill(self) -> None:
        for pid in self.family.look().keys() - self.server.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def strike(self, run: Run, strike: Strike, stages: Sequence[tuple[str, float]]) -> Outcome | None:
        """Wait for the moment, send the signal, and see what becomes of the run; None if it ends before."""
        stage, length = stages[int(strike.stage * len(stages))]
        outcome = Outcome(self.scenario.name, strike.victim.kind, strike.signal, strike.step, stage)
        if not self.wait(
            run, lambda: run.step > strike.step or (run.step, run.stage) == (strike.step, stage)
        ):
            return None
        until = time.monotonic() + strike.delay * length
        while (left := until - time.monotonic()) > 0 and run.code is None:
            run.listen(left)
        pid = self._find(run, strike)
        if pid is None or run.code is not None:
            outcome.end = "missed"
            return outcome
        outcome.step, outcome.stage = run.step, run.stage
        self._struck = time.monotonic()
        os.kill(pid, getattr(signal, f"SIG{strike.signal}"))
        if strike.victim.kind == "controller" and strike.signal == "STOP":
            time.sleep(2 + 6 * strike.which)
            os.kill(pid, signal.SIGCONT)
        elif strike.signal == "STOP":
            self._stopped.add(pid)
        elif strike.victim.kind == "controller":  # whoever is still stopped can't notice it before
            for stopped in self._stopped & set(self.family.look()):
                os.kill(stopped, signal.SIGCONT)
            self._stopped.clear()
        self._see(run, outcome)
        outcome.seconds = round(time.monotonic() - self._struck, 1)
        if run.code is not None:
            self.judge_end(run, strike, outcome)
        return outcome

    def _find(self, run: Run, strike: Strike) -> int | None:
        """A process of the victim's kind, as soon as there is one."""
        victim = strike.victim
        if victim.kind == "controller":
            return run.pid
        until = time.monotonic() + FIND_S
        while run.code is None and time.monotonic() < until:
            alive = self.family.look()
            found = sorted(
                pid for pid, text in alive.items() if victim.title and re.search(victim.title, text)
            )
            if victim.child:
                found += [p for name, p in run.children.items() if victim.child in name and p in alive]
            if found:
                return found[int(strike.which * len(found))]
            run.listen(0.01)
        return None

    def _see(self, run: Run, outcome: Outcome) -> None:
        """Wait until the run is past a step that was not sampled yet, or has ended; kill one that hangs."""
        until, outcome.end = min(outcome.step + 2 + self._lag, STEPS), "continued"
        if not self.wait(run, lambda: run.step >= until) and run.code is None:
            outcome.problems.append(f"hangs in {run.stage} of step {run.step}")
            self._kill()
            while run.code is None:
                run.listen(0.5)

    def judge_end(self, run: Run, strike: Strike, outcome: Outcome) -> None:
        """A run ended after a strike, maybe some steps later: it was done, or said who was struck."""
        victim, printed, said = strike.victim, run.printed(), last_words(run.printed())
        outcome.seconds = round(time.monotonic() - self._struck, 1)
        outcome.problems += left_behind(self.family, self.server.pids, self._shared)
        self._kill()
        if run.code == 0:
            return
        outcome.end = "resumed"
        if victim.kind == "controller" and strike.signal == "KILL":
            return
        if run.code != 2 or "Traceback" in printed:
            outcome.problems.append(f"exit code {run.code}, no sentence for the user: {said}")
        elif not victim.names or not re.search(victim.names, said):
            outcome.problems.append(f"the sentence does not name it: {said}")
        elif victim.survives and strike.signal == "KILL":
            outcome.problems.append(f"did not continue: {said}")


def last_words(printed: str) -> str:
    """What a run said after its last line of progress, which has words like "rollout 149 tokens/s" too."""
    lines = printed.splitlines()
    progress = [number for number, line in enumerate(lines) if " · step " in line]
    return " ".join(" ".join(lines[progress[-1] + 1 if progress else 0 :]).split())


def disturb(
    folder: Folder,
    reference: Path,
    strikes: Iterable[Strike],
    stages: Sequence[tuple[str, float]],
    outcomes: list[Outcome],
) -> Iterator[Outcome]:
    """All strikes on one run folder, then its undisturbed end, compared with the reference. Yields each
    strike's outcome; `outcomes` has them too, with what was found later."""
    run, last = folder.start(), None

    def ended_late() -> bool:
        """The run ended of the last strike, which it did not notice at first: start it again."""
        nonlocal run, last
        if last is None or run.code in (None, 0):
            return False
        folder.judge_end(run, last, outcomes[-1])
        run, last = folder.start(), None
        return True

    for strike in strikes:
        if run.code == 0:
            break
        if run.code is not None:
            run, last = folder.start(), None
        outcome = folder.strike(run, strike, stages)
        if outcome is None and ended_late():
            outcome = folder.strike(run, strike, stages)
        if outcome is None and run.code == 0:
            break
        if outcome is None:
            end = f"exit code {run.code} in {run.stage} of step {run.step}: {last_words(run.printed())}"
            first = Outcome(folder.scenario.name, strike.victim.kind, strike.signal, strike.step, "")
            outcomes.append(replace(first, end="ended too early", problems=[end]))
            yield outcomes[-1]
            return
        outcome.problems += compare(reference, folder.out, finished=False)
        outcomes.append(outcome)
        last = strike
        yield outcome
    if run.code not in (None, 0):
        run = folder.start()
    folder.wait(run)
    if ended_late():
        folder.wait(run)
    problems = folder.finish(run) or compare(reference, folder.out, finished=True)
    if outcomes:
        outcomes[-1].problems += problems


def draw(rng: random.Random, victims: Sequence[tuple[Victim, str]]) -> list[Strike]:
    """Strikes on these victims with these signals, one in every other step."""
    return [
        Strike(victim, name, 1 + 2 * i, rng.random(), rng.random(), rng.random())
        for i, (victim, name) in enumerate(victims)
    ]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; a run that is killed may leave half a line, which a resumed one cuts."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def compare(reference: Path, run: Path, *, finished: bool) -> list[str]:
    """How a run differs from the undisturbed one of the same recipe: in sentences, empty if it does not."""
    problems: list[str] = []
    ours, theirs = (rows_of(folder / "metrics.jsonl") for folder in (run, reference))
    steps = [row["step"] for row in ours]
    if steps != list(range(len(theirs) if finished else len(steps))):
        problems.append(f"metrics.jsonl has the steps {steps}")
    for mine, other in zip(ours, theirs, strict=False):
        names = [name for name in dict.fromkeys([*mine, *other]) if not _TIMED.fullmatch(name)]
        if differing := [name for name in names if mine.get(name) != other.get(name)]:
            problems.append(f"step {mine['step']} differs in {', '.join(differing[:4])}")
    if finished:
        for name in ("samples.jsonl", "eval.jsonl"):
            if not (reference / name).exists() and not (run / name).exists():
                continue
            ids = [row["id"] for row in rows_of(run / name)]
            if ids != [row["id"] for row in rows_of(reference / name)]:
                problems.append(f"{name} has other records, or some twice")
            elif (run / name).read_bytes() != (reference / name).read_bytes():
                problems.append(f"{name} differs")
        weights = Path("export/model.safetensors")
        if (run / weights).read_bytes() != (reference / weights).read_bytes():
            problems.append("the exported weights differ")
    return problems


def left_behind(
    family: Family, spared: Callable[[], Collection[int]], shared_before: Collection[str]
) -> list[str]:
    """Processes and shared memory that a run left; looks until they are gone or it has been too long."""
    deadline = time.monotonic() + GONE_S
    while left := {pid: text for pid, text in family.look().items() if pid not in spared()}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.5)
    problems = [f"process {pid} is left: {text[:80]}" for pid, text in left.items()]
    files, deadline = shared_memory() - set(shared_before), time.monotonic() + GONE_S
    while files and time.monotonic() < deadline:  # another program's, which is about to open it
        time.sleep(0.5)
        files &= shared_memory()
    return problems + [f"shared memory is left: {name}" for name in sorted(files)]

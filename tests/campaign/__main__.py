"""Kill and stop processes of runs at random points, see that nothing comes of it, and write the results."""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain, pairwise, takewhile
from pathlib import Path

from tests.campaign.processes import MARK, Family, Server, end_cleanly
from tests.campaign.scenarios import SCENARIOS, Scenario, Victim, save_models
from tests.campaign.strike import Folder, Outcome, disturb, draw
from tests.cluster import ENV

STRIKES = 4
"""Kills of one run folder."""


def main() -> int:
    """Exit code 0 if each kill ended well."""
    options = _options()
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore
    end_cleanly()
    rng = random.Random(options.seed)
    mark = f"{os.getpid()}-{time.time_ns()}"
    os.environ.update(ENV | {MARK: mark, "OMP_NUM_THREADS": "1"})
    root = Path(__file__).parents[2]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root / "src"), str(root)])
    work = Path(tempfile.mkdtemp(prefix="campaign-"))
    os.environ["RAY_TMPDIR"] = str(work)
    family = Family(mark)
    server = Server(work / "models" / "small", work / "server.txt")
    outcomes: list[Outcome] = []
    began = time.monotonic()

    try:
        save_models(work / "models")
        around = work / "models", server, family, options.slow
        references: dict[str, tuple[Path, list[tuple[str, float]]]] = {}
        for number, (scenario, victims) in enumerate(_episodes(rng, options)):
            if scenario.name not in references:
                references[scenario.name] = undisturbed(
                    Folder(scenario, work / f"reference-{number:03d}", *around)
                )
            reference, stages = references[scenario.name]
            if _is_over(options, outcomes, began):
                break
            folder, new = Folder(scenario, work / f"{number:03d}", *around), []
            first, *rest = draw(rng, victims)
            rest = takewhile(lambda _: not _is_over(options, outcomes, began), rest)
            for outcome in disturb(folder, reference, chain([first], rest), stages, new):
                _show(outcome)
                outcomes.append(outcome)
            if not any(outcome.problems for outcome in new):
                shutil.rmtree(folder.folder)
    finally:
        server.close()
        family.kill()
        failed = [outcome for outcome in outcomes if outcome.problems]
        if failed:
            print(f"folders of runs that failed: {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)
    kills = [outcome for outcome in outcomes if outcome.end != "missed"]
    print(f"{len(kills)} kills, {len(failed)} failed, in {(time.monotonic() - began) / 60:.0f} minutes")
    return bool(failed)


def _is_over(options: argparse.Namespace, outcomes: list[Outcome], began: float) -> bool:
    """Whether there are enough kills, or it has been long enough."""
    if options.kills:
        return sum(outcome.end != "missed" for outcome in outcomes) >= options.kills
    return time.monotonic() - began > 60 * options.minutes


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="chooses scenarios, victims, signals and moments")
    parser.add_argument("--minutes", type=float, default=13.0, help="nothing is killed after this many (13)")
    parser.add_argument("--kills", type=int, default=0, help="how many kills, in place of minutes")
    parser.add_argument("--slow", type=float, default=1.0, help="factor of deadlines, for a busy machine")
    parser.add_argument("--only", default="", help="scenarios whose name has this pattern")
    return parser.parse_args()


def _episodes(
    rng: random.Random, options: argparse.Namespace
) -> Iterator[tuple[Scenario, list[tuple[Victim, str]]]]:
    """Without end: runs with their victims, so that all kinds are met before one is met again."""
    scenarios = [s for s in SCENARIOS.values() if re.search(options.only, s.name)]
    while True:
        episodes = []
        for scenario in scenarios:
            cells = [(victim, name) for victim in scenario.victims for name in ("KILL", "STOP")]
            rng.shuffle(cells)
            episodes += [(scenario, cells[i : i + STRIKES]) for i in range(0, len(cells), STRIKES)]
        if not episodes:
            raise SystemExit("no scenario has such a name")
        rng.shuffle(episodes)
        yield from episodes


def undisturbed(folder: Folder) -> tuple[Path, list[tuple[str, float]]]:
    """Train without kills. Return the run's folder, and the stages of a middle step with their seconds."""
    run = folder.start()
    if problems := folder.finish(run):
        raise RuntimeError(f"the undisturbed run of {folder.scenario.name!r} failed: {problems}")
    step, lengths = run.step // 2, dict[str, float]()
    for (begin, number, stage), (end, *_) in pairwise(run.timeline):
        if number == step and stage != "eval":
            lengths.setdefault(stage, end - begin)
    print(f"{folder.scenario.name}: undisturbed; stages: {', '.join(lengths)}")
    return folder.out, list(lengths.items())


def _show(outcome: Outcome) -> None:
    text = f"{outcome.signal} {outcome.victim} in {outcome.stage} of step {outcome.step}"
    print(f"{outcome.scenario}: {text}: {outcome.end} after {outcome.seconds:.0f} s")
    for problem in outcome.problems:
        print(f"  FAILED: {problem}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

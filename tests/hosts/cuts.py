"""Cut links and kill hosts under runs on a cluster: `python -m tests.hosts.cuts RESULTS.jsonl FOLDER`.

Each case strikes one host at the beginning of a stage, or shortly after. Then the run is past the next step,
or it has ended by itself with a sentence that has the host's address, and is resumed. Its metrics, samples
and weights are those of an undisturbed run, bit for bit. RESULTS has a line for each case; those whose last
line has no problems are not tried again. FOLDER keeps the runs.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from tests.campaign.child import Run
from tests.campaign.processes import end_cleanly
from tests.campaign.scenarios import make_recipe, make_teachers, save_models
from tests.campaign.strike import compare, last_words
from tests.hosts.network import Host
from tests.hosts.ray_hosts import HOST_ENV, RayHosts

BOUND_S = 400.0
"""In which a disturbed run must continue or end."""
SHORT_S, LONG_S, RETURN_S = 5.0, 60.0, 15.0
SLOW_MBITS = 1.0
PATIENT = {"deadline_s": 300}
"""The rollout's deadline: Ray needs a minute to notice a lost host, and workers start slowly here."""
TEACHER_S = 120
"""The deadline of teachers: the default."""
TITLES = {
    "learner": "ray::TrainWorker",
    "rollout": "ray::RolloutWorker",
    "reward": "ray::RewardWorker",
    "teacher": "ray::TeacherWorker",
    "index": "ray::StoreIndex",
    "unit": "ray::SimpleStorageUnit",
    "queue": "ray::TransferQueueController",
}
"""What runs on a host, by the titles of its processes."""
REPLACED = {"rollout", "reward", "teacher"}
"""Workers whose host may be lost: others take their place, and the run continues."""
SERVER = "server"
"""The host with a teacher behind a URL, without Ray."""


@dataclass
class Case:
    """One strike, and how it ended."""

    scenario: str
    host: str
    action: str
    """cut 5 s, cut 60 s, cut, death, return or throttle."""
    stage: str
    delay: float = 0.0
    step: int = 0
    roles: list[str] = field(default_factory=list)
    """All that ran on the host."""
    end: str = ""
    """continued or resumed."""
    seconds: float = 0.0
    """From the strike to the end of the step after it, or to the run's end."""
    said: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.scenario}: {self.action} of {self.host} in {self.stage} +{self.delay:g}"


def _rewards(address: str, models: Path, server: str) -> dict[str, Any]:
    return make_recipe(dict(PATIENT), **_cluster(address, 2))


def _teachers(address: str, models: Path, server: str) -> dict[str, Any]:
    sections = make_teachers(models, server) | _cluster(address, 1, store="transferqueue")
    for teacher in sections["teachers"].values():
        teacher |= {"deadline_s": TEACHER_S}
    return make_recipe(dict(PATIENT), reward={"weight": 0.0}, eval={"rows": 0}, **sections)


def _lag(address: str, models: Path, server: str) -> dict[str, Any]:
    agent = {"loop": "tests.trainer.loops:uneven"}
    return make_recipe({"lag": 1} | PATIENT, agent=agent, **_cluster(address, 1))


def _cluster(address: str, ranks: int, **store: Any) -> dict[str, Any]:
    runtime = {"kind": "ray", "threads": 1, "address": address, "stage_s": 200, "max_deaths": 100, **store}
    return {"runtime": runtime, "pools": {"train": {"devices": ranks}, "rollout": {"devices": 1}}}


SCENARIOS: dict[str, tuple[Callable[[str, Path, str], dict[str, Any]], dict[str, int]]] = {
    "rewards, 2 ranks": (_rewards, {f"worker{number}": 1 for number in range(5)}),
    "teachers, TransferQueue": (_teachers, {f"worker{number}": 1 for number in range(4)} | {"worker4": 3}),
    "agents, lag 1": (_lag, {f"worker{number}": 1 for number in range(4)}),
}
"""Recipes, and the CPUs of hosts besides the head: one host more than the recipe needs."""


def cases() -> list[Case]:
    one, two, three = SCENARIOS
    hosts, stages = ("learner", "rollout", "reward", "head"), ("rollout", "reward", "update_student", "sync")
    found = [Case(one, host, "cut 5 s", stage) for host in hosts for stage in (*stages, "checkpoint")]
    places = (
        *(("learner", "update_student"), ("rollout", "rollout"), ("reward", "reward"), ("head", "sync")),
        *(("rollout", "sync"), ("learner", "checkpoint"), ("head", "rollout"), ("learner", "rollout")),
    )
    found += [Case(one, host, "cut 60 s", stage) for host, stage in places]
    found += [Case(one, host, "cut", stage) for host, stage in places]
    found += [Case(one, host, "death", stage, 0.02) for host, stage in places[:4]]
    found += [Case(one, host, "return", stage, 0.02) for host, stage in places[1:3]]
    found += [Case(one, host, "throttle", "rollout") for host in hosts]
    for host in ("teacher", SERVER, "unit", "rollout"):
        found.append(Case(two, host, "cut 5 s", "rollout"))
    for action in ("cut 60 s", "cut", "death"):
        found += [Case(two, host, action, "rollout") for host in ("teacher", SERVER, "unit")]
    for action in ("cut 5 s", "cut 60 s", "death"):
        found += [Case(three, host, action, "rollout") for host in ("rollout", "learner")]
    return found


class Trial:
    """The hosts of a scenario, and its runs in one folder."""

    def __init__(self, hosts: RayHosts, scenario: str, folder: Path) -> None:
        self.hosts, self.scenario, self.folder = hosts, scenario, folder
        self.server: Any = None

    def start(self, out: Path) -> Run:
        """Start the run, or continue it if it has a checkpoint."""
        out.parent.mkdir(parents=True, exist_ok=True)
        recipe, models = out.parent / "recipe.yaml", self.folder / "models"
        server = self.hosts.hosts.get(SERVER)
        url = f"http://{server.address}:8000/v1" if server is not None else ""
        recipe.write_text(yaml.safe_dump(SCENARIOS[self.scenario][0](self.hosts.address, models, url)))
        if server is not None and (self.server is None or self.server.poll() is not None):
            self.serve(server, models / "small")
        again = "--resume" if list(out.glob("checkpoints/step-*")) else "--fresh"
        options = ["--out", str(out), *([again] if out.exists() else [])]
        start = partial(self.hosts.head.start, env=HOST_ENV, cwd=out.parent)
        return Run([str(recipe), *options], out.parent / f"{out.name}-{time.time():.0f}.txt", start)

    def serve(self, server: Host, model: Path) -> None:
        command = [sys.executable, "-m", "practicum", "serve", str(model), "--host", server.address]
        with (self.folder / "server.txt").open("a") as log:
            options = ["--no-key", "--name", "served", "--threads", "1"]
            self.server = server.start([*command, *options], env=HOST_ENV, stdout=log, stderr=log)
        deadline = time.monotonic() + 120
        probe = ["bash", "-c", f": < /dev/tcp/{server.address}/8000"]
        while server.run(probe, 5).returncode:
            if time.monotonic() > deadline or self.server.poll() is not None:
                raise RuntimeError(f"the served teacher does not start, see {self.folder / 'server.txt'}")
            time.sleep(0.3)

    def reference(self) -> Path:
        """The undisturbed run, which is made once."""
        out = self.folder / "reference" / "run"
        if not (out / "export/model.safetensors").exists():
            run, began = self.start(out), time.monotonic()
            self.until(run, lambda: False)
            if run.code != 0:
                raise RuntimeError(f"the undisturbed run failed: {last_words(run.printed())}")
            stages = dict.fromkeys(stage for _, step, stage in run.timeline if step == 5)
            print(
                f"{self.scenario}: {time.monotonic() - began:.0f} s; stages: {', '.join(stages)}", flush=True
            )
        return out

    def until(self, run: Run, there: Callable[[], bool]) -> bool:
        """Let the run go on until it is there; then it waits. False if it ends or takes too long."""
        deadline = time.monotonic() + BOUND_S
        while run.code is None and time.monotonic() < deadline:
            seen = len(run.timeline)
            run.listen(0.2)
            if len(run.timeline) > seen:
                if there():
                    return True
                run.answer()
        return False

    def find(self, kind: str) -> Host | None:
        if kind in self.hosts.hosts:
            return self.hosts[kind]
        return next((host for host in self.hosts.hosts.values() if kind in roles_of(host)), None)

    def disturb(self, cases: list[Case], name: str, is_over: Callable[[], bool]) -> Iterator[Case]:
        """Strike one run by some cases, and compare its end with the undisturbed run.

        Yields each case as it ends, and the last one again if the run's end shows more problems.
        """
        reference, out = self.reference(), self.folder / name / "run"
        run, struck = self.start(out), list[Case]()
        for number, case in enumerate(cases):
            if is_over():
                break
            run = self._disturb(run, case, out, 1 + 2 * number)
            case.problems += compare(reference, out, finished=False)
            struck.append(case)
            yield case
        if not struck:
            run.kill()
            return
        if run.code is None:
            run.answer()
            self.until(run, lambda: False)
        last, before = struck[-1], len(struck[-1].problems)
        if run.code is None:
            last.problems.append(f"hangs in {run.stage} of step {run.step}")
            run.kill()
        elif run.code:
            last.problems.append(f"later: exit code {run.code}: {last_words(run.printed())[-600:]}")
        else:
            last.problems += compare(reference, out, finished=True)
        if len(last.problems) > before:
            yield last

    def _disturb(self, run: Run, case: Case, out: Path, first_step: int) -> Run:
        """Strike, see what happens, and put everything right again; return the run, which waits."""

        def strikes() -> bool:
            return run.step >= first_step and run.stage == case.stage

        run.answer()
        if not strikes() and not self.until(run, strikes):
            case.problems.append(f"ended before: {run.code}, {last_words(run.printed())[-600:]}")
            return run
        host = self.find(case.host)
        assert host is not None, f"no host has {case.host}"
        case.step, case.roles = run.step, roles_of(host)
        if case.delay:
            run.answer()
            time.sleep(case.delay)
        began = time.monotonic()
        undo = self.strike(host, case)
        if not case.delay:
            run.answer()

        def past() -> bool:
            undo_if_due()
            return run.step >= case.step + 2

        def undo_if_due() -> None:
            nonlocal undo
            if undo is not None and time.monotonic() > began + undo[0]:
                undo[1]()
                undo = None

        deadline = began + BOUND_S
        is_past = False
        while run.code is None and not is_past and time.monotonic() < deadline:
            seen = len(run.timeline)
            run.listen(0.1)
            is_past = past()
            if len(run.timeline) > seen and not is_past:
                run.answer()
        case.seconds = round(time.monotonic() - began, 1)
        if undo is not None:  # it did not have to wait for the link's return
            undo[1]()
        printed, case.end = run.printed(), "continued"
        if run.code is None and not is_past:
            case.problems.append(f"hangs in {run.stage} of step {run.step}")
            run.kill()
            run.code = -9
        elif run.code is not None:
            case.end, case.said = "resumed", last_words(printed)
            self.judge(run, case, host, printed)
        self.repair(host, case)
        if run.code is not None:
            run = self.start(out)
            self.until(run, lambda: True)
        return run

    def strike(self, host: Host, case: Case) -> tuple[float, Callable[[], None]] | None:
        """Do it. Return after how many seconds what is to be done next."""
        if case.action.startswith("cut"):
            host.cut()
            seconds = {"cut 5 s": SHORT_S, "cut 60 s": LONG_S}.get(case.action)
            return None if seconds is None else (seconds, host.mend)
        if case.action == "throttle":
            host.throttle(SLOW_MBITS)
            return None
        if case.action == "return":
            spare = next(self.hosts[name] for name in self.hosts.cpus if not roles_of(self.hosts[name]))
            spare.kill()
            host.kill()

            def come_back() -> None:
                host.boot()
                self.hosts.start_ray(host)
                spare.boot()

            return RETURN_S, come_back
        host.kill()
        return None

    def judge(self, run: Run, case: Case, host: Host, printed: str) -> None:
        said = case.said
        if case.host == "head" and case.action == "death":
            return
        if run.code != 2 or "Traceback" in printed:
            case.problems.append(f"exit code {run.code}, no sentence for the user: {said[-600:]}")
        elif case.host != "head" and host.address not in said:
            case.problems.append(f"the sentence does not have the host's address {host.address}")
        if case.action in ("cut 5 s", "throttle") or (set(case.roles) <= REPLACED and case.roles):
            case.problems.append("did not continue")

    def repair(self, host: Host, case: Case) -> None:
        """Mend the link, and start hosts again on which Ray has ended, or that Ray counts as lost."""
        host.throttle(None)
        host.mend()
        if case.host == "head" and case.end == "resumed":
            again = [other for other in self.hosts.hosts.values() if other.name != SERVER]
        else:
            time.sleep(1)
            lost = case.action in ("cut", "death") or case.end == "resumed"
            again = [
                other
                for name, other in self.hosts.hosts.items()
                if name != SERVER and (has_no_ray(other) or (lost and other is host))
            ]
        for other in again:
            if other.init.poll() is None:
                other.kill()
            other.boot()
        if self.hosts.head in again:
            self.hosts.start_ray(self.hosts.head)
        if rest := [other for other in again if other is not self.hosts.head]:
            self.hosts.start_rays(rest)
        if host.name == SERVER and host.init.poll() is not None:
            host.boot()
            self.server = None


def roles_of(host: Host) -> list[str]:
    if host.init.poll() is not None:
        return []
    commands = host.processes().values()
    if any("tests.campaign.child" in command for command in commands):
        return ["controller"]
    return [role for role, title in TITLES.items() if any(c.startswith(title) for c in commands)]


def has_no_ray(host: Host) -> bool:
    return host.init.poll() is not None or not any("/raylet" in c for c in host.processes().values())


def episodes(rest: list[Case]) -> Iterator[tuple[str, str, list[Case]]]:
    """Up to four cases that strike the same run, one after the other."""
    for (scenario, action), group in groupby(rest, lambda case: (case.scenario, case.action)):
        these = list(group)
        for first in range(0, len(these), 4):
            yield scenario, action, these[first : first + 4]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.cuts", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0, help="no case begins after this many (9)")
    parser.add_argument("--only", default="", help="cases whose name has this pattern")
    parser.add_argument("--shard", default="0/1", help="which part of the cases, such as 0/2")
    options = parser.parse_args()
    part, parts = map(int, options.shard.split("/"))
    began = time.monotonic()
    end_cleanly()
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    tried = {case.name: case for case in (Case(**json.loads(line)) for line in lines)}
    done = {name for name, case in tried.items() if not case.problems}
    wanted = [case for case in cases() if re.search(options.only, case.name)]
    mine = [
        (scenario, action, rest)
        for scenario, action, these in list(episodes(wanted))[part::parts]
        if (rest := [case for case in these if case.name not in done])
    ]

    def is_over() -> bool:
        return time.monotonic() - began > 60 * options.minutes

    folder, failed = options.folder / f"shard-{part}", 0
    save_models(folder / "models")
    for scenario, group in groupby(mine, lambda episode: episode[0]):
        cpus = {"head": 0} | SCENARIOS[scenario][1]
        with RayHosts(cpus, [folder], others=[SERVER] if "teachers" in scenario else []) as hosts:
            trial = Trial(hosts, scenario, folder / scenario.replace(" ", "_"))
            trial.folder.mkdir(exist_ok=True)
            if not (trial.folder / "models").exists():
                shutil.copytree(folder / "models", trial.folder / "models")
            for _, action, these in group:
                name = f"{action} {time.time():.0f}".replace(" ", "-")
                for case in trial.disturb(these, name, is_over):
                    with options.results.open("a") as file:
                        file.write(json.dumps(asdict(case)) + "\n")
                    ended = f"{case.name}: {case.end} after {case.seconds:.0f} s"
                    print(ended, *case.problems, sep="\n  ", flush=True)
                    failed += bool(case.problems)
                if is_over():
                    return failed
    return failed


if __name__ == "__main__":
    sys.exit(main())

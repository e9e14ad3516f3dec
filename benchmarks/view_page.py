"""The viewer on a run of 10,000 steps and 100,000 recorded rows: first paint, curves, a filter, a token.

The run folder is written by the run's own writers, with made-up numbers. A headless Chromium opens the page,
served by its own process that has read the files before; how long that reading takes is measured too.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from playwright.sync_api import Page, sync_playwright

from benchmarks import harness
from benchmarks.clusters import wants_quick
from benchmarks.harness import Measured, Stopwatch
from benchmarks.model import CACHE
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.ragged import Column, Ragged
from practicum.models.tokenizer import make_tokenizer
from practicum.records.record_files import FOLDER, RecordPlace
from practicum.records.recorder import Recorder, told_tags
from practicum.trainer.run_folder import append_lines
from practicum.trainer.versions import versions
from practicum.view.run_view import RunView
from practicum.view.serve_view import view_beside

STEPS, ROWS = 10_000, 10
"""Steps, and recorded rows of each: two groups of five."""
TOKENS, METRICS, ROUNDS = 12, 80, 9
GOALS = {"first_paint": 0.5, "filter": 0.1}
"""Most seconds."""
DOMAINS = ("copy", "reverse", "rotate")
_SHOWN = """async ([hash, test]) => {
  const holds = new Function(`return ${test}`), began = performance.now();
  if (hash) location.hash = hash;
  while (!holds()) await new Promise(requestAnimationFrame);
  await new Promise(requestAnimationFrame);
  return (hash ? performance.now() - began : performance.now()) / 1000;
}"""
"""Goes to a place, or waits for the first one; gives the seconds until a test holds and it was painted."""


def make_run(folder: Path, steps: int, rows: int) -> Path:
    """A run folder as a run leaves it."""
    numbers = random.Random(1)
    folder.mkdir(parents=True)
    recipe = {"name": "large", "train": {"steps": steps}, "track": {"record": 2}, "tasks": {}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    start = {"outcome": "done", "last_step": steps}
    (folder / "versions.json").write_text(json.dumps({**versions(), "starts": [start]}))
    make_tokenizer().backend_tokenizer.save(str(folder / "tokenizer.json"))
    recorder = Recorder(RecordPlace(folder / FOLDER, "local"))
    for first in range(1, steps + 1, 100):
        chunk = range(first, min(steps, first + 99) + 1)
        append_lines(folder / "metrics.jsonl", [_metrics(step, numbers) for step in chunk])
        answers = [_answer(step, row, numbers) for step in chunk for row in range(rows)]
        append_lines(folder / "samples.jsonl", answers)
        for step in chunk:
            _record(recorder, step, rows)
    return folder


def _metrics(step: int, numbers: random.Random) -> dict[str, float]:
    named = {f"train/number_{i}": numbers.gauss(i, 1.0) for i in range(METRICS)}
    scores = {f"reward/mean/{domain}": numbers.random() for domain in DOMAINS}
    times = {f"time/{name}": numbers.random() for name in ("rollout", "teachers", "update_student")}
    more = {"reward/mean": numbers.random(), "eval/greedy": numbers.random(), "time/step": 3.0}
    return {"step": step, **named, **scores, **times, **more}


def _answer(step: int, row: int, numbers: random.Random) -> dict[str, Any]:
    domain = DOMAINS[step % len(DOMAINS)]
    words = dict.fromkeys(("task", "domain", "teacher"), domain)
    words |= {"prompt": f"{domain}:{step}=", "response": "abc" * 4}
    counts = {"prompt_tokens": 12, "response_tokens": TOKENS, "sampled_tokens": TOKENS, "turns": 1}
    place = {"step": step, "group": _prompt(step, row), "session": row % 5}
    told = {"reward": numbers.random(), "advantage": numbers.gauss(0, 1), "finish": "stop", "failure": None}
    return place | words | counts | told | {"expected": "cba", "trajectories": None}


def _prompt(step: int, row: int) -> int:
    return 2 * step + row // 5


def _record(recorder: Recorder, step: int, rows: int) -> None:
    """Tokens and a few columns of each row, and the stages."""
    keys = tuple(Key(_prompt(step, row), row % 5) for row in range(rows))
    tags = Tags(prompt_tokens=4, response_tokens=TOKENS, sampled_tokens=TOKENS, step=step, recorded=True)
    batch = BatchRef("train", keys, (tags,) * rows)
    values = torch.zeros(rows * TOKENS)
    columns: dict[str, Column] = {
        "prompt_ids": Ragged.packed(torch.full((rows * 4,), 9), [4] * rows),
        "response_ids": Ragged.packed(torch.full((rows * TOKENS,), 10), [TOKENS] * rows),
        "response_mask": Ragged.packed(torch.ones(rows * TOKENS, dtype=torch.bool), [TOKENS] * rows),
        "rollout_logprobs": Ragged.packed(values, [TOKENS] * rows),
        "advantages": Ragged.packed(values + 1, [TOKENS] * rows),
    }
    with recorder.span("rollout", step):
        recorder.add("rollout", batch, columns, told_tags)


@contextmanager
def opened(url: str) -> Iterator[Page]:
    """The page in a new browser."""
    path = shutil.which("chromium")
    if path is None:
        sys.exit("Chromium is missing: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(url)
        yield page
        browser.close()


def look(page: Page, run: str, last: int, domain: str) -> Measured:
    """Seconds from the navigation to the drawn Overview, then from a place to the next one."""
    prompt = _prompt(last, 0)
    places = {
        "first_paint": ("", "document.querySelectorAll('.chart canvas').length >= 3"),
        "curves": (f"#/{run}/metrics", "document.querySelectorAll('.small-charts canvas').length >= 8"),
        "rows": (f"#/{run}/rollouts", "document.querySelectorAll('.wt-body .wt-row').length > 5"),
        "filter": (f"#/{run}/rollouts?domain={domain}&sort=-reward", ""),
        "tokens": (
            f"#/{run}/step/{last}/prompt/{prompt}/session/0/tokens",
            "document.querySelectorAll('.flow .token').length > 5",
        ),
    }
    found = {}
    for name, (place, test) in places.items():
        if name == "filter":
            before = page.evaluate(_COUNT)
            test = f"{_COUNT} !== {json.dumps(before)}"
        found[name] = float(page.evaluate(_SHOWN, [place, test]))
    return found


_COUNT = "document.querySelector('.tools .muted').textContent"


def measure(steps: int, rows: int, rounds: int) -> dict[str, Any]:
    """All of it, on a run of this size."""
    run = made_run(steps, rows)
    watch = Stopwatch()
    view = RunView(run, "large")
    view.info()
    view.record()
    reading = watch.read()
    found = []
    with view_beside([run]) as url:
        for number in range(rounds + 1):
            with opened(url) as page:
                measured = look(page, "large", steps, DOMAINS[number % len(DOMAINS)])
            if number:  # the first one waits for the server to read the files
                found.append(measured)
                told = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in measured.items())
                print(f"  {told}", flush=True)
    size = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
    return {"reading": reading, "rounds": found, "megabytes": size / 1e6}


def made_run(steps: int, rows: int) -> Path:
    """The run folder of this size, made once."""
    folder = CACHE / "view" / f"{steps}-steps-{rows}-rows"
    if not (folder / "large").exists():
        shutil.rmtree(folder, ignore_errors=True)
        make_run(folder / "made", steps, rows).rename(folder / "large")
    return folder / "large"


def main() -> None:
    """Measure, and write the results."""
    if wants_quick():
        measure(200, ROWS, 1)
        return
    settings = {"steps": STEPS, "rows": STEPS * ROWS, "metrics": METRICS, "tokens": TOKENS, "rounds": ROUNDS}
    found = measure(STEPS, ROWS, ROUNDS)
    harness.write_results("view_page", {"goals": GOALS, "settings": settings, **found})


if __name__ == "__main__":
    main()

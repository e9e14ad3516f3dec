"""Fuzz recipes, data files and requests: each is accepted or refused with a sentence, in seconds.

A sample of the recipes that `check` accepts is trained for a step, which must work too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import yaml

from practicum import api
from practicum.errors import PracticumError
from practicum.recipe.load_recipe import load_recipe
from practicum.records.read_record import Record
from practicum.records.record_files import FOLDER, record_files
from practicum.tasks.check_tasks import tasks_needing_answer
from practicum.tasks.stream import eval_prompts, make_stream
from practicum.trainer.preflight import check_without_models
from tests.campaign.draw_files import draw_file
from tests.campaign.draw_recipes import draw_recipe, mutate
from tests.campaign.fuzz_server import fuzz_server

LIMIT_S = 60
"""A check or a step of a tiny recipe that takes longer hangs."""


class Hang(BaseException):
    """Not an Exception: nobody may take it for a user's error."""


@contextmanager
def bounded() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang(f"no end after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Found:
    """What came of one kind of input."""

    def __init__(self, kind: str) -> None:
        self.kind, self.counts, self.failures = kind, Counter[str](), list[dict[str, Any]]()
        self._seen: set[str] = set()

    def attempt(self, work: Callable[[], Any], seed: int, shown: Callable[[], str]) -> Any:
        """Do something with one input; None unless it was accepted."""
        try:
            with bounded():
                result = work()
        except PracticumError:
            self.counts["refused"] += 1
            return None
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self.counts["failed"] += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}"
            if place not in self._seen:
                self._seen.add(place)
                told = traceback.format_exc().splitlines()
                self.failures.append(
                    {"seed": seed, "error": f"{place}: {str(error)[:200]}", "input": shown()[:600]}
                )
                print(f"FAILED {self.kind} {seed}: {place}: {str(error)[:300]}\n" + "\n".join(told[-24:]))
                print(shown()[:800], flush=True)
            return None
        self.counts["accepted"] += 1
        return result

    def row(self) -> dict[str, Any]:
        return {"kind": self.kind, **self.counts, "failures": self.failures}


def fuzz_recipes(count: int, first: int, folder: Path) -> tuple[Found, list[tuple[int, dict[str, Any]]]]:
    """Recipes through the static check; gives those that were accepted."""
    found, accepted = Found("recipes"), []
    path = folder / "fuzz.yaml"
    for seed in range(first, first + count):
        rng = random.Random(seed)
        recipe = draw_recipe(rng)
        for _ in range(rng.choice([0, 0, 1, 2, 4])):
            recipe = mutate(recipe, rng)
        text = _text(recipe, rng)
        path.write_bytes(text)

        def check() -> api.Report:
            report = api.check(load_recipe(path), static=True)
            report.text(everything=True)
            return report

        report = found.attempt(check, seed, lambda text=text: text.decode(errors="replace"))
        if report is not None:
            accepted.append((seed, report.loaded.recipe.model_dump(mode="json", exclude_unset=True)))
    return found, accepted


def _text(recipe: dict[str, Any], rng: random.Random) -> bytes:
    """The recipe's file; a few are damaged as text."""
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=rng.random() < 0.5).encode(
        errors="surrogatepass"
    )
    if rng.random() < 0.1:
        at = rng.randrange(len(text) + 1)
        junk = rng.choice(
            [b"\t", b"\xff", b"\0", b"{", b"&a", b"*a", b"!!python/none ", b": ", b"- ", b"<<: "]
        )
        return text[:at] + junk + text[at + rng.randrange(3) :]
    return text


def fuzz_steps(accepted: list[tuple[int, dict[str, Any]]], most: int, folder: Path) -> Found:
    """Of the recipes that the static check accepts: those that `check` accepts too must take a step."""
    found, checked = Found("first steps of what check accepts"), 0
    here = folder / "steps"
    here.mkdir()
    os.chdir(here)
    for seed, recipe in accepted:
        if checked >= most:
            break
        if _needs_more(recipe):
            continue
        path = here / "step.yaml"
        path.write_text(yaml.safe_dump(_small(recipe)))
        refused = Found("check")
        report = refused.attempt(lambda p=path: api.check(load_recipe(p)), seed, path.read_text)
        found.failures += refused.failures
        found.counts["failed"] += refused.counts["failed"]
        if report is None:
            found.counts["refused by check"] += refused.counts["refused"]
            continue
        checked += 1

        def step(path: Path = path) -> bool:
            try:
                with redirect_stdout(sys.stderr):
                    api.train(load_recipe(path), out=here / "run", fresh=(here / "run").exists(), quiet=True)
            except PracticumError as error:
                if "no group to learn from" in str(error):  # what the model answers, nobody can check before
                    return True
                raise AssertionError(f"check accepted what the first step refuses: {error}") from error
            return True

        found.attempt(step, seed, path.read_text)
    return found


def _needs_more(recipe: dict[str, Any]) -> bool:
    """Whether a recipe needs a cluster, a server, another engine or what is not installed."""
    text = json.dumps(recipe)
    return any(word in text for word in ('"ray"', '"vllm"', '"url"', '"wandb"', '"trackio"', '"tensorboard"'))


def _small(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe with one step of few rows."""
    recipe = json.loads(json.dumps(recipe))
    recipe.setdefault("train", {}).update(steps=1, prompts=min(recipe.get("train", {}).get("prompts", 4), 4))
    rollout = recipe.setdefault("rollout", {})
    rollout.update(
        samples=min(rollout.get("samples", 2), 4), max_new_tokens=min(rollout.get("max_new_tokens", 4), 8)
    )
    recipe.setdefault("eval", {}).update(rows=1)
    return recipe


def fuzz_files(count: int, first: int, folder: Path) -> Found:
    """Data files of a task: read, and if accepted, its first prompts taken."""
    found = Found("data files")
    for seed in range(first, first + count):
        rng = random.Random(seed)
        for old in folder.glob("data*"):
            old.unlink()
        path = draw_file(rng, folder)
        task: dict[str, Any] = {"file": path.name, "too_long": rng.choice(["error", "skip", "cut"])}
        if rng.random() < 0.2:
            task["chat"] = True
        tiny = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "context": 64}
        recipe = {"name": "fuzz", "model": {"make": tiny}, "tasks": {"mine": task}, "eval": {"rows": 1}}
        recipe |= {"rollout": {"max_new_tokens": 8}, "train": {"prompts": 1}}
        if rng.random() < 0.5:
            recipe["reward"] = {"functions": [{"use": "tests.campaign.parts:by_letters"}]}
        (folder / "fuzz.yaml").write_text(yaml.safe_dump(recipe))

        def read() -> int:
            loaded = load_recipe(folder / "fuzz.yaml").recipe
            checked = check_without_models(loaded)
            needs = tasks_needing_answer(loaded)
            stream = make_stream(loaded.tasks, 0, needs_answer=needs, left_out=checked.left_out)
            return len(stream.take(4)) + len(eval_prompts(loaded.tasks, 1, 0, checked.left_out))

        found.attempt(read, seed, lambda p=path: f"{p.name}: {p.read_bytes()[:400]!r}")
    return found


def fuzz_records(count: int, first: int, folder: Path) -> Found:
    """Records of a run with flipped bits: what can't be read is told, the rest is there."""
    found, run = Found("damaged records"), folder / "recorded"
    tiny = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "context": 64}
    recipe = {
        "name": "fuzz",
        "model": {"make": tiny},
        "tasks": {"copy": {"kind": "copy"}},
        "eval": {"rows": 1},
    }
    recipe |= {"rollout": {"max_new_tokens": 4, "samples": 2}, "train": {"steps": 2, "prompts": 2}}
    api.train(recipe | {"track": {"record": "all"}}, out=run, quiet=True)
    files = {path: path.read_bytes() for path in record_files(run / FOLDER)}
    for seed in range(first, first + count):
        rng = random.Random(seed)
        path = rng.choice(list(files))
        data = bytearray(files[path])
        for _ in range(rng.choice([1, 1, 4, 40])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(data[: rng.choice([len(data), rng.randrange(len(data))])]))

        def read() -> int:
            record = Record(run)
            rows = [record.row(row.step, row.key) for row in record.rows()]
            return len(rows) + sum(len(record.stages(step)) for step in record.steps())

        found.attempt(read, seed, lambda p=path: p.name)
        path.write_bytes(files[path])
    return found


def main() -> int:
    """Exit code 0 if nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.fuzz", description=__doc__)
    parser.add_argument("--recipes", type=int, default=10_000)
    parser.add_argument(
        "--steps", type=int, default=200, help="recipes that check accepts, trained for a step"
    )
    parser.add_argument("--files", type=int, default=2_000)
    parser.add_argument("--records", type=int, default=1_000, help="damaged records of a run that are read")
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0, help="the first one; each input has its own")
    parser.add_argument("--result", type=Path, default=None, help="a JSON file for the counts")
    options = parser.parse_args()
    result = options.result and options.result.absolute()
    folder, began = Path(tempfile.mkdtemp(prefix="fuzz-")), time.monotonic()
    (folder / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 8)
    os.chdir(folder)
    rows: list[dict[str, Any]] = []

    def note(row: dict[str, Any]) -> None:
        rows.append(row)
        print({name: value for name, value in row.items() if name != "failures"}, flush=True)
        if result is not None:
            content = {"seed": options.seed, "seconds": round(time.monotonic() - began), "found": rows}
            result.write_text(json.dumps(content, indent=1) + "\n")

    try:
        note(fuzz_server(options.requests, options.seed))
        note(fuzz_files(options.files, options.seed, folder).row())
        note(fuzz_records(options.records, options.seed, folder).row())
        recipes, accepted = fuzz_recipes(options.recipes, options.seed, folder)
        note(recipes.row())
        note(fuzz_steps(accepted, options.steps, folder).row())
    finally:
        os.chdir("/")
        shutil.rmtree(folder, ignore_errors=True)
    return any(row["failures"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())

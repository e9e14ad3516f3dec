"""Compare ways to learn from several specialists, at equal teacher tokens and at equal seconds.

    python recipes/many_teachers/compare.py run           # all rows, both task sets, seeds 1 to 3
    python recipes/many_teachers/compare.py run --quick   # one seed and few steps, which shows no result
    python recipes/many_teachers/compare.py report        # the tables of README.md, from records.json alone

`run` adds a record for each row and seed to records.json; rows that are there are not run again.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import practicum as pr
from practicum.trainer.run_models import merge_runs
from report import report  # beside this file

HERE = Path(__file__).resolve().parent
LETTERS, LENGTHS = "abcde", (3, 5)
SETS = {"demo": ("copy", "reverse", "rotate"), "conflict": ("rising", "falling")}
"""Task sets. In `conflict` both domains have the same prompts and opposite answers: 0.5 is the best mean."""
MODEL = {"family": "qwen3", "hidden": 128, "layers": 4, "heads": 4, "head_dim": 32, "context": 64}
RATES = (1e-4, 3e-4, 1e-3)
"""Learning rates; MOPD, SFT and GRPO each take the best one on TUNING, a seed that is not reported."""
TUNING, LAGGING = 100, 0.95
"""A domain below this share of its specialist's headroom is merged again."""
Record = dict[str, Any]


class Lab:
    """One seed of one task set: its base, its specialists, and the runs that start from them."""

    def __init__(self, name: str, seed: int, folder: Path, quick: bool) -> None:
        self.domains, self.seed, self.quick = SETS[name], seed, quick
        self.root = folder / name / str(seed)
        self.tasks = self._conflict() if name == "conflict" else {d: _task(d) for d in self.domains}
        self.steps = 4 if quick else 60
        self.base = self._specialise()

    def _conflict(self) -> Record:
        """Write rows of which the prompts don't say which order is asked for; return the tasks."""
        self.root.mkdir(parents=True, exist_ok=True)
        draws, tasks = random.Random(0), {}
        words = ["".join(draws.choices(LETTERS, k=draws.randint(*LENGTHS))) for _ in range(800)]
        for domain in SETS["conflict"]:
            for part, chosen in (("train", words[:600]), ("eval", words[600:])):
                answers = ["".join(sorted(w, reverse=domain == "falling")) for w in chosen]
                rows = [{"prompt": f"{w}=", "answer": a} for w, a in zip(chosen, answers, strict=True)]
                text = "".join(json.dumps(row) + "\n" for row in rows)
                (self.root / f"{domain}-{part}.jsonl").write_text(text)
            files = {"file": f"{domain}-train.jsonl", "eval_file": f"{domain}-eval.jsonl"}
            tasks[domain] = {key: str(self.root / file) for key, file in files.items()}
        return tasks

    def _specialise(self) -> Path:
        supervised = {"algorithm": {"loss": "supervised", "advantage": "none"}}
        start = {"model": {"random_init": MODEL}, "eval": {"rows": 128, "every": 5, "stop_at": 0.4}}
        train = {
            "steps": 8 if self.quick else 300,
            "prompts": 64,
            "lr": 1e-3,
            "warmup_steps": 10 * (not self.quick),
        }
        base = self.train("base", train=train, **supervised, **start)
        for domain in self.domains:
            tasks = {domain: self.tasks[domain]}
            train = {"steps": 4 if self.quick else 100, "prompts": 32, "lr": 2e-4}
            self.train(domain, tasks=tasks, train=train, **self.rewarded(base))
        return base

    def rewarded(self, start: Path) -> Record:
        algorithm = {"advantage": "grpo", "loss": "ppo_clip", "entropy": 0.01}
        return {"model": {"path": str(start)}, "algorithm": algorithm, "rollout": {"samples": 8}}

    def train(self, name: str, **sections: Any) -> Path:
        """Train a run, unless it is there, and return its folder."""
        folder = self.root / name.replace(",", "").replace(" ", "-")
        if (folder / "export").is_dir():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        recipe: Record = {"name": folder.name, "seed": self.seed, "tasks": self.tasks, "out": str(folder)}
        recipe |= {"eval": {"rows": 128, "every": 5}} | sections
        recipe["rollout"] = {"max_new_tokens": 8} | sections.get("rollout", {})
        recipe["train"] = {"betas": [0.9, 0.95]} | sections["train"]
        pr.train(recipe, quiet=True)
        return folder

    def teachers(self, **more: Any) -> Record:
        """Return the sections of a run that has a specialist as the teacher of each domain."""
        named = {domain: {"model": str(self.root / domain)} for domain in self.domains}
        return {"teachers": named, "route": {"by": "task"}, **more}

    def mopd(self, name: str, lr: float, start: Path | None = None, steps: int = 0, **route: Any) -> Path:
        more = {"distill": {"divergence": "reverse_kl", "signal": "full"}, "reward": {"weight": 0.0}}
        sections = self.teachers(model={"path": str(start or self.base)}, rollout={"samples": 2}, **more)
        sections["route"] |= route
        return self.train(name, train={"steps": steps or self.steps, "prompts": 48, "lr": lr}, **sections)

    def sft(self, name: str, lr: float) -> Path:
        supervised = {"algorithm": {"loss": "supervised", "advantage": "none"}, "rollout": {"samples": 2}}
        sections = self.teachers(model={"path": str(self.base)}, **supervised)
        return self.train(name, train={"steps": self.steps, "prompts": 48, "lr": lr}, **sections)

    def grpo(self, name: str, lr: float, **more: Any) -> Path:
        train = {"steps": self.steps, "prompts": 48, "lr": lr}
        return self.train(name, train=train, **self.rewarded(self.base), **more)

    def merge(self, name: str, runs: list[Path], weights: list[float] | None = None) -> Path:
        folder = self.root / name.replace(" ", "-")
        if not folder.is_dir():
            merge_runs([str(run) for run in runs], folder, weights, str(self.base))
        return folder

    def scores(self, model: Path | str) -> dict[str, float]:
        recipe = {"name": "scores", "tasks": self.tasks, "model": {"path": str(model)}, "eval": {"rows": 128}}
        recipe |= {"rollout": {"max_new_tokens": 8}, "algorithm": {"loss": "supervised", "advantage": "none"}}
        found = pr.evaluate(recipe, quiet=True)
        return {domain: found[f"eval/greedy/{domain}"] for domain in self.domains}

    def again(self, lr: float) -> list[Path]:
        """Train half-way from the merge, add the changes of lagging domains, and train on."""
        half = max(1, self.steps // 2)
        first = self.mopd("from merge, half", lr, self.merge("merge", self.specialists), half)
        base, now = self.scores(self.base), self.scores(first)
        added = []
        for domain, run in zip(self.domains, self.specialists, strict=True):
            room = self.scores(run)[domain] - base[domain]
            if room > 0 and now[domain] - base[domain] < LAGGING * room:
                added.append(run)
        weights = [1.0, *[1.0 / len(self.domains)] * len(added)]
        start = self.merge("merge again", [first, *added], weights) if added else first
        return [first, self.mopd("merged again", lr, start, half)]

    @property
    def specialists(self) -> list[Path]:
        return [self.root / domain for domain in self.domains]


def _task(domain: str) -> Record:
    return {"kind": domain, "options": {"length": list(LENGTHS), "letters": len(LETTERS)}}


def rows_of(lab: Lab, rates: dict[str, float]) -> dict[str, Callable[[], list[Path]]]:
    """Return the rows of the table: how each is made, as the runs one after the other, or one model."""
    mopd, sft, grpo = (rates[name] for name in ("mopd", "sft", "grpo"))

    def merged() -> Path:
        return lab.merge("merge", lab.specialists)

    rows: dict[str, Callable[[], list[Path]]] = {
        "uniform merge": lambda: [merged()],
        "MOPD": lambda: [lab.mopd("mopd", mopd)],
        "MOPD from the merge": lambda: [lab.mopd("from merge", mopd, merged())],
        "MOPD, merged again": lambda: lab.again(mopd),
        "SFT on right answers": lambda: [lab.sft("sft", sft)],
        "GRPO": lambda: [lab.grpo("grpo", grpo)],
        "no teacher (control)": lambda: [lab.grpo("control", grpo, stages=["unlikely:unlikely"])],
    }
    shares = {domain: 1 / len(lab.domains) for domain in lab.domains}
    for balance in ("shares", "sigma", "update"):
        targets = {} if balance == "sigma" else {"shares": shares}
        route = {"balance": balance, **targets}
        rows[f"MOPD, balance {balance}"] = lambda b=balance, r=route: [lab.mopd(f"mopd {b}", mopd, **r)]
    return rows


def curve(lab: Lab, runs: list[Path]) -> list[Record]:
    """Return the scores over runs one after the other, with teacher tokens and seconds spent so far."""
    points, tokens, seconds = [], 0.0, 0.0
    for run in runs:
        if not (run / "metrics.jsonl").is_file():  # a model that nothing was trained for
            return [{"tokens": 0.0, "seconds": 0.0, "scores": lab.scores(run)}]
        for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
            if any(name.startswith("teacher/") for name in row):
                tokens += row.get("rollout/tokens", 0.0)
            seconds += row.get("time/step", 0.0) - row.get("time/eval", 0.0)
            scores = {domain: row.get(f"eval/greedy/{domain}") for domain in lab.domains}
            if None not in scores.values():
                points.append({"tokens": tokens, "seconds": round(seconds, 3), "scores": scores})
    return points


def tuned(name: str, folder: Path, quick: bool) -> dict[str, float]:
    """Return the learning rate of each way with the best mean score on the seed TUNING."""
    if quick:
        return dict.fromkeys(("mopd", "sft", "grpo"), RATES[1])
    lab, best = Lab(name, TUNING, folder, quick), {}
    for way in ("mopd", "sft", "grpo"):
        means = {lr: fmean(lab.scores(getattr(lab, way)(f"{way} {lr:g}", lr)).values()) for lr in RATES}
        best[way] = max(means, key=lambda lr: means[lr])
    return best


def run(seeds: list[int], folder: Path, records: Path, quick: bool) -> None:
    kept: list[Record] = json.loads(records.read_text()) if records.is_file() else []
    done = {(record["set"], record["seed"], record["row"]) for record in kept}
    for name in SETS:
        rates = tuned(name, folder, quick)
        for seed in seeds:
            lab = Lab(name, seed, folder, quick)
            own = {d: lab.scores(run)[d] for d, run in zip(lab.domains, lab.specialists, strict=True)}
            fixed = {"base": lab.scores(lab.base), "specialists": own}
            makers = rows_of(lab, rates)
            for row in (*fixed, *makers):
                if (name, seed, row) in done:
                    continue
                started = time.time()
                point = {"tokens": 0.0, "seconds": 0.0, "scores": fixed.get(row)}
                points = [point] if row in fixed else curve(lab, makers[row]())
                kept.append({"set": name, "seed": seed, "row": row, "rates": rates, "points": points})
                records.write_text(json.dumps(kept, indent=1) + "\n")
                print(f"{name} seed {seed} {row}: {time.time() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "report"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--quick", action="store_true", help="one seed and few steps; nothing is written here"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/many_teachers"))
    args = parser.parse_args()
    folder = args.folder / "quick" if args.quick else args.folder
    records = folder / "records.json" if args.quick else HERE / "records.json"
    if args.what == "run":
        folder.mkdir(parents=True, exist_ok=True)
        run(args.seeds[:1] if args.quick else args.seeds, folder, records, args.quick)
    text = report(json.loads(records.read_text()))
    if args.quick:
        print(text)
    else:
        fill(HERE / "README.md", text)


def fill(page: Path, text: str) -> None:
    before, _, rest = page.read_text().partition("<!-- results -->\n")
    page.write_text(f"{before}<!-- results -->\n{text}\n<!-- end -->{rest.partition('<!-- end -->')[2]}")


if __name__ == "__main__":
    main()

"""Compare ways to learn from several specialists, at equal teacher tokens and at equal seconds.

    python recipes/many_teachers/compare.py run           # all rows, both task sets, seeds 1 to 3
    python recipes/many_teachers/compare.py run --quick   # one seed and few steps, which shows no result
    python recipes/many_teachers/compare.py run --sets parts   # these task sets alone
    python recipes/many_teachers/compare.py report        # the tables of README.md, from records.jsonl alone

`run` appends a record for each row and seed to records.jsonl. What is there is not made again.
Seconds are those of the processor, so that other programs on the machine hardly change them.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import practicum as pr
from practicum.models.tokenizer import make_tokenizer
from practicum.teachers import shared_tokens
from practicum.teachers.shared_tokens import SharedTokens
from practicum.trainer.run_models import merge_runs
from report import report  # beside this file

HERE = Path(__file__).resolve().parent
LETTERS, LENGTHS = "abcde", (3, 5)
SETS = {"demo": ("copy", "reverse", "rotate"), "conflict": ("rising", "falling"), "tokenizer": ("reverse",)}
SETS["parts"] = SETS["tokenizer"]
"""Task sets. `conflict` sorts letters up or down; a third of its prompts don't say which. In `tokenizer` the
teacher's tokenizer joins some letters. `parts` changes the parts of that comparison one at a time."""
JOINED = ("ab", "bd", "cc", "da", "ec")
"""Pairs of letters that are one token of this teacher."""
MARKS = {"rising": "<", "falling": ">"}
UNMARKED = 1 / 3
"""Share of the prompts of `conflict` that both domains have alike: half of them can be right for both."""
MODEL = {"family": "qwen3", "hidden": 128, "layers": 4, "heads": 4, "context": 64}
RATES = dict.fromkeys(("mopd", "sft", "grpo"), (1e-4, 3e-4, 1e-3)) | {"control": (3e-5, 1e-4, 3e-4)}
"""Learning rates; each way takes its best one on `demo` with the seed TUNING, which is not reported."""
TUNING, LAGGING = 100, 0.95
"""A domain below this share of its specialist's headroom is merged again."""
Record = dict[str, Any]


class TimeIsOver(Exception):
    """`--minutes` are over, or a signal has come; the next run continues."""


class Lab:
    """One seed of one task set: its base, its specialists, and the runs that start from them."""

    def __init__(self, name: str, seed: int, folder: Path, quick: bool, until: float) -> None:
        self.domains, self.seed, self.quick, self.until = SETS[name], seed, quick, until
        self.joins = SETS[name] == SETS["tokenizer"]
        self.root = folder / ("tokenizer" if self.joins else name) / str(seed)
        self.tasks = self._conflict() if name == "conflict" else {d: _task(d) for d in self.domains}
        self.steps = 4 if quick else 40
        self.base = self._specialise()

    def _conflict(self) -> Record:
        """Write the rows of `conflict` and return its tasks."""
        self.root.mkdir(parents=True, exist_ok=True)
        draws, tasks = random.Random(0), {}
        words = ["".join(draws.choices(LETTERS, k=draws.randint(*LENGTHS))) for _ in range(2000)]
        words = list(dict.fromkeys(words))
        draws.shuffle(words)
        unmarked = {word for word in words if draws.random() < UNMARKED}
        for domain in SETS["conflict"]:
            for part, chosen in (("train", words[:-128]), ("eval", words[-128:])):
                answers = ["".join(sorted(w, reverse=domain == "falling")) for w in chosen]
                prompts = [w + ("=" if w in unmarked else MARKS[domain]) for w in chosen]
                rows = [{"prompt": p, "answer": a} for p, a in zip(prompts, answers, strict=True)]
                text = "".join(json.dumps(row) + "\n" for row in rows)
                (self.root / f"{domain}-{part}.jsonl").write_text(text)
            files = {"file": f"{domain}-train.jsonl", "eval_file": f"{domain}-eval.jsonl"}
            tasks[domain] = {key: str(self.root / file) for key, file in files.items()}
        return tasks

    def _specialise(self) -> Path:
        supervised = {"algorithm": {"loss": "supervised", "advantage": "none"}}
        start = {"model": {"random_init": MODEL}, "eval": {"rows": 128, "every": 5, "stop_at": 0.4}}
        train = {"steps": 60 if self.quick else 300, "prompts": 64, "lr": 1e-3, "warmup_steps": 10}
        base = self.train("base", train=train, **supervised, **start)
        if self.joins:
            known = {
                "model": {"path": str(self._joining(base))},
                "eval": {"rows": 128, "every": 5, "stop_at": 0.95},
            }
            self.train("reverse", train=train | {"steps": 8 if self.quick else 500}, **supervised, **known)
            return base
        for domain in self.domains:
            changes = {"model": {"path": str(base)}, "tasks": {domain: self.tasks[domain]}}
            changes["eval"] = {"rows": 128, "every": 5, "stop_at": 0.95}
            steps = {"steps": 40 if self.quick else 150, "prompts": 64, "lr": 5e-4}
            self.train(domain, train=steps, **supervised, **changes)
        return base

    def _joining(self, base: Path) -> Path:
        """Make a model from random weights whose tokenizer joins letters, and return its folder."""
        folder, tokenizer = self.root / "joining", make_tokenizer()
        vocabulary = tokenizer.get_vocab() | {pair: len(tokenizer) + i for i, pair in enumerate(JOINED)}
        core = Tokenizer(models.BPE(vocabulary, [(pair[0], pair[1]) for pair in JOINED], unk_token="<unk>"))
        core.decoder = decoders.Fuse()
        names = {name: str(getattr(tokenizer, name)) for name in ("pad_token", "eos_token", "unk_token")}
        joining = PreTrainedTokenizerFast(tokenizer_object=core, **names, clean_up_tokenization_spaces=False)
        joining.save_pretrained(folder)
        torch.manual_seed(self.seed)
        config = AutoConfig.from_pretrained(base / "export", vocab_size=len(vocabulary))
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    def rewarded(self, start: Path) -> Record:
        algorithm = {"advantage": "grpo", "loss": "ppo_clip", "entropy": 0.01}
        return {"model": {"path": str(start)}, "algorithm": algorithm, "rollout": {"samples": 4}}

    def train(self, name: str, **sections: Any) -> Path:
        """Train a run, unless it is there, and return its folder."""
        folder = self.root / name.replace(",", "").replace(" ", "-")
        if (folder / "export").is_dir():
            return folder
        if time.monotonic() > self.until:
            raise TimeIsOver
        shutil.rmtree(folder, ignore_errors=True)
        recipe: Record = {"name": folder.name, "seed": self.seed, "tasks": self.tasks, "out": str(folder)}
        recipe |= {"eval": {"rows": 128, "every": 5}} | sections
        recipe["rollout"] = {"max_new_tokens": 8} | sections.get("rollout", {})
        recipe["train"] = {"betas": [0.9, 0.95]} | sections["train"]
        recipe["runtime"] = {"threads": 1}
        clock = [time.process_time()]
        done = pr.train(recipe, quiet=True, on_step=lambda row: clock.append(time.process_time()))
        if done.interrupted:
            raise TimeIsOver
        spent = [after - before for before, after in pairwise(clock[1:])]  # the first row is an evaluation
        (folder / "processor.json").write_text(json.dumps(spent))
        return folder

    def teachers(self, **more: Any) -> Record:
        """Return the sections of a run that has a specialist as the teacher of each domain."""
        named = {domain: {"model": str(self.root / domain)} for domain in self.domains}
        return {"teachers": named, "route": {"by": "task"} if len(named) > 1 else {}, **more}

    def shared(self, name: str, lr: float, divergence: str, **more: Any) -> Path:
        distill = {"divergence": divergence, "signal": "shared"}
        distill |= {"top_k": 16} if divergence == "reverse_kl" else {}
        sections = self.teachers(
            model={"path": str(self.base)}, rollout={"samples": 2}, distill=distill, **more
        )
        train = {"steps": self.steps, "prompts": 48, "lr": lr}
        return self.train(name, train=train, reward={"weight": 0.0}, **sections)

    def mopd(self, name: str, lr: float, start: Path | None = None, steps: int = 0, **route: Any) -> Path:
        more = {"distill": {"divergence": "reverse_kl", "signal": "full"}, "reward": {"weight": 0.0}}
        sections = self.teachers(model={"path": str(start or self.base)}, rollout={"samples": 2}, **more)
        sections["route"] |= route
        return self.train(name, train={"steps": steps or self.steps, "prompts": 48, "lr": lr}, **sections)

    def sft(self, name: str, lr: float) -> Path:
        supervised = {"algorithm": {"loss": "supervised", "advantage": "none"}, "rollout": {"samples": 2}}
        sections = self.teachers(model={"path": str(self.base)}, **supervised)
        return self.train(name, train={"steps": self.steps, "prompts": 48, "lr": lr}, **sections)

    def control(self, name: str, lr: float) -> Path:
        return self.grpo(name, lr, stages=[f"{HERE / 'unlikely'}:unlikely"])

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
    mopd, sft, grpo, control = (rates[name] for name in RATES)

    def merged() -> Path:
        return lab.merge("merge", lab.specialists)

    if lab.joins:
        out, include = ({"stages": [f"{HERE / 'mismatched'}:{name}"]} for name in ("leave_out", "include"))
        return {
            "other tokenizer, top 16 of shared tokens": lambda: [lab.shared("top", mopd, "reverse_kl")],
            "other tokenizer, mismatches left out": lambda: [lab.shared("out", mopd, "k1_straight", **out)],
            "other tokenizer, mismatches included": lambda: [
                lab.shared("in", mopd, "k1_straight", **include)
            ],
        }
    rows: dict[str, Callable[[], list[Path]]] = {
        "uniform merge": lambda: [merged()],
        "MOPD": lambda: [lab.mopd("mopd", mopd)],
        "MOPD from the merge": lambda: [lab.mopd("from merge", mopd, merged())],
        "MOPD, merged again": lambda: lab.again(mopd),
        "SFT on right answers": lambda: [lab.sft("sft", sft)],
        "GRPO": lambda: [lab.grpo("grpo", grpo)],
        "no teacher (control)": lambda: [lab.control("control", control)],
    }
    shares = {domain: 1 / len(lab.domains) for domain in lab.domains}
    for balance in ("shares", "sigma", "update") if lab.domains == SETS["conflict"] else ("shares", "update"):
        targets = {} if balance == "sigma" else {"shares": shares}
        route = {"balance": balance, **targets}
        rows[f"MOPD, balance {balance}"] = lambda b=balance, r=route: [lab.mopd(f"mopd {b}", mopd, **r)]
    return rows


def parts_of(lab: Lab, rates: dict[str, float]) -> dict[str, Callable[[], list[Path]]]:
    """Return the rows of `parts`: the comparison over the top 16, and what it would be without its parts."""
    lr = rates["mopd"]

    def top(name: str, *, joined: bool = False, ends: bool = True) -> list[Path]:
        with ExitStack() as patches:
            if joined:
                patches.enter_context(patch.object(SharedTokens, "_would_join", lambda self, *tokens: False))
            if not ends:
                patches.enter_context(patch.object(shared_tokens, "end_token", lambda *args, **more: None))
            return [lab.shared(name, lr, "reverse_kl")]

    return {
        "top 16 of shared tokens": lambda: top("top"),
        "joined tokens too": lambda: top("top joined", joined=True),
        "without end tokens": lambda: top("top endless", ends=False),
        "joined tokens too, without end tokens": lambda: top("top neither", joined=True, ends=False),
        "sampled tokens, not shifted": lambda: [lab.shared("sampled", lr, "k1_straight")],
    }


def curve(lab: Lab, runs: list[Path]) -> list[Record]:
    """Return the scores over runs one after the other, with teacher tokens and seconds spent so far."""
    points, tokens, seconds = [], 0.0, 0.0
    for run in runs:
        if not (run / "metrics.jsonl").is_file():  # a model that nothing was trained for
            return [{"tokens": 0.0, "seconds": 0.0, "scores": lab.scores(run)}]
        spent = [0.0, *json.loads((run / "processor.json").read_text())]
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for row, processor in zip(rows, spent, strict=True):
            if any(name.startswith(("teacher/", "answers/")) for name in row):
                tokens += row["rollout/tokens"]
            if row["step"]:  # without the evaluation after the step
                seconds += processor * row["time/step"] / (row["time/step"] + row.get("time/eval", 0.0))
            scores = {domain: row.get(f"eval/greedy/{domain}") for domain in lab.domains}
            if None not in scores.values():
                points.append({"tokens": tokens, "seconds": round(seconds, 3), "scores": scores})
    return points


def tuned(lab: Lab) -> dict[str, float]:
    """Return the learning rate of each way with the best mean score, the lowest one of equals."""
    if lab.quick:
        return {way: rates[1] for way, rates in RATES.items()}
    best = {}
    for way, rates in RATES.items():
        means = {lr: fmean(lab.scores(getattr(lab, way)(f"{way} {lr:g}", lr)).values()) for lr in rates}
        best[way] = max(means, key=lambda lr: means[lr])
    return best


def run(sets: list[str], seeds: list[int], folder: Path, records: Path, quick: bool, until: float) -> None:
    """Make the records that are missing, seed by seed. Raise TimeIsOver where the time is over."""
    done = {(record["set"], record["seed"], record["row"]) for record in read(records)}
    file = folder / "rates.json"
    if not file.is_file():
        file.write_text(json.dumps(tuned(Lab("demo", seeds[0] if quick else TUNING, folder, quick, until))))
    rates = json.loads(file.read_text())
    for seed in seeds:
        for name in sets:
            lab = Lab(name, seed, folder, quick, until)
            rows = parts_of(lab, rates) if name == "parts" else rows_of(lab, rates)
            makers = {"base": None, "specialists": None, **rows}
            for row, make in makers.items():
                if (name, seed, row) in done:
                    continue
                if make is None:
                    models = {d: lab.base if row == "base" else lab.root / d for d in lab.domains}
                    scores = {domain: lab.scores(model)[domain] for domain, model in models.items()}
                    points = [{"tokens": 0.0, "seconds": 0.0, "scores": scores}]
                else:
                    points = curve(lab, make())
                record = {"set": name, "seed": seed, "row": row, "rates": rates, "points": points}
                with records.open("a") as lines:
                    lines.write(json.dumps(record) + "\n")
                last = points[-1]
                print(f"{name} seed {seed} {row}: {last['scores']}, {last['seconds']:.0f} s", flush=True)


def read(records: Path) -> list[Record]:
    return [json.loads(line) for line in records.read_text().splitlines()] if records.is_file() else []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "report"])
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--quick", action="store_true", help="one seed and few steps; nothing is written here"
    )
    parser.add_argument("--minutes", type=float, default=600, help="begin no other run after these")
    parser.add_argument("--folder", type=Path, default=Path("runs/many_teachers"))
    args = parser.parse_args()
    folder = (args.folder / "quick" if args.quick else args.folder).resolve()
    records = folder / "records.jsonl" if args.quick else HERE / "records.jsonl"
    if args.what == "run":
        folder.mkdir(parents=True, exist_ok=True)
        seeds, until = args.seeds[:1] if args.quick else args.seeds, time.monotonic() + 60 * args.minutes
        try:
            run(args.sets, seeds, folder, records, args.quick, until)
        except TimeIsOver:
            raise SystemExit("stopped: run it again to continue") from None
    text = report(read(records))
    if args.quick:
        print(text)
    else:
        fill(HERE / "README.md", text)


def fill(page: Path, text: str) -> None:
    before, _, rest = page.read_text().partition("<!-- results -->\n")
    page.write_text(f"{before}<!-- results -->\n{text}\n<!-- end -->{rest.partition('<!-- end -->')[2]}")


if __name__ == "__main__":
    main()

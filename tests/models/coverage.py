"""Try every family of `families.py` as a user would. Write the table of docs/models.md and README's count.

python -m tests.models.coverage               # all families, and write both pages
python -m tests.models.coverage llama mamba2  # these alone, printed
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers

import practicum as pr
from practicum.engines.protocol import Counter, GenerateRequest, ScoreRequest
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.errors import PracticumError
from practicum.models.experts import routes_of
from practicum.models.load_model import load_model
from practicum.models.tokenizer import make_tokenizer
from practicum.recipe.schema.recipe import Model
from tests.engines.engines import plain_logprobs, sampling
from tests.models.families import ATTENTION, FAMILIES, MOE, NEWER, REFUSED, STATE, tiny_family

PAGE, README = (Path(__file__).parents[2] / name for name in ("docs/models.md", "README.md"))
VISION = "qwen2_5_vl"
RECIPE: dict[str, Any] = {
    "seed": 3,
    "tasks": {"copy": {"kind": "copy", "options": {"length": [1, 2], "letters": 3}}},
    "algorithm": {"entropy": 0.05},
    "rollout": {"samples": 3, "max_new_tokens": 5, "max_num_seqs": 8, "context": 64},
    "train": {"steps": 2, "prompts": 3, "lr": 1e-3},
    "runtime": {"threads": 1},
}
FULL: dict[str, Any] = {"distill": {"signal": "full"}}
EVERY = [*ATTENTION, VISION, *MOE, *STATE, *NEWER, *REFUSED]
COLUMNS = ("GRPO", "distilled into", "teacher", "LoRA", "scores", "cached turns", "export")


class Family:
    """The tries of one family, in a folder; each returns nothing, or fails."""

    def __init__(self, name: str, folder: Path, teacher: Path) -> None:
        self.name, self.folder, self.other = name, folder / name, teacher
        self.gap = 0.0
        self.sees = name == VISION
        self.trained = self.folder if name in REFUSED else self.folder / "grpo" / "export"
        if self.sees:
            self.model: dict[str, Any] = {
                "random_init": {"family": VISION, "hidden": 32, "layers": 2, "heads": 2}
            }
        else:
            save(name, self.folder)
            self.model = {"path": str(self.folder)}

    def train(self, what: str, **sections: Any) -> Path:
        recipe = RECIPE | {"name": what, "model": self.model} | sections
        if self.sees:
            recipe["tasks"] = {"dots": {"kind": "dots", "options": {"size": [12, 24]}}}
        pr.check(recipe)
        out = self.folder / what

        def note(metrics: Any) -> None:
            self.gap = max(self.gap, float(metrics.get("train/gap_max", 0.0)))

        pr.train(recipe, out=out, quiet=True, on_step=note)
        return out

    def grpo(self) -> None:
        self.train("grpo")

    def distilled_into(self) -> None:
        self.train("into", teachers={"t": {"model": str(self.trained if self.sees else self.other)}}, **FULL)

    def teacher(self) -> None:
        student = self.model if self.sees else {"path": str(self.other)}
        self.train("from", model=student, teachers={"t": {"model": str(self.trained)}}, **FULL)

    def lora(self) -> None:
        self.train("lora", model=self.model | {"lora": {"rank": 2}})

    def scores(self) -> None:
        ids = [5, 9, 7, 11, 6, 4, 8, 12]
        model, engine = self.engine()
        try:
            scored = asyncio.run(engine.score(ScoreRequest(ids, 3))).logprobs
        finally:
            engine.close()
        close(model, ids[:3], torch.tensor(ids[3:]), scored)

    def cached_turns(self) -> None:
        model, engine = self.engine()
        routed = routes_of(model) is not None

        async def talk() -> tuple[list[int], Any]:
            first = await engine.generate(GenerateRequest([5, 9, 7], sampling(4), Counter(0, 0), keep=True))
            ids = [5, 9, 7, *first.tokens.tolist(), 6, 8]
            known = first.experts if routed else None
            request = GenerateRequest(ids, sampling(4), Counter(0, 0, 0, 1), experts=known, keep=True)
            return ids, await engine.generate(request)

        try:
            ids, second = asyncio.run(talk())
            assert engine.stats.reused_tokens
        finally:
            engine.close()
        close(model, ids, second.tokens, second.plain_logprobs)

    def export(self) -> None:
        """The exported folder has the weights of the last step, and loads in transformers."""
        auto = transformers.AutoModelForImageTextToText if self.sees else transformers.AutoModelForCausalLM
        own = auto.from_pretrained(self.trained, dtype=torch.float32)
        ours = load_model(Model(path=str(self.trained), dtype="float32"), 0)
        ids = torch.tensor([[5, 9, 7, 11]])
        torch.testing.assert_close(ours(ids, use_cache=False).logits, own(ids, use_cache=False).logits)

    def engine(self) -> tuple[Any, TorchEngine]:
        model = load_model(Model(**self.model, dtype="float32"), 0)
        return model, TorchEngine(model, slots=2, context=32)


def save(name: str, folder: Path) -> None:
    tokenizer = make_tokenizer()
    model = tiny_family(name, prepared=False, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def close(model: Any, prompt: list[int], tokens: torch.Tensor, found: torch.Tensor) -> None:
    expected = plain_logprobs(model, prompt, tokens).gather(1, tokens.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def tried(attempt: Callable[[], Any]) -> str:
    """Return yes, or why not."""
    try:
        attempt()
    except PracticumError as error:
        print(error, flush=True)
        return f"no: {str(error).splitlines()[0]}"
    except Exception as error:
        traceback.print_exc()
        return f"FAILED: {type(error).__name__}"
    return "yes"


def cover(name: str, folder: Path, other: Path) -> tuple[list[str], float]:
    """Return the cells of one family, and the largest gap of engine and learner."""
    family = Family(name, folder, other)
    attempts = (
        family.grpo, family.distilled_into, family.teacher, family.lora, family.scores, family.cached_turns,
        family.export,
    )  # fmt: skip
    if name not in REFUSED:
        return [tried(attempt) for attempt in attempts], family.gap
    # What trains and what teaches must both be refused.
    return [tried(attempt)[:3].rstrip(":") for attempt in attempts[:4]] + ["no"] * 3, 0.0


def layers_of(name: str) -> str:
    if name in REFUSED:
        why = {"llama4_text": "that counts positions by itself", "gemma4_text": "of different shapes"}
        return "attention " + why.get(name, "that can't be replaced")
    experts = "num_experts_per_tok" in FAMILIES.get(name, {})
    carries = name in STATE or not {"conv", "linear_attention"}.isdisjoint(
        FAMILIES.get(name, {}).get("layer_types", ())
    )
    kinds = [("a state", carries), ("experts", experts), ("images", name == VISION)]
    return ", ".join(kind for kind, has in kinds if has) or "attention"


def row(name: str) -> list[str]:
    """Return the cells of a family's line of the table."""
    with tempfile.TemporaryDirectory() as temporary:
        save("llama", other := Path(temporary) / "other")
        cells, gap = cover(name, Path(temporary), other)
    return [name, layers_of(name), *cells, "–" if name in REFUSED else f"{gap:.0e}" if gap else "0"]


def main(names: list[str]) -> None:
    rows = []
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        for cells in pool.map(row, names or EVERY):
            rows.append(cells)
            print(cells, flush=True)
    if names:
        return
    before, _, rest = PAGE.read_text().partition("<!-- begin -->\n")
    _, _, after = rest.partition("<!-- end -->")
    good = sum(all(cell == "yes" for cell in cells[2:-1]) for cells in rows)
    lines = [
        f"{good} of {len(rows)} families pass every try, with transformers {transformers.__version__}.\n",
        f"| family | layers | {' | '.join(COLUMNS)} | largest gap |",
        f"|{'---|' * (len(COLUMNS) + 3)}",
        *(f"| {' | '.join(cells)} |" for cells in rows),
    ]
    PAGE.write_text("\n".join([f"{before}<!-- begin -->", *lines, f"<!-- end -->{after}"]))
    README.write_text(re.sub(r"\d+ of \d+ families", f"{good} of {len(rows)} families", README.read_text()))


if __name__ == "__main__":
    assert set(sys.argv[1:]) <= {*FAMILIES, VISION}, "no such family"
    main(sys.argv[1:])

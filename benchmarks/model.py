"""The models that contenders get: a tiny Qwen3 taught to sort until it stops by itself, and its teachers."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from practicum.models.load_model import make_model
from practicum.models.tokenizer import make_tokenizer
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.recipe import MakeModel
from practicum.recipe.shipped import shipped_recipes
from practicum.tasks.builtin import bind
from practicum.tasks.procedural import Example
from practicum.trainer.run import train_loaded

CACHE = Path(__file__).parent / ".cache"
DIGITS = (6, 18)
"""How many digits there are to sort in training; a prompt is `sort:` + digits + `=`."""
STEPS, ROWS, PEAK_LR = 160, 48, 1e-3
MORE_STEPS, MORE_DIGITS = 120, (6, 20)
"""Of the teacher: the taught model, taught on."""
IGNORED = -100


def model_folder(*, hybrid: bool = False) -> Path:
    """The taught model in HuggingFace format; made on first use, then kept. A hybrid's every other layer is a
    gated delta rule."""
    folder = CACHE / f"{'hybrid-' if hybrid else ''}sorter-{DIGITS[0]}-{DIGITS[1]}-{STEPS}x{ROWS}"
    if not (folder / "model.safetensors").exists():
        tokenizer = make_tokenizer()
        model = _make_hybrid(tokenizer) if hybrid else make_random_model(tokenizer)
        save(folder, teach(model, tokenizer, _sorting(0, DIGITS), STEPS), tokenizer)
    return folder


def teacher_folder() -> Path:
    """The same model taught on, by which it sorts better."""
    folder = CACHE / f"{model_folder().name}-taught-on-{MORE_STEPS}"
    if not (folder / "model.safetensors").exists():
        tokenizer = make_tokenizer()
        model = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32)
        save(folder, teach(model, tokenizer, _sorting(STEPS * ROWS, MORE_DIGITS), MORE_STEPS), tokenizer)
    return folder


def demo_folder(copy: str = "export") -> Path:
    """The demo's base model, as `practicum demo` makes it; `copy` names a folder with the same weights."""
    folder = CACHE / "demo-base"
    if not (folder / "export" / "model.safetensors").exists():
        train_loaded(load_recipe(shipped_recipes() / "mopd" / "base.yaml"), folder, fresh=True, quiet=True)
    if not (folder / copy / "model.safetensors").exists():
        shutil.copytree(folder / "export", folder / copy, dirs_exist_ok=True)
    return folder / copy


def random_folder(width: int, layers: int) -> Path:
    """A model with random weights, for what depends on its size alone."""
    folder = CACHE / f"random-{width}-{layers}"
    if not (folder / "model.safetensors").exists():
        tokenizer = make_tokenizer()
        save(folder, make_random_model(tokenizer, width, layers), tokenizer)
    return folder


def save(folder: Path, model: PreTrainedModel, tokenizer: Any) -> None:
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def make_random_model(tokenizer: Any, width: int = 256, layers: int = 4) -> PreTrainedModel:
    """About 4M parameters if not told otherwise; heads of 64, half as many of them for keys and values."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _make_hybrid(tokenizer: Any) -> PreTrainedModel:
    """Return a Qwen3.5 of the same width and depth."""
    sizes = {"family": "qwen3_5", "hidden": 256, "layers": 4, "heads": 4, "context": 256}
    return make_model(MakeModel.model_validate(sizes), tokenizer, seed=0)


def examples(split_seed: int, start: int, count: int, digits: tuple[int, int]) -> list[Example]:
    """Sorting tasks with as many digits; a function of the arguments."""
    task = bind("sort", "sort", {"length": list(digits)})
    return [task.example(split_seed, "train", start + i) for i in range(count)]


def _sorting(start: int, digits: tuple[int, int]) -> Callable[[int], list[Example]]:
    """Demonstrations of each step, from number `start` on."""
    return lambda step: examples(0, start + step * ROWS, ROWS, digits)


def teach(
    model: PreTrainedModel, tokenizer: Any, demonstrations: Callable[[int], list[Example]], steps: int
) -> PreTrainedModel:
    """Supervised on the demonstrations of each step, with a short warm-up and a linear decay."""
    torch.set_num_threads(1)  # the same weights whatever the machine; faster, if it is busy
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, weight_decay=0.0)
    began = time.perf_counter()
    for step in range(steps):
        rate = min((step + 1) / 20, (steps - step) / steps)
        optimizer.param_groups[0]["lr"] = PEAK_LR * rate
        ids_BT, labels_BT = _padded(tokenizer, demonstrations(step))
        logits_BTV = model(input_ids=ids_BT).logits[:, :-1]
        loss = cross_entropy(logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 40 == 0 or step == steps - 1:
            spent = time.perf_counter() - began
            print(f"teaching: step {step} loss {loss.item():.3f} {spent:.0f} s", file=sys.stderr)
    return model.eval()


def _padded(tokenizer: Any, rows: list[Example]) -> tuple[Tensor, Tensor]:
    """Right-padded ids, and labels on the answers only. Right padding needs no attention mask."""
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    ids: list[Tensor] = []
    labels: list[Tensor] = []
    for row in rows:
        asked, answered = tokenizer.encode(row.prompt), [*tokenizer.encode(row.answer), eos]
        ids.append(torch.tensor(asked + answered))
        labels.append(torch.tensor([IGNORED] * len(asked) + answered))
    padded = torch.nn.utils.rnn.pad_sequence
    return padded(ids, batch_first=True, padding_value=pad), padded(
        labels, batch_first=True, padding_value=IGNORED
    )

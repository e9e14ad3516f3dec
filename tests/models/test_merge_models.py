"""Merges of models and adapters of one base, against sums by hand and against PEFT."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from practicum.errors import PracticumError
from practicum.models.adapter_files import write_adapter
from practicum.models.load_model import load_model
from practicum.models.lora import base_fingerprint, is_adapter
from practicum.recipe.schema.recipe import Lora, Model
from practicum.trainer.run_folder import RunFolder
from practicum.trainer.run_models import merge_runs
from tests.teachers.tiny_teachers import save_teacher

IDS = torch.arange(4, 20)[None]


def weights(folder: str | Path) -> dict[str, Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_teacher(tmp_path_factory.mktemp("base") / "base", seed=1)


def save_adapter(base: str, folder: Path, seed: int, **lora: object) -> str:
    """An adapter of the base with random matrices."""
    model = load_model(Model(path=base, device="cpu", lora=Lora.model_validate(lora)), seed)
    torch.manual_seed(seed)
    trained = {n: torch.randn_like(p) * 0.1 for n, p in model.named_parameters() if is_adapter(n)}
    write_adapter(folder, model, trained, base_fingerprint(model))
    return str(folder)


def test_models_are_merged_by_their_changes(base: str, tmp_path: Path) -> None:
    others = [save_teacher(tmp_path / f"model{seed}", seed=seed) for seed in (2, 3)]
    merge_runs(others, tmp_path / "merged", [0.8, 0.5], base=base)
    start, one, two, merged = (weights(x) for x in (base, *others, tmp_path / "merged"))
    for name, x in merged.items():
        by_hand = start[name] + 0.8 * (one[name] - start[name]) + 0.5 * (two[name] - start[name])
        torch.testing.assert_close(x, by_hand, rtol=0, atol=1e-6)
    assert (tmp_path / "merged" / "tokenizer.json").is_file()


def test_adapters_are_merged_by_joining_their_ranks(base: str, tmp_path: Path) -> None:
    one = save_adapter(base, tmp_path / "one", 1, rank=2, alpha=8, targets=["q_proj", "v_proj"])
    two = save_adapter(base, tmp_path / "two", 2, rank=4, alpha=4, targets=["v_proj", "down_proj"])
    merge_runs([one, two], tmp_path / "merged", [0.7, 1.5], base=base)
    start = weights(base)
    whole = [AutoModelForCausalLM.from_pretrained(base) for _ in range(2)]
    changed = [
        PeftModel.from_pretrained(m, x).merge_and_unload() for m, x in zip(whole, (one, two), strict=True)
    ]
    deltas = [{n: x - start[n] for n, x in model.state_dict().items()} for model in changed]
    for name, x in weights(tmp_path / "merged").items():
        by_hand = start[name] + 0.7 * deltas[0][name] + 1.5 * deltas[1][name]
        torch.testing.assert_close(x, by_hand, rtol=0, atol=1e-5)
    joined = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "merged" / "adapter"
    )
    assert joined.peft_config["default"].to_dict()["r"] == 6
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(logits(joined), found, rtol=0, atol=1e-4)
    assert not torch.allclose(found, logits(AutoModelForCausalLM.from_pretrained(base)), atol=1e-2)


def test_the_base_is_the_one_that_the_runs_began_with(base: str, tmp_path: Path) -> None:
    runs = [tmp_path / "a", tmp_path / "b"]
    for seed, run in enumerate(runs, start=2):
        RunFolder(run).replace(f"model: {{path: {base}}}\n")
        save_teacher(run / "export", seed=seed)
    assert merge_runs([str(runs[0]), str(runs[1] / "export")], tmp_path / "merged") == str(
        Path(base).resolve()
    )
    one, two, merged = (weights(x) for x in (*(run / "export" for run in runs), tmp_path / "merged"))
    for name, x in merged.items():
        torch.testing.assert_close(x, (one[name] + two[name]) / 2, rtol=0, atol=1e-6)


def test_no_common_base_is_refused(base: str, tmp_path: Path) -> None:
    other = save_teacher(tmp_path / "other", seed=5)
    wide = save_teacher(tmp_path / "wide", seed=5, hidden=48)
    with pytest.raises(PracticumError, match="--base"):
        merge_runs([base, other], tmp_path / "merged")
    with pytest.raises(PracticumError, match="--base"):
        merge_runs([wide, other], tmp_path / "merged", base=base)
    one = save_adapter(base, tmp_path / "one", 1, rank=2)
    two = save_adapter(other, tmp_path / "two", 2, rank=2)
    with pytest.raises(PracticumError):
        merge_runs([one, two], tmp_path / "merged", base=base)
    with pytest.raises(PracticumError):  # adapters of one base, on another of the same shape
        merge_runs([one, one], tmp_path / "merged", base=other)
    with pytest.raises(PracticumError, match="--weight"):
        merge_runs([one, one], tmp_path / "merged", [1.0], base=base)
    assert not (tmp_path / "merged").exists()

"""Models written from their weights and a description are those that transformers writes itself."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from practicum.models.load_model import load_model, load_tokenizer
from practicum.models.model_files import save_description, write_model
from practicum.models.processor import load_processor
from practicum.recipe.schema.recipe import MakeModel, Model


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3", "float32"),
        ("qwen3", "bfloat16"),
        ("gpt2", "float32"),
        ("qwen3_moe", "float32"),
        ("qwen2_5_vl", "float32"),
    ],
)
def test_a_model_is_written_as_it_writes_itself(tmp_path: Path, family: str, dtype: str):
    make = MakeModel(family=family, hidden=32, layers=2, heads=2, context=64)  # pyright: ignore
    spec = Model(random_init=make, dtype=dtype, device="cpu")  # pyright: ignore
    model, tokenizer = load_model(spec, seed=1), load_tokenizer(spec)
    save_description(tmp_path / "description", model, tokenizer, load_processor(spec, tokenizer))
    kept = set(model.state_dict())
    weights = dict(model.named_parameters()) | {n: x for n, x in model.named_buffers() if n in kept}
    write_model(tmp_path / "description", {n: x.detach() for n, x in weights.items()}, tmp_path / "written")
    model.save_pretrained(tmp_path / "own")
    assert (tmp_path / "own/config.json").read_text() == (tmp_path / "written/config.json").read_text()
    own, written = (load_file(tmp_path / name / "model.safetensors") for name in ("own", "written"))
    assert own.keys() == written.keys()
    assert all(own[n].dtype == written[n].dtype and torch.equal(own[n], written[n]) for n in own)
    assert load_processor(Model(path=str(tmp_path / "written")), tokenizer) is None or family == "qwen2_5_vl"
    load_model(Model(path=str(tmp_path / "written"), device="cpu"), seed=1)

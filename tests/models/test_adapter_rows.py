"""Several adapters on one base: each row is scored as by its adapter merged into a model of its own."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedModel

from practicum.cpu.adapter_rows import RowPart
from practicum.engines.protocol import ScoreOptions, ScoreRequest, Scores
from practicum.engines.torch.model_runner import ModelRunner
from practicum.engines.torch.request_queue import ScoreJob
from practicum.engines.torch.score_batch import adapter_parts, score_batch
from practicum.errors import RecipeError
from practicum.models.adapter_files import SavedAdapter, write_adapter
from practicum.models.lora import add_adapter, bare_base, base_fingerprint, merged_weights, put_adapters
from practicum.models.offloaded_weights import named_tensors
from practicum.recipe.schema.recipe import Lora
from tests.learning.reference import FAMILIES, tiny, with_adapter

LORAS: dict[str, dict[str, Any]] = {
    "small": {"rank": 2, "alpha": 4.0},
    "large": {"rank": 5, "alpha": 3.0},
    "few": {"targets": ["q_proj", "v_proj"]},
}
OPTIONS = ScoreOptions(top_k=3, hidden=True, temperature=0.7)


def loras(family: str) -> dict[str, dict[str, Any]]:
    """PEFT wants all adapters to be on the same stacks of experts, or on none."""
    few = {"gpt2": ["c_attn"], "qwen3_moe": "all"}.get(family, LORAS["few"]["targets"])
    return LORAS | {"few": {"targets": few}}


def adapted(family: str, dtype: torch.dtype, lora: dict[str, Any], scale: float) -> PreTrainedModel:
    """The tiny model with an adapter of its own."""
    model = with_adapter(tiny(family, dtype), **lora)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data *= scale
    return model


def saved(folder: Path, model: PreTrainedModel) -> SavedAdapter:
    folder.mkdir(parents=True)
    write_adapter(folder, model, named_tensors(model), base_fingerprint(model))
    return SavedAdapter.read(str(folder), "teachers.t.adapter")


def rows(adapters: Sequence[str | None]) -> list[ScoreJob]:
    """Rows of adapters in turn, some with the same prompt; some of one token."""
    g = torch.Generator().manual_seed(1)
    jobs = []
    for i in range(3 * len(adapters)):
        prompt = torch.arange(1 + i % 4) + i % 2
        answer = torch.randint(0, 19, (1 + (5 * i) % 7,), generator=g)
        ids = torch.cat([prompt, answer]).tolist()
        request = ScoreRequest(ids, len(prompt), str(i), adapter=adapters[i % len(adapters)])
        jobs.append(ScoreJob(request, OPTIONS))
    return jobs


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_moe"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_rows_of_several_adapters_are_scored_as_by_merged_models(
    tmp_path: Path, family: str, dtype: torch.dtype, tolerance: float
):
    models = {n: adapted(family, dtype, lora, 1 + i) for i, (n, lora) in enumerate(loras(family).items())}
    shared = bare_base(models["small"])
    held = {id(p) for p in models["small"].parameters()}
    assert all(id(p) in held for p in shared.parameters()), "the base is the student's own in memory"
    put_adapters(shared, {name: saved(tmp_path / name, m) for name, m in models.items()}, "the base")
    runner = ModelRunner(shared)
    whole: dict[str | None, PreTrainedModel] = {None: tiny(family, dtype)}
    for name, model in models.items():
        whole[name] = tiny(family, dtype)
        whole[name].load_state_dict(dict(merged_weights(model)), strict=False)
    jobs, runners = rows([*models, None]), {name: ModelRunner(model) for name, model in whole.items()}
    with torch.no_grad():
        together = score_batch(runner, jobs, 0)
        for job, got in zip(jobs, together, strict=True):
            alone = ScoreJob(ScoreRequest(job.request.ids, job.request.start), OPTIONS)
            (expected,) = score_batch(runners[job.request.adapter], [alone], 0)
            # An engine gives numbers in single precision.
            close(got, expected, max(tolerance, 1e-6))
            if dtype == torch.float32:
                (again,) = score_batch(runner, [job], 0)
                close(got, again, 0.0)
        if dtype == torch.float64:
            close_logits(runner, whole, [*models, None], tolerance)


def close(one: Scores, other: Scores, tolerance: float) -> None:
    for field in ("logprobs", "topk_logprobs", "hidden"):
        torch.testing.assert_close(getattr(one, field), getattr(other, field), rtol=0, atol=tolerance)


def close_logits(runner: ModelRunner, whole: dict, adapters: list[str | None], tolerance: float) -> None:
    ids = torch.arange(12).unsqueeze(0) % 19
    for name in adapters:
        assert runner.adapters is not None
        with runner.adapters.use([RowPart(name, 0, 12)] if name else []):
            got = runner.model(input_ids=ids, use_cache=False).logits
        expected = whole[name](input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def test_parts_are_the_rows_of_each_adapter():
    rows = [("", 2), ("a", 3), ("a", 1), ("b", 0), ("a", 2), ("b", 4), ("", 1)]
    assert adapter_parts(rows) == [RowPart("a", 2, 8), RowPart("b", 8, 12)]
    assert adapter_parts([("", 5)]) == []


def test_an_adapter_in_single_precision_is_added_to_a_base_in_half(tmp_path: Path):
    model = adapted("llama", torch.bfloat16, LORAS["small"], 1.0)
    own = saved(tmp_path / "a", model)
    shared = bare_base(model)
    put_adapters(shared, {"a": own}, "the base")
    jobs = rows(["a"])
    plain = [ScoreJob(ScoreRequest(job.request.ids, job.request.start), OPTIONS) for job in jobs]
    with torch.no_grad():
        got, expected = score_batch(ModelRunner(shared), jobs, 0), score_batch(ModelRunner(model), plain, 0)
    for one, other in zip(got, expected, strict=True):
        close(one, other, 0.0)


def test_adapters_that_do_not_fit_are_refused_before_they_are_loaded(tmp_path: Path):
    model = adapted("llama", torch.float32, LORAS["small"], 1.0)
    own, bare = saved(tmp_path / "a", model), bare_base(model)

    def refused(words: str, base: PreTrainedModel = bare, adapter: SavedAdapter = own) -> None:
        before = [name for name, _ in base.named_modules()]
        with pytest.raises(RecipeError, match=words):
            put_adapters(base, {"a": adapter}, "runs/base")
        assert [name for name, _ in base.named_modules()] == before, "the base stays as it was"

    other = copy.deepcopy(bare)
    with torch.no_grad():
        other.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 3] += 1.0
    refused(r"(?s)teachers\.t\.adapter.*trained on another base .*runs/base.*set teachers\.t\.model", other)
    (own.folder / "practicum.json").unlink()
    unknown = SavedAdapter.read(str(own.folder), "teachers.t.adapter")
    refused(r"another base: h.*|model\.layers.* is missing there", tiny("gpt2", torch.float32), unknown)
    config = json.loads((own.folder / "adapter_config.json").read_text())
    (own.folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj"]}))
    refused(r"not of one adapter", bare, SavedAdapter.read(str(own.folder), "teachers.t.adapter"))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3"),
        ({"use_dora": True}, "use_dora True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights pissa"),
        ("head", r"weights of lm_head"),
        ("cut", r"(?s)adapter_model\.safetensors, .*a complete LoRA adapter"),
        ("garbled", r"(?s)adapter_config\.json, .*a complete LoRA adapter"),
        ("another", r"(?s)a full model: set teachers\.t\.model to it"),
        ("missing", r"^teachers\.t\.adapter: found .*adapter_config\.json"),
    ],
)
def test_adapters_of_other_kinds_and_damaged_ones_are_refused(tmp_path: Path, damage: Any, words: str):
    own = saved(tmp_path / "a", adapted("llama", torch.float32, LORAS["small"], 1.0))
    config, weights = (own.folder / name for name in ("adapter_config.json", "adapter_model.safetensors"))
    if isinstance(damage, dict):
        config.write_text(json.dumps(json.loads(config.read_text()) | damage))
    elif damage == "head":
        more = {f"base_model.model.lm_head.lora_{x}.weight": torch.zeros(2, 2) for x in "AB"}
        save_file(load_file(weights) | more, weights)
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif damage == "garbled":
        config.write_text("{")
    else:
        config.unlink()
        if damage == "another":
            (own.folder / "config.json").write_text("{}")
    with pytest.raises(RecipeError, match=words):
        SavedAdapter.read(str(own.folder), "teachers.t.adapter")


def test_adapters_are_reported_apart_by_what_they_do(tmp_path: Path):
    model = adapted("llama", torch.float32, LORAS["small"], 1.0)
    one, same = saved(tmp_path / "a", model), saved(tmp_path / "b", model)
    other = saved(tmp_path / "c", adapted("llama", torch.float32, LORAS["small"], 2.0))
    scaled = saved(tmp_path / "d", adapted("llama", torch.float32, LORAS["small"] | {"alpha": 5.0}, 1.0))
    assert one.fingerprint == same.fingerprint
    assert len({one.fingerprint, other.fingerprint, scaled.fingerprint}) == 3


def test_merged_weights_have_the_buffers_that_models_save():
    sizes: Any = {"vocab_size": 19, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "first_k_dense_replace": 1}
    sizes |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    sizes |= {"v_head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 1}
    sizes |= {"topk_group": 1, "num_experts_per_tok": 2}
    model = AutoModelForCausalLM.from_config(DeepseekV3Config(**sizes))
    bias = next(name for name, _ in model.named_buffers() if name.endswith("e_score_correction_bias"))
    model.get_buffer(bias).fill_(0.5)
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    add_adapter(model, Lora(rank=2, targets=["o_proj"]), seed=0)
    merged = dict(merged_weights(model))
    assert merged.keys() == plain.keys()
    assert all(torch.equal(merged[name], plain[name]) for name in plain)

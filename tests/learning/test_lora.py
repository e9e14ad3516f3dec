"""Adapters: they start without effect, learn what autograd says, and leave their base as it was."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from practicum.engines.torch.model_runner import ModelRunner, StepInputs
from practicum.errors import PracticumError, RecipeError
from practicum.learning.learner import Learner
from practicum.learning.learner_checkpoint import read_weights
from practicum.learning.logprobs import LogprobScorer
from practicum.learning.packed_model import PackedModel
from practicum.learning.update_batch import UpdateBatch
from practicum.learning.value_learner import ValueLearner
from practicum.models.attention import packed_forward
from practicum.models.lora import (
    adapter_off,
    add_adapter,
    base_fingerprint,
    find_targets,
    is_adapter,
    merged_weights,
)
from practicum.models.packed_attention import PackedLayout
from practicum.models.tokenizer import make_tokenizer
from practicum.recipe.schema.algorithm_sections import Algorithm, CriticSection, Kl
from practicum.recipe.schema.recipe import Lora, Train

from .distilled import taught, teaching
from .reference import (
    FAMILIES,
    adapted,
    random_batch,
    reference_update,
    take,
    tiny,
    with_adapter,
    with_padding,
    with_shared_beginnings,
)
from .test_update import LOSSES, algorithm
from .test_vision import seeing, vision_batch
from .updates import assert_same, learn

TRAIN = Train(lr=0.01, optimizer="tests.learning.optimizers:steady", weight_decay=0.1, max_grad_norm=0.5)
IDS = torch.arange(12).unsqueeze(0) % 19


def logits_of(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def rows_of(batch: UpdateBatch) -> dict[str, Any]:
    return {"prompt_ids": batch.prompt_ids, "response_ids": batch.response_ids, "temperature": 0.7}


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_moe"])
def test_a_new_adapter_changes_no_bit_and_is_all_that_is_trained(family: str):
    plain = tiny(family, torch.float32)
    model = adapted(family, torch.float32, fresh=True)
    assert torch.equal(logits_of(model), logits_of(plain))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if is_adapter(name)}
    kept = [n for n, _ in model.named_modules() if n.endswith(("lm_head", "embed_tokens", "wte", "mlp.gate"))]
    assert kept
    assert not any(name.startswith(f"{one}.") for name in trained for one in kept)
    merged = {name: x.shape for name, x in merged_weights(model)}
    assert merged == {name: p.shape for name, p in plain.named_parameters()}


def test_a_vision_model_is_adapted_in_its_text_layers_alone():
    plain, model = seeing(torch.float32), with_adapter(copy.deepcopy(seeing(torch.float32)), fresh=True)
    assert torch.equal(logits_of(model), logits_of(plain))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 7 * 2  # A and B of seven layers in each of two
    assert all("language_model.layers" in name for name in trained)


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_moe"])
def test_gradients_are_those_of_the_merged_weights(family: str):
    model, plain = adapted(family), tiny(family)
    merged = {name: x.requires_grad_() for name, x in merged_weights(model)}
    weigh = torch.randn(12, 19, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (functional_call(plain, merged, (IDS,), {"use_cache": False}).logits[0] * weigh).sum().backward()
    (model(input_ids=IDS, use_cache=False).logits[0] * weigh).sum().backward()
    for name, down in model.named_parameters():
        if ".lora_A." not in name:
            continue
        up = model.get_parameter(name.replace(".lora_A.", ".lora_B."))
        of = name.partition(".lora_A.")[0].replace(".base_layer", "")
        grads = [x.grad for n, x in merged.items() if n.startswith(f"{of}.") and x.dim() > 1]
        # An expert's layer has two weights, which differ in their widths.
        (grad,) = [g for g in grads if g is not None and {*g.shape[-2:]} == {down.shape[1], up.shape[0]}]
        a, b = (x.detach().requires_grad_() for x in (down, up))
        (_delta(a, b, grad, turned=family == "gpt2") * grad).sum().backward()
        for mine, theirs in ((down.grad, a.grad), (up.grad, b.grad)):
            assert theirs is not None
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9 * float(theirs.abs().max() + 1))


def _delta(down: Tensor, up: Tensor, like: Tensor, *, turned: bool) -> Tensor:
    """B A, the scaling being 1; one product for each expert, whose columns of B lie apart by their number."""
    if like.dim() == 3:
        experts = len(like)
        parts = down.reshape(experts, -1, down.shape[-1])
        return torch.stack([up[:, i::experts] @ parts[i] for i in range(experts)])
    return (up @ down).t() if turned else up @ down


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_moe"])
def test_an_update_is_the_plain_one_under_any_split_and_padding(family: str, monkeypatch: pytest.MonkeyPatch):
    model, batch, softmax = adapted(family), with_shared_beginnings(random_batch(0)), torch.softmax
    for module in (
        functional,
        torch,
    ):  # routers weigh in single precision, in which each split rounds otherwise
        monkeypatch.setattr(module, "softmax", lambda x, dim, dtype=None: softmax(x, dim, dtype=x.dtype))
    algorithm = Algorithm(loss="ppo_clip", entropy=0.1, kl=Kl(place="loss", coefficient=0.1))
    whole, _ = learn(model, batch, TRAIN, algorithm)
    assert all(map(is_adapter, whole.grads))
    if family != "qwen3_moe":  # whose own forward takes other experts at ties
        assert_same(whole, reference_update(model, batch, TRAIN, algorithm), 1e-9)
    for other, budget in ((batch, 20), (with_padding(batch, [0, 3, len(batch.sessions)]), 30)):
        assert_same(learn(model, other, TRAIN, algorithm, budget=budget)[0], whole, 1e-9)
    order = list(reversed(range(len(batch.sessions))))
    recomputed = TRAIN.model_copy(update={"gradient_checkpointing": True})
    assert_same(learn(model, take(batch, order), recomputed, algorithm, budget=25)[0], whole, 1e-9)


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "ppo_clip"])
def test_every_loss_updates_the_adapter_as_the_plain_one_does(loss: str):
    model, batch = adapted("qwen3"), with_shared_beginnings(random_batch(0))
    expected = reference_update(model, batch, TRAIN, algorithm(loss))
    assert_same(learn(model, batch, TRAIN, algorithm(loss), budget=30)[0], expected, 1e-9)


@pytest.mark.parametrize(
    ("divergence", "signal"),
    [("k2", "sampled"), ("reverse_kl", "top_k"), ("jsd", "top_k"), ("forward_kl", "full")],
)
def test_teachers_teach_an_adapter_as_they_teach_the_merged_model(divergence: Any, signal: Any):
    model, batch = adapted("qwen3"), taught(random_batch(0))
    how = teaching(divergence, signal)
    merged = tiny("qwen3")
    merged.load_state_dict(dict(merged_weights(model)), strict=False)
    whole, metrics = learn(model, batch, TRAIN, Algorithm(), teaching=how)
    _, expected = learn(merged, batch, TRAIN, Algorithm(), teaching=how)
    assert all(map(is_adapter, whole.grads))
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-9)
    assert_same(learn(model, batch, TRAIN, Algorithm(), teaching=how, budget=12)[0], whole, 1e-9)


@pytest.mark.long
def test_pictures_are_learnt_from_under_any_split():
    model = with_adapter(copy.deepcopy(seeing()))
    whole, _ = learn(model, vision_batch(), TRAIN, Algorithm(loss="ppo_clip"))
    assert_same(learn(model, vision_batch(), TRAIN, Algorithm(loss="ppo_clip"), budget=12)[0], whole, 1e-9)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_reference_is_the_start_bit_for_bit_after_updates(family: str):
    batch = random_batch(0)
    start = LogprobScorer(PackedModel(tiny(family, torch.float32), TRAIN)).logprobs(**rows_of(batch))
    learner = Learner(adapted(family, torch.float32, fresh=True), TRAIN, Algorithm())
    assert torch.equal(learner.scorer.logprobs(**rows_of(batch)).values, start.values)
    for seed in range(2):
        learner.update(random_batch(seed))
    reference = LogprobScorer(learner.trunk, adapter=False)
    assert torch.equal(reference.logprobs(**rows_of(batch)).values, start.values)
    assert not torch.equal(learner.scorer.logprobs(**rows_of(batch)).values, start.values)


def test_bfloat16_weights_have_an_adapter_in_single_precision_and_stay_as_they_are():
    plain = tiny("llama", torch.bfloat16)
    learner = Learner(adapted("llama", torch.bfloat16, fresh=True), TRAIN, Algorithm())
    assert {p.dtype for p in learner.stepper.parameters} == {torch.float32}
    learner.update(random_batch(0))
    with adapter_off(learner.model):
        assert torch.equal(logits_of(learner.model), logits_of(plain))
    wide = dict(merged_weights(tiny_like(learner.model)))
    for name, merged in merged_weights(learner.model):
        assert merged.dtype == torch.bfloat16
        assert torch.equal(merged, wide[name].to(torch.bfloat16))


def tiny_like(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in single precision, to merge in."""
    return copy.deepcopy(model).float()


def test_a_checkpoint_is_the_adapter_and_continues_to_the_bit(tmp_path: Path):
    def learner(seed: int = 0) -> Learner:
        return Learner(adapted(dtype=torch.float32, seed=seed, fresh=True), TRAIN, Algorithm())

    whole, first, second = learner(), learner(), learner()
    for seed in range(3):
        whole.update(random_batch(seed))
    first.update(random_batch(0))
    first.save(tmp_path)
    assert read_weights(tmp_path).keys() == {n for n, _ in first.model.named_parameters() if is_adapter(n)}
    second.load(tmp_path)
    for seed in (1, 2):
        second.update(random_batch(seed))
    assert second.version == 3
    mine, theirs = dict(second.named_weights()), dict(whole.named_weights())
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    with pytest.raises(PracticumError, match=r"trained on another base"):
        learner(seed=5).load(tmp_path)
    full = Learner(tiny(dtype=torch.float32), TRAIN, Algorithm())
    with pytest.raises(PracticumError, match=r"model\.lora"):
        full.load(tmp_path)


def test_a_base_is_known_in_any_number_type_and_by_any_weight():
    model = tiny(dtype=torch.bfloat16)
    own = base_fingerprint(model)
    assert base_fingerprint(tiny(dtype=torch.bfloat16).float()) == own
    assert base_fingerprint(adapted(dtype=torch.bfloat16)) == own
    weight = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    weight.data[17, 3] *= 1.01
    assert base_fingerprint(model) != own


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_exports_are_read_by_peft_and_by_transformers(tmp_path: Path, family: str):
    learner = Learner(adapted(family, torch.float32, targets="all"), TRAIN, Algorithm())
    learner.export(tmp_path / "export", make_tokenizer())
    tiny(family, torch.float32).save_pretrained(tmp_path / "base")
    expected = logits_of(learner.model)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    torch.testing.assert_close(logits_of(merged), expected, rtol=0, atol=2e-4)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    peft = PeftModel.from_pretrained(base, str(tmp_path / "export" / "adapter"))
    torch.testing.assert_close(logits_of(peft), expected, rtol=0, atol=2e-4)  # pyright: ignore
    assert not torch.allclose(expected, logits_of(tiny(family, torch.float32)), atol=0.05)
    origin = json.loads((tmp_path / "export" / "adapter" / "practicum.json").read_text())
    assert origin == {"base": base_fingerprint(tiny(family, torch.float32))}


def test_the_critic_has_its_own_adapter_on_the_same_base():
    student = adapted(dtype=torch.float32)
    critic = ValueLearner(student, TRAIN, CriticSection())
    own = dict(critic.model["base"].named_parameters())
    for name, p in student.base_model.named_parameters():
        assert (own[name].data_ptr() == p.data_ptr()) == (not is_adapter(name))
    assert {id(p) for p in critic.stepper.parameters} == {
        id(p) for name, p in critic.model.named_parameters() if is_adapter(name) or name.startswith("head")
    }


@pytest.mark.parametrize("rank", [1, 3, 8, 32])
def test_the_engine_computes_adapters_lean_and_whatever_else_is_in_the_batch(rank: int):
    model = adapted("llama", torch.float32, rank=rank)
    runner = ModelRunner(model)
    assert runner.lean is not None
    assert runner.invariant
    ids, lengths = torch.arange(20) % 19, [7, 1, 12]
    positions, layout = torch.cat([torch.arange(n) for n in lengths]), PackedLayout.of_sequences(lengths)
    with torch.no_grad():
        inputs = StepInputs(ids, positions, ())
        assert torch.equal(runner.hidden(inputs, layout), packed_forward(model, ids, positions, layout))
        plain = packed_forward(tiny("llama", torch.float32), ids, positions, layout)
        with adapter_off(model):
            assert torch.equal(runner.hidden(inputs, layout), plain)


def test_the_first_step_is_as_long_at_every_rank():
    """With alpha / rank, and Adam: so a learning rate serves every rank."""
    batch, moved = random_batch(0), {}
    for rank in (2, 8, 32):
        model = adapted("llama", fresh=True, rank=rank, alpha=32.0)
        learner = Learner(
            model, Train(lr=1e-4, max_grad_norm=None), Algorithm(loss="supervised", advantage="none")
        )
        before = learner.scorer.logprobs(**rows_of(batch)).values
        learner.update(batch)
        after = learner.scorer.logprobs(**rows_of(batch)).values
        moved[rank] = float((after - before).abs().mean())
    assert max(moved.values()) / min(moved.values()) < 1.5, moved


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("q_prj", r"(?s)q_prj, expected.*did you mean q_proj"),
        ("nothing", r"such as q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
        ("lm_head", r"found lm_head, expected endings"),
        ("input_layernorm", r"found input_layernorm, expected endings"),
    ],
)
def test_targets_that_fit_no_layer_are_refused(target: str, words: str):
    with pytest.raises(RecipeError, match=words) as refused:
        add_adapter(tiny("llama"), Lora(targets=["v_proj", target]), seed=0)
    assert refused.value.path == "model.lora.targets"


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "qwen3_moe"])
def test_a_rank_above_every_layers_lesser_side_is_refused(family: str):
    model = tiny(family)
    weights = [model.get_parameter(f"{name}.weight") for name in find_targets(model, "all")[0]]
    weights += [model.get_parameter(name) for name in find_targets(model, "all")[1]]
    sides = [min(weight.shape[-2:]) for weight in weights]
    with pytest.raises(RecipeError, match=f"at most {max(sides)}") as refused:
        add_adapter(model, Lora(rank=max(sides) + 1), seed=0)
    assert refused.value.path == "model.lora.rank"
    add_adapter(model, Lora(rank=max(sides)), seed=0)

"""What `practicum plan` tells: sizes as they really are, laws of its model, and what it refuses."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from practicum.cli import app
from practicum.cpu.batch_invariance import padded_keys
from practicum.dataplane.ragged import Ragged
from practicum.engines.torch.kv_memory import PromptKv
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.errors import RecipeError, RecipeErrors
from practicum.forecast.device_memory import engine_memory, model_sizes
from practicum.forecast.forecast import ClusterSpec, Forecast, forecast, load_spec, report
from practicum.learning.optimizer import OptimizerStepper
from practicum.learning.packed_model import PackedModel
from practicum.learning.packing import RowSpans
from practicum.models.load_model import load_model
from practicum.recipe.derived import saved_parameters
from practicum.recipe.schema.recipe import Lora, MakeModel, Model, Recipe, Train

ROOT = Path(__file__).parents[2]
FAMILIES = ("qwen3", "llama", "gpt2", "qwen3_moe", "qwen2_5_vl")
BIG = {"hidden": 4096, "layers": 36, "heads": 32, "context": 32768}
CORES = {"name": "box", "cpus": 16, "memory_gb": 64.0}
PROMPT = 40.0


def recipe(**more: Any) -> Recipe:
    written = {
        "name": "run",
        "model": {"random_init": {}},
        "tasks": {"sort": {"kind": "sort"}},
        "runtime": {"kind": "ray", "threads": 1},
    }
    return Recipe.model_validate(written | more)


def cluster(**machine: Any) -> ClusterSpec:
    return ClusterSpec.model_validate({"nodes": [CORES | machine]})


def gpus() -> ClusterSpec:
    return load_spec(ROOT / "examples/cluster.yaml")


def predict(wanted: Recipe, spec: ClusterSpec | None = None) -> Forecast:
    return forecast(wanted, spec or cluster(), PROMPT)


def local(**more: Any) -> Recipe:
    return recipe(**{"runtime": {"threads": 1}} | more)


def made(family: str = "qwen3", **more: Any) -> Model:
    make = {"family": family, "hidden": 128, "layers": 3, "heads": 4}
    return Model(random_init=MakeModel.model_validate(make | more), device="cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_without_making_the_model(family: str):
    spec = made(family).model_copy(update={"lora": Lora(rank=4)})
    model = load_model(spec, 0)
    counts = {name: p.numel() for name, p in model.named_parameters()}
    adapter = sum(count for name, count in counts.items() if "lora_" in name)
    sizes = model_sizes(spec)
    assert (sizes.adapter, sizes.parameters) == (adapter, sum(counts.values()) - adapter)


def test_a_folders_weights_say_how_many_there_are(tmp_path: Path):
    load_model(made(), 0).save_pretrained(tmp_path)
    assert saved_parameters(tmp_path) == model_sizes(Model(path=str(tmp_path))).parameters


def test_a_model_without_a_config_is_refused(tmp_path: Path):
    with pytest.raises(RecipeError, match=r"model\.path.*config\.json"):
        model_sizes(Model(path=str(tmp_path)))


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_activations_are_what_torch_keeps(family: str):
    spec = made(family)
    model = load_model(spec, 0)
    trunk = PackedModel(model, Train())
    prompts, answers = (
        Ragged.from_rows([torch.randint(7, 60, (tokens,)) for _ in range(8)]) for tokens in (32, 96)
    )
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    (packed,) = trunk.microbatches(RowSpans(prompts, answers))
    with trunk.training(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        hidden = trunk.hidden(packed)
    real = sum(kept.values()) / len(packed.ids_N) / hidden.element_size()
    assert model_sizes(spec).token_activations(False) == pytest.approx(real, rel=0.2)


@pytest.mark.parametrize(("context", "answer"), [(96, 30), (8192, 600)])
def test_kv_memory_is_what_the_engine_takes(context: int, answer: int):
    """All sessions at once, each as long as it may be; prompts of 40 tokens."""
    spec = made(context=8192)
    wanted = recipe(
        model={"random_init": spec.random_init},
        rollout={"max_num_seqs": 5, "context": context, "max_new_tokens": answer, "samples": 1},
        train={"prompts": 5},
    )
    engine = TorchEngine(load_model(spec, 0), slots=5, context=context)
    kv, length = engine.runner.token_kv, 40 + answer
    kept = PromptKv(kv.keys.expand(-1, -1, length, -1), kv.values.expand(-1, -1, length, -1))
    memory = engine.scheduler.memory
    assert memory is not None
    for slot in range(5):
        memory.put_prompt(kept, slot, 1)
    told = engine_memory(predict(wanted).setup, shares_weights=True)["KV memory"]
    position = 5 * model_sizes(spec).token_kv() * 4
    assert told <= engine.memory().kv <= padded_keys(round(told / position)) * position
    assert context < 8192 or told < 0.2 * context * position
    engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_are_what_the_engine_takes(dtype: Any):
    make = MakeModel(family="qwen3_5", hidden=32, layers=4, heads=2, context=64)
    spec = Model(random_init=make, dtype=dtype)
    told = predict(
        recipe(model={"random_init": make, "dtype": dtype}, rollout={"max_num_seqs": 5, "context": 64})
    ).setup
    engine = TorchEngine(load_model(spec, 0), slots=5, context=64)
    memory = engine.scheduler.memory
    assert memory is not None
    held = sum(state.nbytes for state in memory.states.values())
    assert engine_memory(told, shares_weights=True)["states"] == held > 0
    assert told.models.student.attending == len(memory.keys) == 2
    engine.close()


def test_a_device_that_is_too_small_is_refused_and_more_ranks_fit():
    big: dict[str, Any] = {"model": {"random_init": BIG}, "rollout": {"max_num_seqs": 8}}
    big["train"] = {"gradient_checkpointing": True}
    alone = predict(recipe(**big), gpus())
    (refusal,) = alone.refusals
    assert "80.0 GiB" in refusal
    assert "pools.train.devices" in refusal
    sharded = predict(recipe(**big, pools={"train": {"devices": 8}}), gpus())
    assert not sharded.refusals
    (device,) = sharded.memory
    assert device.parts["weights"] == alone.memory[0].parts["weights"] / 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_optimizer_s_state_is_counted_as_it_really_is(dtype: str):
    spec = made().model_copy(update={"dtype": dtype})
    for optimizer in ("adamw", "adamw_8bit"):
        stepper = OptimizerStepper(load_model(spec, 0).parameters(), Train(optimizer=optimizer))
        for p in stepper.parameters:
            p.grad = torch.ones_like(p)
        stepper.step(1e-4, {"loss": 1.0, "tokens": 1.0})
        values = [x for state in stepper.optimizer.state.values() for x in state.values()]
        real = sum({x.data_ptr(): x.nbytes for x in values if isinstance(x, torch.Tensor)}.values())
        model = {"random_init": spec.random_init, "dtype": dtype}
        (device,) = predict(local(model=model, train={"optimizer": optimizer})).memory
        told = device.parts["Adam's moments"] + device.parts.get("master weights", 0.0)
        assert told == pytest.approx(real, rel=0.05)


def test_of_an_offloaded_state_only_what_is_more_than_the_activations_counts():
    for tokens in (16, 2048):
        sections = [{"train": {"microbatch_tokens": tokens, "offload": where}} for where in ("none", "host")]
        here, away = (predict(local(**section)).memory[0].parts for section in sections)
        rest = here["activations"] + here["logits"]
        assert away["optimizer's state (offloaded)"] == max(0.0, here["Adam's moments"] - rest)
        assert "Adam's moments" not in away


def test_weights_that_are_kept_for_engines_are_counted():
    def published(wanted: Recipe, spec: ClusterSpec | None = None) -> float:
        plan = predict(wanted, spec)
        return sum(one.parts.get("published weights", 0.0) for one in plan.memory)

    whole = 4 * predict(local()).setup.models.student.parameters
    assert published(local()) == 0
    assert published(local(rollout={"lag": 2})) == 3 * whole
    adapter = published(local(model={"random_init": {}, "lora": {"rank": 4}}, rollout={"lag": 2}))
    assert 0 < adapter < whole
    pools = {"train": {"devices": 2}, "rollout": {"devices": 1}}
    nixl = whole if importlib.util.find_spec("nixl") else 0
    assert published(recipe(pools=pools), gpus()) == nixl


def test_a_cluster_that_is_too_small_is_refused_with_the_rest_of_the_forecast():
    found = predict(recipe(pools={"train": {"devices": 40}}))
    assert any("too small" in refusal for refusal in found.refusals)
    assert "train: 40 × 1 CPU" in report(found)
    assert found.memory


def test_on_cpus_the_memory_of_all_machines_counts_and_on_gpus_that_of_the_smallest_device():
    two = {"train": {"devices": 2}}
    box = predict(recipe(pools=two))
    assert [device.title for device in box.memory] == ["box"]
    pair = predict(recipe(pools=two), cluster(count=2))
    assert pair.memory[0].title == "2 × box"
    assert pair.memory[0].limit == 2 * box.memory[0].limit
    kinds = [CORES | {"name": f"g{gb}", "devices": 1, "device_gb": gb} for gb in (80, 24)]
    mixed = predict(recipe(pools=two), ClusterSpec.model_validate({"nodes": kinds}))
    assert {device.limit for device in mixed.memory} == {24 * 2**30}


def test_mistakes_in_a_clusters_file_come_together(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("nodes:\n  - {name: a, cpu: 3, memory_gb: lots}\nlink: 1\n")
    with pytest.raises(RecipeErrors) as caught:
        load_spec(file)
    assert {error.path for error in caught.value.errors} >= {"nodes[0].cpus", "nodes[0].memory_gb", "link"}
    with pytest.raises(RecipeError, match="--cluster"):
        load_spec(tmp_path / "none.yaml")


def test_the_command_prints_all_parts_and_leaves_with_2_if_something_does_not_fit():
    base = str(ROOT / "recipes/mopd/base.yaml")
    spec = ["--cluster", str(ROOT / "examples/cluster.yaml")]
    done = CliRunner().invoke(app, ["plan", base, *spec])
    assert done.exit_code == 0, done.output
    assert "placement:" in done.output
    assert "memory:" in done.output
    refused = CliRunner().invoke(app, ["plan", base, *spec, "--set", "pools.train.devices=99"])
    assert refused.exit_code == 2
    assert "too small" in refused.output
    here = CliRunner().invoke(app, ["plan", base])
    assert here.exit_code == 0
    assert "all roles in one process" in here.output

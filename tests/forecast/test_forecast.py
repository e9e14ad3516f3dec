"""What `practicum plan` tells: sizes as they really are, laws of its model, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from practicum.cli import app
from practicum.dataplane.ragged import Ragged
from practicum.engines.torch.kv_memory import PromptKv
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.errors import PracticumError, RecipeError, RecipeErrors
from practicum.forecast.cluster_spec import ClusterSpec, Machine, load_spec
from practicum.forecast.device_memory import engine_memory
from practicum.forecast.forecast import Forecast, forecast
from practicum.forecast.forecast_report import report
from practicum.forecast.model_sizes import model_sizes
from practicum.forecast.seconds import Cost
from practicum.forecast.step_setup import step_setup
from practicum.forecast.workload import MeasuredRun, read_run, summarise, workload
from practicum.learning import update_metrics as learning_metrics
from practicum.learning.optimizer import OptimizerStepper
from practicum.learning.packed_model import PackedModel
from practicum.learning.packing import RowSpans
from practicum.models.load_model import load_model
from practicum.recipe.derived import saved_parameters
from practicum.recipe.schema.recipe import MakeModel, Model, Recipe, Train
from practicum.roles.stage_table import make_plan
from practicum.trainer.step_metrics import METRICS

ROOT = Path(__file__).parents[2]
FAMILIES = ("qwen3", "llama", "gpt2", "qwen3_moe", "qwen2_5_vl")
BIG = {"hidden": 4096, "layers": 36, "heads": 32, "kv_heads": 8, "head_dim": 128, "context": 32768}
CORES = {"name": "box", "cpus": 16, "memory_gb": 64.0}
STAGES = {
    "rollout": 2.0,
    "reward": 0.1,
    "advantages": 0.01,
    "update_student": 4.0,
    "sync": 0.001,
    "clear": 0.01,
}
PROMPT = 40.0


def recipe(**more: Any) -> Recipe:
    written = {
        "name": "run",
        "model": {"make": {}},
        "tasks": {"sort": {"kind": "sort"}},
        "runtime": {"kind": "ray", "threads": 1},
    }
    return Recipe.model_validate(written | more)


def cluster(**machine: Any) -> ClusterSpec:
    return ClusterSpec.model_validate({"nodes": [CORES | machine]})


def gpus() -> ClusterSpec:
    return load_spec(ROOT / "examples/cluster.yaml").model_copy(update={"measured_on": None})


def predict(wanted: Recipe, spec: ClusterSpec | None = None, run: MeasuredRun | None = None) -> Forecast:
    return forecast(wanted, spec or cluster(), lambda _: PROMPT, run)


def local(**more: Any) -> Recipe:
    return recipe(**{"runtime": {"threads": 1}} | more)


def run_of(wanted: Recipe, response: float = 30.0) -> MeasuredRun:
    row = {f"time/{name}": seconds for name, seconds in STAGES.items()}
    row |= {"time/step": sum(STAGES.values()) + 0.2, "rollout/response_tokens": response}
    return summarise(wanted, [row | {"rollout/truncated": 0.1, "train/idle_tokens": 0.2}] * 5)


def made(family: str = "qwen3", **more: Any) -> Model:
    make = {"family": family, "hidden": 128, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 32}
    return Model(make=MakeModel.model_validate(make | more), device="cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_without_making_the_model(family: str):
    model = load_model(made(family), 0)
    real = sum(p.numel() for p in model.parameters())
    # Norms and biases are left out, and of a vision tower its patches.
    assert model_sizes(None, made(family).make).parameters == pytest.approx(
        real, rel=0.1 if "vl" in family else 0.01
    )


def test_a_folders_weights_say_how_many_there_are(tmp_path: Path):
    model = load_model(made(), 0)
    model.save_pretrained(tmp_path)
    real = sum(p.numel() for p in model.parameters())
    assert saved_parameters(tmp_path) == real == model_sizes(str(tmp_path), None).parameters


def test_a_model_without_a_config_is_refused(tmp_path: Path):
    with pytest.raises(RecipeError, match=r"model\.path.*config\.json"):
        model_sizes(str(tmp_path), None)


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
    assert model_sizes(None, spec.make).token_activations(False) == pytest.approx(real, rel=0.2)


@pytest.mark.parametrize(("context", "answer"), [(96, 30), (8192, 600)])
def test_kv_memory_is_what_the_engine_takes(context: int, answer: int):
    """All sessions at once, each as long as it may be; prompts of 40 tokens."""
    spec = made(context=8192)
    wanted = recipe(
        model={"make": spec.make},
        rollout={"slots": 5, "context": context, "max_new_tokens": answer, "samples": 1},
        train={"prompts": 5},
    )
    engine = TorchEngine(load_model(spec, 0), slots=5, context=context)
    kv, length = engine.runner.token_kv, 40 + answer
    kept = PromptKv(*(part.expand(-1, -1, length, -1) for part in (kv.keys, kv.values)))
    memory = engine.scheduler.memory
    assert memory is not None
    for slot in range(5):
        memory.put_prompt(kept, slot, 1)
    setup = step_setup(wanted, workload(wanted, 40.0, None), [Machine.model_validate(CORES)], None)
    told = engine_memory(setup, shares_weights=True)["KV memory"]
    assert told <= engine.memory().kv <= 1.2 * told  # attention's padding
    assert context < 8192 or told < 0.2 * 5 * context * model_sizes(None, spec.make).token_kv() * 4
    engine.close()


def test_metrics_that_a_forecast_reads_are_written():
    assert {"rollout/response_tokens", "rollout/truncated", "time/step", "time/<stage>"} < set(METRICS)
    assert "idle_tokens" in learning_metrics.METRICS


def test_a_device_that_is_too_small_is_refused_and_more_ranks_fit():
    big: dict[str, Any] = {"model": {"make": BIG}, "rollout": {"slots": 8}}
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
        real = sum(x.nbytes for state in stepper.optimizer.state.values() for x in state.values())
        model = {"make": spec.make, "dtype": dtype}
        (device,) = predict(local(model=model, train={"optimizer": optimizer})).memory
        told = device.parts["Adam's moments"] + device.parts.get("master weights", 0.0)
        assert told == pytest.approx(real, rel=0.05)


def test_of_an_offloaded_state_only_what_is_more_than_the_activations_counts():
    for tokens in (16, 2048):
        sections = [{"train": {"microbatch_tokens": tokens, "offload": where}} for where in ("none", "disk")]
        here, away = (predict(local(**section)).memory[0].parts for section in sections)
        rest = here["activations"] + here["logits"]
        assert away["optimizer's state (offloaded)"] == max(0.0, here["Adam's moments"] - rest)
        assert "Adam's moments" not in away


def test_devices_that_share_an_engine_share_its_memory():
    found = []
    for parallel in (1, 2):
        rollout = {"engine": "vllm", "slots": 8, "vllm": {"tensor_parallel": parallel}}
        pools = {"train": {"devices": 4}, "rollout": {"devices": 2}}
        plan = predict(recipe(model={"make": BIG}, rollout=rollout, pools=pools), gpus())
        found.append(next(one.parts for one in plan.memory if "(rollout)" in one.title))
    one, two = found
    assert set(one) == {"engine's weights", "KV memory"}
    assert two == {what: size / 2 for what, size in one.items()}


def test_weights_that_are_kept_for_engines_are_counted():
    def published(wanted: Recipe, spec: ClusterSpec | None = None) -> float:
        plan = predict(wanted, spec)
        return sum(one.parts.get("published weights", 0.0) for one in plan.memory)

    whole = 4 * predict(local()).setup.models.student.parameters
    assert published(local()) == 0
    assert published(local(**{"async": {"lag": 2}})) == 3 * whole
    adapter = published(local(model={"make": {}, "lora": {"rank": 4}}, **{"async": {"lag": 2}}))
    assert 0 < adapter < whole
    by_nixl = {"kind": "ray", "threads": 1, "weight_transport": "nixl"}
    pools = {"train": {"devices": 2}, "rollout": {"devices": 1}}
    assert published(recipe(runtime=by_nixl, pools=pools), gpus()) == whole
    by_store = {**by_nixl, "weight_transport": "object_store"}
    assert published(recipe(runtime=by_store, pools=pools), gpus()) == 0


def test_a_cluster_that_is_too_small_is_refused_with_the_rest_of_the_forecast():
    found = predict(recipe(pools={"train": {"devices": 40}}))
    assert any("too small" in refusal for refusal in found.refusals)
    assert found.layout is None
    assert found.seconds > 0
    assert "none found" in report(found)


def test_metadata_does_not_grow_with_answers_and_tensors_do():
    short, long = (predict(recipe(rollout={"max_new_tokens": n})).setup.traffic for n in (64, 640))
    assert short.controller == long.controller
    assert long.plane_bytes > 5 * short.plane_bytes


def test_bytes_of_a_stage_are_its_fields():
    setup = predict(recipe(rollout={"max_new_tokens": 20}, train={"prompts": 4})).setup
    rows, answer = 4 * 8, 10.0
    # ids of prompt and answer, a mask, and two kinds of logprobs
    assert setup.traffic.plane["rollout"].written == rows * (8 * PROMPT + answer * (8 + 1 + 4 + 4))
    assert setup.traffic.plane["reward"].read == rows * (8 * PROMPT + answer * (8 + 1))


def test_a_run_is_forecast_as_it_was():
    found = predict(local(), run=run_of(local()))
    for name in STAGES:
        if name != "sync":  # nothing is moved in one process
            assert found.stages[name].seconds == pytest.approx(STAGES[name])
    assert found.between == pytest.approx(0.2)
    assert found.bottleneck == "update_student"


@given(times=st.integers(2, 16), response=st.floats(4, 60))
def test_a_larger_batch_takes_longer_but_not_more_than_in_proportion(times: int, response: float):
    run = run_of(local(), response)
    once = predict(local(), run=run)
    more = predict(local(train={"prompts": 32 * times}), run=run)
    for name in ("rollout", "update_student", "reward"):
        ratio = more.stages[name].seconds / once.stages[name].seconds
        assert 1 < ratio <= times + 1e-6


@given(ranks=st.integers(2, 8), response=st.floats(4, 60))
def test_ranks_share_the_arithmetic_and_pay_for_their_links(ranks: int, response: float):
    run = run_of(local(), response)
    one, many = (predict(recipe(pools={"train": {"devices": n}}), run=run) for n in (1, ranks))
    for name in ("rollout", "update_student"):
        assert one.stages[name].arithmetic / ranks <= many.stages[name].arithmetic * (1 + 1e-9)
        assert many.stages[name].arithmetic < one.stages[name].arithmetic
    assert one.stages["update_student"].links == 0 < many.stages["update_student"].links


def test_two_ranks_on_one_core_are_not_faster():
    two = recipe(pools={"train": {"devices": 2}}, runtime={"kind": "ray", "threads": 1, "cpus": 8})
    shared, own = (predict(two, cluster(cpus=cpus)) for cpus in (1, 2))
    for name in ("rollout", "update_student"):
        assert shared.stages[name].arithmetic == pytest.approx(2 * own.stages[name].arithmetic)


def test_streamed_teachers_cost_what_outlasts_the_rollout():
    teachers = {"a": {"model": "teacher"}}
    distill: dict[str, Any] = {"distill": {}, "reward": {"weight": 0.0}}
    woken = predict(recipe(teachers=teachers, **distill))
    streamed = predict(recipe(teachers={"a": {"model": "teacher", "placement": "own"}}, **distill))
    assert streamed.stages["teachers"].arithmetic == 0 < woken.stages["teachers"].arithmetic
    assert any("as large as the student" in note for note in woken.notes)


def test_a_run_on_another_device_is_scaled_by_both_devices_numbers():
    laptop = load_spec(ROOT / "examples/cluster.yaml").measured_on
    assert laptop is not None
    run = run_of(local())
    faster = gpus().model_copy(update={"measured_on": laptop})
    assert predict(recipe(), faster, run).seconds < predict(recipe(), gpus(), run).seconds


def test_causes_name_the_largest_part():
    assert Cost(1.0, 2.0, 0.5).cause == "links"
    assert Cost(3.0, 2.0).cause == "arithmetic"


def test_mistakes_in_a_clusters_file_come_together(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("nodes:\n  - {name: a, cpu: 3, memory_gb: lots}\nlink: 1\n")
    with pytest.raises(RecipeErrors) as caught:
        load_spec(file)
    told = str(caught.value)
    for words in (
        "nodes[0].cpus: found nothing",
        "nodes[0].memory_gb: found 'lots'",
        "did you mean nodes[0].cpus?",
        "link",
    ):
        assert words in told
    with pytest.raises(RecipeError, match="--cluster"):
        load_spec(tmp_path / "none.yaml")


def test_a_folder_without_a_run_and_a_run_without_steps_are_refused(tmp_path: Path):
    with pytest.raises(PracticumError, match="expected the folder of a finished run"):
        read_run(tmp_path)
    (tmp_path / "recipe.yaml").write_text(json.dumps(local().model_dump(mode="json", exclude={"extends"})))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/step": 1.0}\n')
    with pytest.raises(PracticumError, match="has 1 steps"):
        read_run(tmp_path)


def test_the_command_prints_all_parts_and_leaves_with_2_if_something_does_not_fit(tmp_path: Path):
    base = str(ROOT / "recipes/mopd/base.yaml")
    spec = ["--cluster", str(ROOT / "examples/cluster.yaml")]
    rows = [{"step": n, **{f"time/{k}": v for k, v in STAGES.items()}, "time/step": 7.0} for n in range(1, 6)]
    (tmp_path / "recipe.yaml").write_text(json.dumps(local().model_dump(mode="json", exclude={"extends"})))
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = CliRunner().invoke(app, ["plan", base, *spec, "--from", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert len(done.output.splitlines()) < 60
    for words in (
        "placement:",
        "memory:",
        "controller",
        "data plane",
        "weight sync",
        "seconds:",
        "bottleneck:",
    ):
        assert words in done.output
    refused = CliRunner().invoke(app, ["plan", base, *spec, "--set", "pools.train.devices=99"])
    assert refused.exit_code == 2
    assert "too small" in refused.output
    here = CliRunner().invoke(app, ["plan", base])
    assert here.exit_code == 0
    assert "all roles in one process" in here.output


def test_the_arithmetic_imports_no_torch():
    code = (
        "import sys, practicum.forecast.forecast_report as r; "
        "print([m for m in ('torch', 'transformers', 'ray', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_stages_that_the_run_did_not_have_get_the_factor_of_their_like():
    run = run_of(local())
    with_reference = local(algorithm={"kl": {"place": "loss"}})
    assert "ref_logprobs" in make_plan(with_reference)
    known, guessed = predict(with_reference, run=run), predict(with_reference)
    slower = known.stages["update_student"].seconds / guessed.stages["update_student"].seconds
    ratio = known.stages["ref_logprobs"].seconds / guessed.stages["ref_logprobs"].seconds
    # Lengths and idle tokens differ between the two as well.
    assert ratio == pytest.approx(slower, rel=0.35)

"""Whole runs of a tiny recipe: what they write, that they repeat, resume and stop as promised."""

import gc
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from practicum.errors import CheckError, PracticumError
from practicum.observe.metrics import METRICS
from practicum.runtime.local import LocalRoles
from practicum.trainer import run as run_module
from practicum.trainer.run import train_loaded
from practicum.trainer.sample_step import SampledStep, StepSampler
from practicum.trainer.step import StepRunner

from .recipes import TINY, tiny

SUPERVISED = {"algorithm": {"loss": "supervised", "advantage": "none"}}
PPO = {"algorithm": {"advantage": "gae", "lam": 0.95}, "critic": {"lr": 1e-3, "warmup_steps": 1}}
MINIBATCHES = {"steps": 2, "prompts": 4, "epochs": 2, "minibatches": 2, "lr": 1e-3}
KL = {"algorithm": {"kl": {"place": "reward", "target": 0.1}}}
LORA = {"model": TINY["model"] | {"lora": {"rank": 4}}, "train": {"steps": 4, "prompts": 4, "lr": 1e-2}}

HYBRID = {"model": {"random_init": TINY["model"]["random_init"] | {"family": "qwen3_5"}}}


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timed = ("time/", "shared/", "rollout/tokens_per_second")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "export" / "model.safetensors")


def same_run(a: Path, b: Path) -> None:
    for name in ("samples.jsonl", "eval.jsonl"):
        assert (a / name).read_bytes() == (b / name).read_bytes()
    assert without_times(metrics_of(a)) == without_times(metrics_of(b))
    one, other = weights_of(a), weights_of(b)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


KINDS: dict[str, dict[str, Any]] = {
    "supervised": SUPERVISED,
    "grpo": {},
    "ppo": PPO,
    "kl-reward": KL,
    "remax": {"algorithm": {"advantage": "remax", "loss": "reinforce", "kl": {"place": "loss"}}},
    "rloo": {"algorithm": {"advantage": "rloo", "loss": "gspo", "aggregation": "seq_mean_token_mean"}},
    "drgrpo": {"algorithm": {"advantage": "dr_grpo", "loss": "cispo", "aggregation": "seq_mean_token_sum"}},
    "rpp": {"algorithm": {"advantage": "reinforce_pp", "entropy": 0.01, "old_logprobs": "rollout"}},
    "minibatches": {"train": MINIBATCHES},
    "autocast": {"train": {"steps": 2, "prompts": 4, "lr": 0.1, "autocast": "bfloat16"}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_run_finishes_and_documents_its_metrics(tmp_path: Path, kind: str):
    outcome = train_loaded(tiny(tmp_path, **KINDS[kind]), tmp_path / "run")
    rows = metrics_of(outcome.folder)
    assert [row["step"] for row in rows] == list(range(outcome.steps + 1))
    known = "|".join(re.sub(r"<[^>]+>", "[^/]+", re.escape(name)) for name in METRICS)
    for row in rows:
        assert not [name for name in row if not re.fullmatch(known, name)]
        assert all(isinstance(value, int | float) for value in row.values())
    model = AutoModelForCausalLM.from_pretrained(outcome.folder / "export")
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert AutoTokenizer.from_pretrained(outcome.folder / "export").eos_token == "<eos>"


def test_weights_of_one_change_no_bit_of_a_run(tmp_path: Path):
    def run(name: str, mismatch: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
        sections = {"algorithm": {"mismatch": mismatch}, "train": MINIBATCHES}
        train_loaded(tiny(tmp_path, **sections), tmp_path / name)
        return without_times(metrics_of(tmp_path / name)), weights_of(tmp_path / name)

    plain, weights = run("plain", "off")
    rows, weighed = run("weighed", "sequence")
    assert all(torch.equal(weights[name], weighed[name]) for name in weights)
    for row, other in zip(plain[1:], rows[1:], strict=True):
        assert other.pop("advantage/mismatch_weight") == 1.0
        assert other.pop("advantage/mismatch_truncated") == 0.0
        assert other == row


def test_the_torch_engine_s_ratios_are_one(tmp_path: Path):
    algorithm = {"mismatch": "token", "mismatch_cap": 1.001}
    train_loaded(tiny(tmp_path, algorithm=algorithm), tmp_path / "run")
    for row in metrics_of(tmp_path / "run")[1:]:
        assert row["advantage/mismatch_weight"] == 1.0
        assert row["advantage/mismatch_truncated"] == 0.0
        assert row["train/ratio"] == 1.0
        assert row["train/gap_mean"] == row["train/gap_max"] == 0.0


def test_another_seed_another_run(tmp_path: Path):
    train_loaded(tiny(tmp_path), tmp_path / "a")
    train_loaded(tiny(tmp_path, "seed=4"), tmp_path / "b")
    assert without_times(metrics_of(tmp_path / "a")) != without_times(metrics_of(tmp_path / "b"))
    assert gc.get_freeze_count() == 0, "what a run froze can be collected after it"


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int, how: Any) -> None:
    """Let `how()` happen between `step` and the one after it."""
    whole = StepRunner.step

    def stepping(self: StepRunner, number: int) -> dict[str, float]:
        metrics = whole(self, number)
        if number == step:
            how()
        return metrics

    monkeypatch.setattr(StepRunner, "step", stepping)


@pytest.mark.parametrize(
    "sections",
    [{}, PPO, HYBRID, *(pytest.param(each, marks=pytest.mark.long) for each in (SUPERVISED, KL, LORA))],
    ids=["grpo", "ppo", "hybrid", "supervised", "kl", "adapter"],
)
def test_interrupted_and_resumed_equals_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict
):
    train_loaded(tiny(tmp_path, **sections), tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
        outcome = train_loaded(tiny(tmp_path, **sections), tmp_path / "cut")
    assert outcome.interrupted
    assert outcome.steps == 2
    train_loaded(tiny(tmp_path, **sections), tmp_path / "cut", resume=True)
    same_run(tmp_path / "whole", tmp_path / "cut")


def test_filtered_groups_are_refilled_and_the_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sections = {"refills": 50, "reward": {"functions": [{"use": "tests.trainer.rewards:even_length"}]}}
    train_loaded(tiny(tmp_path, **sections), tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
        train_loaded(tiny(tmp_path, **sections), tmp_path / "cut")
    train_loaded(tiny(tmp_path, **sections), tmp_path / "cut", resume=True)
    same_run(tmp_path / "whole", tmp_path / "cut")
    rows = metrics_of(tmp_path / "whole")[1:]
    assert all(row["groups/short"] == 0 for row in rows)
    assert any(row["groups/refills"] > 0 for row in rows)
    assert all(row["rollout/sessions"] > 16 for row in rows if row["groups/refills"] > 0)


def test_a_second_interrupt_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    stop_after(monkeypatch, 1, twice)
    with pytest.raises(KeyboardInterrupt):
        train_loaded(tiny(tmp_path), tmp_path / "run")


def test_a_used_folder_is_neither_overwritten_nor_resumed_as_another_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    train_loaded(tiny(tmp_path, "train.steps=1"), tmp_path / "run")
    with pytest.raises(PracticumError, match="--resume continues it, --fresh replaces it"):
        train_loaded(tiny(tmp_path), tmp_path / "run")
    with pytest.raises(PracticumError, match=r"to resume:\n  train\.lr: 0.001 → 0.5"):
        train_loaded(tiny(tmp_path, "train.lr=0.5"), tmp_path / "run", resume=True)
    with pytest.raises(PracticumError, match="no run to resume"):
        train_loaded(tiny(tmp_path), tmp_path / "nowhere", resume=True)
    train_loaded(tiny(tmp_path, "train.steps=2"), tmp_path / "run", resume=True)
    assert len(metrics_of(tmp_path / "run")) == 3
    capsys.readouterr()
    train_loaded(tiny(tmp_path, "train.steps=2"), tmp_path / "run", resume=True)
    assert "all 2 steps are done: --set train.steps=N continues the run" in capsys.readouterr().out
    train_loaded(tiny(tmp_path, "train.steps=1"), tmp_path / "run", fresh=True)
    assert len(metrics_of(tmp_path / "run")) == 2


def test_a_recipe_that_can_not_start_costs_no_folder(tmp_path: Path):
    train_loaded(tiny(tmp_path, "train.steps=1"), tmp_path / "run")
    for out in ("run", "new"):
        with pytest.raises(PracticumError, match=r"agent\.loop"):
            train_loaded(tiny(tmp_path, "agent.loop=nowhere:loop"), tmp_path / out, fresh=True)
    assert len(metrics_of(tmp_path / "run")) == 2
    assert not (tmp_path / "new").exists()


def test_stale_weights_in_the_engine_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LocalRoles, "sync_weights", lambda self: None)
    with pytest.raises(CheckError, match="check weight_version"):
        train_loaded(tiny(tmp_path), tmp_path / "run")


def test_a_corrupt_engine_is_caught_by_the_logprob_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sample = StepSampler.sample

    def tampered(self: StepSampler, step: SampledStep) -> None:
        sample(self, step)
        store, batch = self.roles.store, step.batch
        columns = store.get(batch, ["plain_logprobs"])
        column: Any = columns["plain_logprobs"]
        store.put(batch, {"plain_logprobs": type(column).packed(column.values - 1.0, column.lengths)})

    monkeypatch.setattr(StepSampler, "sample", tampered)
    with pytest.raises(CheckError, match="check logprob_gap: rollout and learner logprobs differ by 1 nats"):
        train_loaded(tiny(tmp_path), tmp_path / "run")


def test_a_failing_reward_stops_the_run_or_is_counted(tmp_path: Path):
    functions = [{"use": "tests.trainer.rewards:fails_on_odd_sessions"}]
    sections: dict[str, Any] = {"reward": {"functions": functions}}
    with pytest.raises(PracticumError, match="fails_on_odd_sessions"):
        train_loaded(tiny(tmp_path, **sections), tmp_path / "stop")
    sections["reward"] = {"functions": functions, "on_error": "skip"}
    train_loaded(tiny(tmp_path, **sections), tmp_path / "skip")
    rows = metrics_of(tmp_path / "skip")[1:]
    assert all(row["rollout/failed"] == 8 for row in rows)
    assert all(row["rollout/sessions"] == 16 for row in rows)
    assert "failed: prompt 0/session 1/trajectory 0" in (tmp_path / "skip" / "log.txt").read_text()


def test_remax_leaves_out_a_group_whose_baseline_failed(tmp_path: Path):
    functions = [{"use": "tests.trainer.rewards:fails_on_the_first_prompts_baseline"}]
    sections: dict[str, Any] = {
        "reward": {"functions": functions, "on_error": "skip"},
        "algorithm": {"advantage": "remax"},
    }
    train_loaded(tiny(tmp_path, **sections), tmp_path / "run")
    rows = metrics_of(tmp_path / "run")[1:]
    assert [row["groups/without_baseline"] for row in rows] == [1, 0, 0, 0]


def test_evaluation_counts_what_it_could_not_judge(tmp_path: Path):
    sections = {
        "reward": {"functions": [{"use": "tests.trainer.rewards:fails_on_odd_sessions"}], "on_error": "skip"},
        "eval": {"rows": 4, "samples": 2},
    }
    train_loaded(tiny(tmp_path, "train.steps=0", **sections), tmp_path / "run")
    (row,) = metrics_of(tmp_path / "run")
    assert row["eval/failed"] == 8  # 4 prompts of 2 tasks, session 1 of each
    assert {"eval/mean@2", "eval/pass@2", "eval/greedy"} <= row.keys()


def test_the_summary_names_scores_and_folder(tmp_path: Path):
    outcome = train_loaded(
        tiny(tmp_path, "train.steps=1", "expected={metric: eval/greedy, at_least: 0.5}"), tmp_path / "run"
    )
    text = run_module.summary(outcome)
    assert "tiny: done · 1 steps in" in text
    assert "eval/greedy 0.000 → " in text
    assert "expected: eval/greedy at least 0.5" in text


def test_fresh_never_touches_files_that_are_not_a_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it was not installed
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("mine")
    with pytest.raises(PracticumError, match="belong to no run"):
        train_loaded(tiny(tmp_path), folder, fresh=True)
    assert (folder / "recipe.yaml").read_text() == "mine"
    train_loaded(tiny(tmp_path, "train.steps=1"), tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(PracticumError, match="wandb"):
        train_loaded(tiny(tmp_path, "track.to=[wandb]"), tmp_path / "run", fresh=True)
    assert (tmp_path / "run" / "export").is_dir()
    train_loaded(tiny(tmp_path, "train.steps=1"), tmp_path / "run", fresh=True)
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_rewards_that_draw_from_global_generators_repeat(tmp_path: Path):
    sections = {"reward": {"functions": [{"use": "tests.trainer.rewards:at_random"}]}}
    for name in ("a", "b"):
        train_loaded(tiny(tmp_path, **sections), tmp_path / name)
    same_run(tmp_path / "a", tmp_path / "b")


def test_checkers_see_only_what_the_student_wrote_and_all_its_tokens_count(tmp_path: Path):
    loaded = tiny(tmp_path, "agent.loop=tests.trainer.loops:two_trajectories")
    train_loaded(loaded, tmp_path / "run")
    for row in metrics_of(tmp_path / "run")[1:]:
        assert row["rollout/tokens"] == row["train/tokens"]
        assert row["rollout/sessions"] == 16
    samples = (tmp_path / "run" / "samples.jsonl").read_text()
    assert "given" in samples


def test_a_reference_of_another_vocabulary_is_refused(tmp_path: Path):
    config = GPT2Config(vocab_size=500, n_embd=16, n_layer=1, n_head=1, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "other")
    sections = {"algorithm": {"kl": {"place": "loss", "reference": str(tmp_path / "other")}}}
    with pytest.raises(PracticumError, match=r"kl\.reference: .* vocabulary of 500 tokens"):
        train_loaded(tiny(tmp_path, **sections), tmp_path / "run")

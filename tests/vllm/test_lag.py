"""Rollouts by vLLM ahead of the learner: one engine takes the weights of each step in its turn."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from practicum.engines.protocol import ScoreRequest
from practicum.tasks.stream import make_stream
from practicum.trainer.run import train_loaded
from practicum.trainer.sample_step import TRAIN, training_attempts
from tests.trainer.recipes import TINY, tiny
from tests.trainer.test_run import metrics_of, stop_after
from tests.vllm.models import logprobs, started, update

MAKE = TINY["model"]["random_init"] | {"hidden": 64}
ROLLOUT = TINY["rollout"] | {"engine": "vllm"}
REWARD = {"functions": [{"use": "tests.trainer.rewards:by_letters"}]}
LORA = {"lora": {"rank": 4}}


def sections(lag: int, **more: Any) -> dict[str, Any]:
    return {"model": {"random_init": MAKE}, "rollout": ROLLOUT | {"lag": lag}, "reward": REWARD} | more


@pytest.mark.parametrize("lora", [{}, LORA], ids=["whole", "adapter"])
def test_rows_are_sampled_by_the_weights_that_are_named(tmp_path: Path, lora: dict[str, Any]):
    """Weights of three steps, in any order; the torch engine gives their rows the same logprobs."""
    recipe = tiny(tmp_path, **sections(2, model={"random_init": MAKE} | lora)).recipe
    with started(recipe) as roles:
        assert (len(roles.engines), len(roles.rollouts)) == (1, 3)
        learner, kept = roles.rank.student.learner, {0: copy.deepcopy(roles.rank.student.learner.model)}
        for step in (1, 2):
            update(learner, 0.2)
            roles.publish(step)
            kept[step] = copy.deepcopy(learner.model)
        attempts = training_attempts(recipe, make_stream(recipe.tasks, 1).take(4), roles.stop)
        for step in (0, 2, 1, 0, 2):
            with roles.weights(step, step):
                batch = roles.rollouts[step].rollout(attempts, TRAIN, seed=1)
            assert {(tags.version_min, tags.version_max) for tags in batch.tags} == {(step, step)}
            columns: Any = roles.store.get(batch, ("prompt_ids", "response_ids", "rollout_logprobs"))
            prompts, answers, sampled = (columns[name].rows for name in columns)
            pairs = zip(prompts, answers, strict=True)
            rows = [ScoreRequest([*p.tolist(), *a.tolist()], len(p)) for p, a in pairs]
            expected = logprobs(kept[step], rows)
            torch.testing.assert_close(torch.cat([*sampled]), expected, rtol=0, atol=1e-4)
            others = [logprobs(kept[other], rows) for other in {0, 1, 2} - {step}]
            assert all((expected - other).abs().max() > 0.01 for other in others)
            roles.store.clear(TRAIN)
            roles.rollouts[step].forget(batch.keys)


@pytest.mark.parametrize(("lag", "lora"), [(1, LORA), (2, {})], ids=["adapter-1", "whole-2"])
def test_a_run_is_as_stale_as_it_says_also_when_it_is_resumed(tmp_path: Path, lag: int, lora: dict[str, Any]):
    """Versions of rows, and fingerprints at each hand-over, are checked in every step: else it would stop."""
    options = ("eval.rows=2", "eval.every=2", "train.steps=5")
    loaded = tiny(tmp_path, *options, **sections(lag, model={"random_init": MAKE} | lora))
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
        train_loaded(loaded, tmp_path / "run", quiet=True)
    train_loaded(loaded, tmp_path / "run", resume=True, quiet=True)
    rows = [row for row in metrics_of(tmp_path / "run") if row["step"]]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    stale = [min(t, lag) for t in range(5)]
    assert [row["async/staleness"] for row in rows] == stale
    assert [row["async/staleness_max"] for row in rows] == stale
    assert rows[0]["train/gap_max"] < 1e-4
    assert all(row["train/sample_size"] > 0.5 for row in rows[1:])

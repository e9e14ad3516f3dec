"""Engines of the student and of its teachers: what is refused, and where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from practicum.errors import RecipeErrors
from practicum.recipe.load_recipe import load_recipe

VLLM = "rollout: {engine: vllm}\n"
VLLM_OVER_4 = "rollout: {engine: vllm, vllm: {tensor_parallel_size: 4}}\n"
TEACHER = "teachers: {t: {model: a, engine: vllm%s}}\n"
DISTILL = "distill: {}\n"


def load(folder: Path, text: str) -> None:
    base: dict[str, Any] = {"name": "run", "model": {"random_init": {}}, "tasks": {"sort": {"kind": "sort"}}}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(base | yaml.safe_load(text), sort_keys=False))
    load_recipe(path)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("rollout: {vllm: {tensor_parallel_size: 2}}", "rollout.vllm"),
        (VLLM + "model: {random_init: {}, dtype: float64}", "model.dtype"),
        (VLLM + "model: {random_init: {family: qwen2_5_vl}}", "rollout.engine"),
        (TEACHER % "" + DISTILL + "model: {random_init: {family: qwen2_5_vl}}", "teachers.t.engine"),
        (TEACHER % "" + "distill: {signal: full}", "distill.signal"),
        (TEACHER % ", device: cpu" + DISTILL, "teachers.t.device"),
        (TEACHER % ", dtype: float64" + DISTILL, "teachers.t.dtype"),
        ("teachers: {t: {model: a, vllm: {tensor_parallel_size: 2}}}\n" + DISTILL, "teachers.t.vllm"),
        (
            "teachers: {t: {model: a, url: 'http://127.0.0.1:8000/v1', engine: vllm}}\n" + DISTILL,
            "teachers.t.engine",
        ),
        ("rollout: {engine: vllm, vllm: {data_parallel_size: 2}}", "rollout.vllm.data_parallel_size"),
        (VLLM_OVER_4 + "model: {random_init: {heads: 6, hidden: 96}}", "rollout.vllm.tensor_parallel_size"),
        (
            "teachers: {t: {student: {}, engine: vllm, vllm: {tensor_parallel_size: 2}}}\n"
            + DISTILL
            + "model: {random_init: {heads: 6, hidden: 96}}",
            "teachers.t.vllm.tensor_parallel_size",
        ),
    ],
)
def test_what_an_engine_can_not_do_is_refused(tmp_path: Path, text: str, path: str) -> None:
    with pytest.raises(RecipeErrors) as caught:
        load(tmp_path, text)
    assert [error.path for error in caught.value.errors] == [path], str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        VLLM,
        "rollout: {engine: vllm, vllm: {block_size: 64}}",
        VLLM + "model: {random_init: {family: qwen3_moe}}",
        TEACHER % ", placement: {own: {replicas: 2}}" + DISTILL,
        "teachers: {t: {student: {every: 3}, engine: vllm}}\n" + DISTILL,
        VLLM_OVER_4 + "model: {random_init: {heads: 8}}",
    ],
)
def test_what_an_engine_can_do_is_allowed(tmp_path: Path, text: str) -> None:
    load(tmp_path, text)

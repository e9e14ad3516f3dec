"""What is special about a kind of device is known in one module."""

import re
from pathlib import Path

import pytest
import torch

import practicum
from practicum import devices
from practicum.errors import RecipeError

ROOT = Path(practicum.__file__).parent


def test_no_other_module_names_a_kind_of_accelerator():
    named = re.compile(r"\bcuda|\bmps\b|\bxpu\b|\bnccl", re.IGNORECASE)
    # vLLM's own names of its weight transfers are in its folder and in compat.
    allowed = {"devices.py", "compat/vllm.py", "engines/vllm/send_weights.py", "engines/vllm/vllm_thread.py"}
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted(ROOT.rglob("*.py"))
        if path.relative_to(ROOT).as_posix() not in allowed
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if named.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:3", "mps", "xpu:0"])
def test_a_recipe_may_name_it(name: str):
    assert devices.is_device_name(name)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "mps:1", "CPU", ""])
def test_a_recipe_may_not_name_it(name: str):
    assert not devices.is_device_name(name)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
@pytest.mark.parametrize("name", ["cuda", "cuda:1", "mps", "xpu"])
def test_a_device_that_is_not_here_is_refused_by_name(name: str):
    with pytest.raises(RecipeError, match=rf"teachers.t.device: found {name}, .*\n.*no accelerator"):
        devices.pick_device(name, "teachers.t.device")
    assert devices.pick_device("auto") == torch.device("cpu")

"""The process's global random states, for checkpoints.

practicum only uses counter-based randomness, but users' rewards and loops may use these generators.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from practicum import devices


def seed_generators(seed: int) -> None:
    """Seed the global generators with the run's seed."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """States of Python's, numpy's and torch's global generators, as plain values."""
    name, keys, *rest = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        **devices.random_states(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore a state of `random_state`."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    devices.set_random_states(state)

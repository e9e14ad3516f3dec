"""The advantage estimators by the name a recipe gives them."""

from __future__ import annotations

from collections.abc import Callable

from practicum.algorithms.advantages.dr_grpo import dr_grpo
from practicum.algorithms.advantages.gae import gae
from practicum.algorithms.advantages.grpo import grpo
from practicum.algorithms.advantages.reinforce_pp import reinforce_pp
from practicum.algorithms.advantages.reinforce_pp_baseline import reinforce_pp_baseline
from practicum.algorithms.advantages.remax import remax
from practicum.algorithms.advantages.rloo import rloo
from practicum.algorithms.advantages.types import AdvantageInputs, AdvantageResult

ADVANTAGES: dict[str, Callable[[AdvantageInputs], AdvantageResult]] = {
    "gae": gae,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "remax": remax,
}

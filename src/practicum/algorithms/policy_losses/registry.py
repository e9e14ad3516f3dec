"""The policy losses by the name a recipe gives them."""

from __future__ import annotations

from collections.abc import Callable

from practicum.algorithms.policy_losses.cispo import cispo
from practicum.algorithms.policy_losses.dppo import dppo
from practicum.algorithms.policy_losses.gspo import gspo
from practicum.algorithms.policy_losses.ppo_clip import ppo_clip
from practicum.algorithms.policy_losses.reinforce import reinforce
from practicum.algorithms.policy_losses.types import PolicyInputs, PolicyTerms

POLICY_LOSSES: dict[str, Callable[[PolicyInputs], PolicyTerms]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "dppo": dppo,
    "reinforce": reinforce,
}

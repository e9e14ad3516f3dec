"""The kinds of engines by name. To add one, write a folder and a line here."""

from __future__ import annotations

from practicum.engines.kind import EngineKind
from practicum.engines.torch.make_torch import TorchKind
from practicum.engines.vllm.make_vllm import VllmKind

ENGINES: dict[str, EngineKind] = {"torch": TorchKind(), "vllm": VllmKind()}

"""The learner's parts of a checkpoint: weights, optimizer, counters."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from practicum.errors import PracticumError
from practicum.learning.optim import Stepper


@dataclass(frozen=True, slots=True)
class Counters:
    """How many updates the weights have had, and the training step of the schedule."""

    version: int
    step: int


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers, tied ones once."""
    kept = set(model.state_dict())
    buffers = {name: x for name, x in model.named_buffers() if name in kept}
    return {name: p.detach() for name, p in model.named_parameters()} | buffers


def save_parts(folder: Path, name: str, model: nn.Module, stepper: Stepper, counters: Counters) -> None:
    """Write model.safetensors, optimizer.pt and <name>.json into a folder, made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {key: x.contiguous() for key, x in _tensors(model).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    torch.save(stepper.state_dict(), folder / "optimizer.pt")
    (folder / f"{name}.json").write_text(json.dumps(asdict(counters)) + "\n")


@torch.no_grad()
def load_parts(folder: Path, name: str, model: nn.Module, stepper: Stepper) -> Counters:
    """Read what `save_parts` wrote; the weights are copied in place, so who shares them sees them."""
    missing = [
        file
        for file in ("model.safetensors", "optimizer.pt", f"{name}.json")
        if not (folder / file).is_file()
    ]
    if missing:
        raise PracticumError(f"checkpoint {folder} lacks {', '.join(missing)}: choose a complete one")
    saved, mine = load_file(folder / "model.safetensors"), _tensors(model)
    shapes = {key: tuple(x.shape) for key, x in saved.items()}
    if shapes != {key: tuple(x.shape) for key, x in mine.items()}:
        raise PracticumError(
            f"checkpoint {folder} holds another model than this run's: resume with the recipe that wrote it"
        )
    for key, x in mine.items():
        x.copy_(saved[key])
    state = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
    stepper.load_state_dict(state)
    return Counters(**json.loads((folder / f"{name}.json").read_text()))

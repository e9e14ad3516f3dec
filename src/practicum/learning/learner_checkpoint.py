"""A model in training: its optimizer and counters, and its part of a checkpoint.

Tensors are in the format of torch.distributed.checkpoint, which any number of ranks can read.
"""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from practicum.errors import CheckError, PracticumError
from practicum.learning.optimizer import Metrics, OptimizerStepper
from practicum.learning.packed_model import PackedModel
from practicum.learning.parallel import Parallel
from practicum.learning.update_shares import PartGradients
from practicum.models.lora import base_fingerprint, trained_names
from practicum.recipe.schema.recipe import Train

logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.INFO)  # two debug records per tensor

_INDEX = ".metadata"
_STEP = "optimizer.step"


class JoinableReport(Protocol):
    """Measurements of an update, over micro-batches and ranks."""

    def merge(self, other: Self) -> None: ...

    def result(self) -> Metrics: ...


R = TypeVar("R", bound=JoinableReport)


class TrainedModel:
    """The optimizer and checkpoints of student and critic. `version` counts the updates of the weights. Of a
    model with an adapter, a checkpoint has the trained weights. `base` is the fingerprint of the others."""

    NAME: ClassVar[str]
    trunk: PackedModel
    base: str | None = None

    def __init__(
        self,
        model: nn.Module,
        train: Train,
        parallel: Parallel | None,
        on_nonfinite: Callable[[str], None],
    ) -> None:
        self.train, self.parallel = train, parallel
        self.version = 0
        self._trained = model
        self.stepper = OptimizerStepper(model.parameters(), train, on_nonfinite)

    def join(self, report: R) -> R:
        """Return the measurements of all ranks, the same on every rank."""
        if self.parallel is None:
            return report
        joint, *others = self.parallel.gather(report)
        for other in others:
            joint.merge(other)
        return joint

    def apply(
        self,
        report: JoinableReport,
        lr: float,
        before_step: Callable[[Metrics], None] | None = None,
        parts: PartGradients | None = None,
    ) -> Metrics:
        """Make an optimizer step with the parameters' gradients, and return the metrics."""
        metrics = report.result()
        if self.stepper.step(lr, metrics, before_step, parts):
            self.version += 1
        return metrics

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and <NAME>.json, for a bit-exact continuation on any number of ranks."""
        with self.stepper.state_in_place():
            self._save(folder)

    def _save(self, folder: Path) -> None:
        model, parallel, optimizer = self._trained, self.parallel, self.stepper.optimizer
        if parallel is not None and not all(isinstance(p, DTensor) for p in model.parameters()):
            raise PracticumError("weights are still gathered after an error during a forward pass")
        if self.base is not None and parallel is None and base_fingerprint(model) != self.base:
            raise CheckError(
                "the base of the adapter has changed since it was loaded, so the adapter would not fit the "
                "original base"
            )
        folder.mkdir(parents=True, exist_ok=True)
        tensors = _weights(model)
        for key, p in model.named_parameters():
            state = optimizer.state.get(p, {})
            kept = {name: _as_tensor(value) for name, value in state.items() if value is not None}
            if "step" in kept:
                tensors[_STEP] = kept.pop("step")  # all take every step
            if parallel is not None and any(x.ndim and not isinstance(x, DTensor) for x in kept.values()):
                raise PracticumError(
                    "the optimizer keeps state that is not of the shape of its parameters, which can't be "
                    "saved on several ranks: use one rank, or another optimizer"
                )
            tensors |= {f"optimizer.{key}.{name}": value for name, value in kept.items()}
        with _plain(parallel):
            save(tensors, checkpoint_id=folder, no_dist=parallel is None)
        if parallel is None or parallel.rank == 0:
            counters: dict[str, Any] = {"version": self.version, "base": self.base}
            if parallel is None:
                counters["optimizer"] = self._optimizer_size()
            if self.trunk.halved:
                counters["microbatch_tokens"] = self.trunk.token_budget
            (folder / f"{self.NAME}.json").write_text(json.dumps(counters) + "\n")
        if parallel is not None:
            parallel.gather(None)  # a rank that returns may read what rank 0 writes

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load a checkpoint. Weights are copied in place."""
        model, parallel, optimizer = self._trained, self.parallel, self.stepper.optimizer
        _require(folder, [_INDEX, f"{self.NAME}.json"])
        counters = json.loads((folder / f"{self.NAME}.json").read_text())
        if counters.get("base") != self.base:
            saved, known = counters.get("base") or "none", self.base or "none"
            raise PracticumError(
                f"{folder} was trained on another base of model.lora: {saved}, this run's is {known}\n"
                "  → resume with the recipe and model of the run that wrote it, or start again with --fresh"
            )
        index = _read_index(folder)
        tensors = _weights(model)
        shapes = {key: tuple(saved.size) for key, saved in index.state_dict_metadata.items()}  # pyright: ignore
        saved = {key: shape for key, shape in shapes.items() if key.startswith("model.")}
        if saved != {key: tuple(x.shape) for key, x in tensors.items()}:
            raise PracticumError(
                f"checkpoint {folder} holds a different model: resume with the recipe that wrote it"
            )
        states = {key: p for key, p in model.named_parameters() if p.requires_grad}
        empty = _empty_states(states, index)
        for key, state in empty.items():
            tensors |= {f"optimizer.{key}.{name}": x for name, x in state.items()}
        if _STEP in shapes:
            tensors[_STEP] = torch.zeros((), dtype=index.state_dict_metadata[_STEP].properties.dtype)  # pyright: ignore
        with _plain(parallel):
            load(tensors, checkpoint_id=folder, no_dist=parallel is None)
        with self.stepper.state_in_place():
            optimizer.state.clear()
            for key, p in states.items():
                state = {name: _as_value(x) for name, x in empty[key].items()}
                if _STEP in shapes:
                    state["step"] = _as_value(tensors[_STEP].to(p.device, copy=True))
                if state:
                    optimizer.state[p] = state
            size, found = counters.get("optimizer"), self._optimizer_size()
            if parallel is None and size is not None and not math.isclose(found, size, rel_tol=1e-9):
                raise CheckError(
                    f"the optimizer state of {folder} was not loaded completely: its absolute values sum to "
                    f"{found:.6g}, expected {size:.6g}"
                )
        self.version = counters["version"]
        if (tokens := counters.get("microbatch_tokens")) is not None:
            # As in the run that was stopped: sums are rounded in the same order.
            self.trunk.token_budget, self.trunk.halved = min(self.trunk.token_budget, tokens), 1

    def _optimizer_size(self) -> float:
        """Return the sum of the absolute numbers of the optimizer's state, which shows a lost state."""
        states = [state.values() for state in self.stepper.optimizer.state.values()]
        kept = [x for values in states for x in values if isinstance(x, Tensor) and x.ndim]
        return sum(float(x.double().abs().sum()) for x in kept)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the model's weights of a checkpoint by name, tied ones once."""
    index = _read_index(folder)
    tensors = {
        key: torch.empty(saved.size, dtype=saved.properties.dtype)  # pyright: ignore
        for key, saved in index.state_dict_metadata.items()
        if key.startswith("model.")
    }
    with _plain(None):
        load(tensors, checkpoint_id=folder, no_dist=True)
    return {key.removeprefix("model."): x for key, x in tensors.items()}


def _as_tensor(value: Any) -> Tensor:
    """Return a value of an optimizer's state as a tensor. A number is saved as int64 or float64."""
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def _as_value(tensor: Tensor) -> Any:
    return tensor.item() if not tensor.ndim and tensor.dtype in (torch.int64, torch.float64) else tensor


def _empty_states(parameters: dict[str, nn.Parameter], index: Metadata) -> dict[str, dict[str, Tensor]]:
    """Return tensors to load each parameter's saved state into (not `step`), sharded as it is."""
    states: dict[str, dict[str, Tensor]] = {key: {} for key in parameters}
    for name, saved in index.state_dict_metadata.items():
        key, _, entry = name.removeprefix("optimizer.").rpartition(".")
        if name.startswith("optimizer.") and key in parameters:
            p, size, dtype = parameters[key], tuple(saved.size), saved.properties.dtype  # pyright: ignore
            state = torch.zeros_like(p, dtype=dtype)
            states[key][entry] = (
                state if size == tuple(p.shape) else torch.zeros(size, dtype=dtype, device=p.device)
            )
    return states


def _read_index(folder: Path) -> Metadata:
    """Return the index of a checkpoint. Raise PracticumError if a file is missing."""
    _require(folder, [_INDEX])
    index = FileSystemReader(folder).read_metadata()
    _require(folder, sorted({place.relative_path for place in (index.storage_data or {}).values()}))
    return index


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and saved buffers, tied ones once. With an adapter, the trained ones."""
    if (trained := trained_names(model)) is not None:
        return {f"model.{name}": p.detach() for name, p in model.named_parameters() if name in trained}
    kept = set(model.state_dict())
    buffers = {f"model.{name}": x for name, x in model.named_buffers() if name in kept}
    return {f"model.{name}": p.detach() for name, p in model.named_parameters()} | buffers


def _require(folder: Path, files: list[str]) -> None:
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise PracticumError(f"checkpoint {folder} is incomplete: {', '.join(missing)} is missing")


@contextmanager
def _plain(parallel: Parallel | None) -> Iterator[None]:
    """Context manager in which torch's `save` and `load` raise the original errors without wrapping them."""
    with warnings.catch_warnings():
        if parallel is None:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
        try:
            yield
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None

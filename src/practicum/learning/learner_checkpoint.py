"""A model in training: its optimizer and counters, and its part of a checkpoint.

Tensors are in the format of torch.distributed.checkpoint: what some ranks wrote, any other number of them
reads, one process too.
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
from practicum.models.lora import base_fingerprint, trained_names
from practicum.recipe.schema.recipe import Train

logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.INFO)  # two debug records per tensor

_INDEX = ".metadata"
_STEP = "optimizer.step"


class JoinableReport(Protocol):
    """What an update measures, over micro-batches and ranks."""

    def merge(self, other: Self) -> None:
        """Add what another rank measured."""
        ...

    def result(self) -> Metrics:
        """The metrics."""
        ...


R = TypeVar("R", bound=JoinableReport)


class TrainedModel:
    """What the student's learner and the critic share. `version` counts the updates applied to the weights,
    `step` is the training step that the schedule is at: the trainer sets it.

    Of a model with an adapter, a checkpoint holds what is trained; `base` is the fingerprint of the rest."""

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
        self.version = self.step = 0
        self._trained = model
        self.stepper = OptimizerStepper(model.parameters(), train, on_nonfinite)

    def join(self, report: R) -> R:
        """What all ranks measured; every rank gets the same."""
        if self.parallel is None:
            return report
        joint, *others = self.parallel.gather(report)
        for other in others:
            joint.merge(other)
        return joint

    def apply(self, report: JoinableReport, lr: float) -> Metrics:
        """One optimizer step with the gradients that lie on the parameters; the update's metrics."""
        metrics = report.result()
        if self.stepper.step(lr, metrics):
            self.version += 1
        return metrics

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and <NAME>.json, for a bit-exact continuation on any number of ranks.

        The folder is made if it is not there; all ranks together.
        """
        with self.stepper.state_in_place():
            self._save(folder)

    def _save(self, folder: Path) -> None:
        model, parallel, optimizer = self._trained, self.parallel, self.stepper.optimizer
        if parallel is not None and not all(isinstance(p, DTensor) for p in model.parameters()):
            raise PracticumError("an error in the middle of a forward pass left the weights gathered")
        if self.base is not None and parallel is None and base_fingerprint(model) != self.base:
            raise CheckError(
                "the base of the adapter is not as it was loaded: something has written to it, and the "
                "adapter would not fit the model that it is put on later"
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
            counters = {"version": self.version, "step": self.step}
            counters |= {} if self.base is None else {"base": self.base}
            counters |= {"optimizer": self._optimizer_size()} if parallel is None else {}
            counters |= {"microbatch_tokens": self.trunk.token_budget} if self.trunk.halved else {}
            (folder / f"{self.NAME}.json").write_text(json.dumps(counters) + "\n")
        if parallel is not None:
            parallel.gather(None)  # a rank that returns may read at once what rank 0 writes

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote; the weights are copied in place, so who shares them sees them."""
        model, parallel, optimizer = self._trained, self.parallel, self.stepper.optimizer
        _require(folder, [_INDEX, f"{self.NAME}.json"])
        counters = json.loads((folder / f"{self.NAME}.json").read_text())
        if counters.get("base") != self.base:
            raise PracticumError(_other_base(folder, counters.get("base"), self.base))
        index = _read_index(folder)
        tensors = _weights(model)
        shapes = {key: tuple(saved.size) for key, saved in index.state_dict_metadata.items()}  # pyright: ignore
        saved = {key: shape for key, shape in shapes.items() if key.startswith("model.")}
        if saved != {key: tuple(x.shape) for key, x in tensors.items()}:
            raise PracticumError(
                f"checkpoint {folder} holds another model than this run's: resume with the recipe that wrote "
                "it"
            )
        states = {key: p for key, p in model.named_parameters() if p.requires_grad}
        empty = _empty_states(states, index)
        for key, state in empty.items():
            tensors |= {f"optimizer.{key}.{name}": x for name, x in state.items()}
        if _STEP in shapes:
            tensors[_STEP] = torch.zeros(())
        with _plain(parallel):
            load(tensors, checkpoint_id=folder, no_dist=parallel is None)
        with self.stepper.state_in_place():
            optimizer.state.clear()
            for key, p in states.items():
                step = {"step": tensors[_STEP].to(p.device, copy=True)} if _STEP in shapes else {}
                if step or empty[key]:
                    optimizer.state[p] = {**step, **empty[key]}
            if parallel is None and "optimizer" in counters:
                self._require_optimizer(folder, counters["optimizer"])
        self.version, self.step = counters["version"], counters["step"]
        if (tokens := counters.get("microbatch_tokens")) is not None:
            # As in the run that was stopped: sums are rounded in the same order.
            self.trunk.token_budget, self.trunk.halved = min(self.trunk.token_budget, tokens), 1

    def _require_optimizer(self, folder: Path, size: float) -> None:
        if not math.isclose(found := self._optimizer_size(), size, rel_tol=1e-9):
            raise CheckError(
                f"the optimizer's state adds up to {found:.6g} after {folder} was read, and to {size:.6g} in "
                "it: the checkpoint was not taken up whole"
            )

    def _optimizer_size(self) -> float:
        """The sum of the sizes of all numbers that the optimizer keeps, by which a lost state is seen."""
        states = [state.values() for state in self.stepper.optimizer.state.values()]
        kept = [x for values in states for x in values if isinstance(x, Tensor) and x.ndim]
        return sum(float(x.double().abs().sum()) for x in kept)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The model's weights of a checkpoint by name, tied ones once; whichever number of ranks wrote them."""
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
    """A value of an optimizer's state: a tensor, or a number."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _empty_states(parameters: dict[str, nn.Parameter], index: Metadata) -> dict[str, dict[str, Tensor]]:
    """Tensors to load the saved state of each parameter into, `step` aside; cut as the parameter is."""
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
    """What is in a checkpoint, all of whose files are there."""
    _require(folder, [_INDEX])
    index = FileSystemReader(folder).read_metadata()
    _require(folder, sorted({place.relative_path for place in (index.storage_data or {}).values()}))
    return index


def _other_base(folder: Path, saved: str | None, own: str | None) -> str:
    """What is wrong with an adapter whose base is not the one that was loaded."""
    if saved is None or own is None:
        run = "without model.lora" if saved is None else "with model.lora"
        return f"checkpoint {folder} is of a run {run}: resume with the recipe that wrote it"
    return (
        f"the adapter in {folder} was trained on another base: its fingerprint is {saved}, and that of the "
        f"model that was loaded is {own}\n"
        "  → put the model that the run began with back to model.path, or start again with --fresh"
    )


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers, tied ones once; of a model with an adapter, what is trained."""
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
    """For torch's `save` and `load`: their errors are those that were raised in them.

    torch wraps them in what is no Exception. There is no warning of one process where one is meant.
    """
    with warnings.catch_warnings():
        if parallel is None:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
        try:
            yield
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None

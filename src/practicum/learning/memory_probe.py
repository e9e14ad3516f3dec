"""Whether the longest rows that a recipe allows can be learnt from, found out before the first step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from practicum.dataplane.ragged import Ragged
from practicum.devices import is_out_of_memory, memory_of, peak_memory, reset_peak_memory
from practicum.errors import PracticumError
from practicum.learning.learner import Learner
from practicum.learning.logprobs import token_logprobs
from practicum.learning.optimizer import OPTIMIZERS
from practicum.learning.packing import Packed, RowSpans
from practicum.models.offloaded_weights import return_memory
from practicum.processes.host_memory import at_most, available_memory, peak_resident_memory, reset_peak

GIB = 2**30
WORTH_TRYING = 0.25
"""On a CPU, a run is tried that is to take more than this fraction of the memory that is left."""


def is_worth_trying(device: torch.device, planned: float | None) -> bool:
    """Whether memory could be short; on a CPU, by the bytes that are `planned`: small runs save the time."""
    if device.type != "cpu":
        return True
    left = available_memory()
    return planned is not None and left is not None and planned > WORTH_TRYING * left


def probe_memory(learner: Learner, prompt: int, response: int, planned: float | None = None) -> str | None:
    """Forward and backward pass of a micro-batch of rows with this many tokens, and the optimizer's state.

    It leaves no trace but smaller micro-batches, if these are too large for the device. A row that is too
    long is a PracticumError. Says how much memory it took beside the bytes `planned`. All ranks together.
    """
    trunk, stepper = learner.trunk, learner.stepper
    _begin_to_count(trunk.device)
    offloads = learner.train.offload != "none"
    state: list[dict[str, Tensor]] = []

    def loss(packed: Packed) -> Tensor:
        with trunk.precision():
            hidden_M = trunk.hidden(packed)
            found = token_logprobs(learner.model, hidden_M, packed.target_M, temperature=1.0, entropy=True)
        return found.logprobs_M.mean()

    def attempt() -> int:
        stepper.optimizer.zero_grad(set_to_none=True)
        rows = _rows(learner, prompt, response)
        with trunk.training():
            trunk.each(trunk.microbatches(rows), loss)
        return len(rows.lengths)

    try:
        with _limit(learner):
            if not offloads:
                state = _made_state(learner)
            rows = trunk.halving(attempt)
            if offloads:  # then it is there when activations are not
                state = _made_state(learner)
        peak, total = _counted(trunk.device)
    finally:
        del state
        stepper.optimizer.zero_grad(set_to_none=True)
        return_memory(trunk.device)
    if peak is None or total is None:
        return None
    what = f"{rows} rows of {prompt + response:,} tokens, the longest that the recipe allows"
    plan = "" if planned is None else f"; `practicum plan` says {planned / GIB:.1f}"
    return f"memory was tried with {what}: {peak / GIB:.1f} of {total / GIB:.1f} GiB at most{plan}"


def _begin_to_count(device: torch.device) -> None:
    if device.type == "cpu":
        reset_peak()
    else:
        reset_peak_memory(device)


def _counted(device: torch.device) -> tuple[int | None, int | None]:
    """Most bytes that were in use, and how many there are."""
    if device.type != "cpu":
        return peak_memory(device), memory_of(device)
    peak, left = peak_resident_memory(), available_memory()
    return peak, None if peak is None or left is None else peak + left


def _limit(learner: Learner) -> AbstractContextManager[None]:
    """On a CPU, the memory that is left: beyond it, the system would end the process. Ranks may share it."""
    if learner.trunk.device.type != "cpu" or learner.parallel is not None:
        return nullcontext()
    return at_most(available_memory())


def _rows(learner: Learner, prompt: int, response: int) -> RowSpans:
    """As many rows as fill a micro-batch; no prompt is shared."""
    count = max(1, learner.trunk.token_budget // (prompt + response))
    vocab = learner.model.config.get_text_config().vocab_size
    ids = [(torch.arange(prompt + response) + i) % vocab for i in range(count)]
    return RowSpans(
        Ragged.from_rows([row[:prompt] for row in ids]), Ragged.from_rows([row[prompt:] for row in ids])
    )


def _made_state(learner: Learner) -> list[dict[str, Tensor]]:
    """The state that the optimizer makes in its first step, by a step on a copy of each parameter. Of an
    optimizer of the user's own, which may do more than that: two moments, and master weights of 16-bit ones.
    """
    stepper, train = learner.stepper, learner.train
    if stepper.has_state:
        return []
    make = OPTIMIZERS.get(train.optimizer)
    if make is None:
        return [
            {str(i): torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))}
            for p in stepper.parameters
            for i in range(2 if p.itemsize >= 4 else 3)
        ]
    made: list[dict[str, Tensor]] = []
    try:
        for p in stepper.parameters:
            copy = nn.Parameter(p.detach().clone())
            copy.grad = torch.zeros_like(copy)
            optimizer = make([copy], train)
            optimizer.step()
            made.append(dict(optimizer.state[copy]))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise PracticumError(
            "there is too little memory for the optimizer's state\n  → take train.optimizer adamw_8bit, set "
            "train.offload, train an adapter (model.lora), or raise pools.train.devices"
        ) from None
    return made

"""The student as it learns: its model, its optimizer, and one update from one mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from practicum.algorithms.aggregation import token_weights
from practicum.dataplane.ragged import Ragged
from practicum.learning.batch import UpdateBatch, dense_sessions, need_column, per_token
from practicum.learning.logprobs import token_logprobs
from practicum.learning.metrics import TokenMeans
from practicum.learning.objective import needed_columns, surely_zero_gradient, token_losses
from practicum.learning.optim import Metrics, Stepper, lr_at, stop_on_nonfinite
from practicum.learning.packing import Packed, Rows
from practicum.learning.parts import Counters, load_parts, save_parts
from practicum.learning.scorer import LogprobColumns, Scorer
from practicum.learning.trunk import Trunk
from practicum.recipe.schema import Algorithm, Train


class Learner:
    """The student. `step` is the training step that the schedule is at: the trainer sets it.

    `version` counts the updates applied to the weights. `temperature` is that of the rollouts; supervised
    training is at temperature 1.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        train: Train,
        algorithm: Algorithm,
        *,
        temperature: float = 1.0,
        on_nonfinite: Callable[[str], None] = stop_on_nonfinite,
        before_step: Callable[[Metrics], None] | None = None,
    ) -> None:
        self.model, self.train, self.algorithm = model, train, algorithm
        self.temperature = 1.0 if algorithm.loss == "supervised" else temperature
        self.version = 0
        self.step = 0
        self.trunk = Trunk(model, train)
        self.scorer = Scorer(self.trunk)
        self.stepper = Stepper(model.parameters(), train, on_nonfinite=on_nonfinite, before_step=before_step)

    def logprobs(
        self,
        prompt_ids: Ragged,
        response_ids: Ragged,
        *,
        temperature: float,
        entropy: bool = False,
        plain: bool = False,
    ) -> LogprobColumns:
        """The student's logprobs of responses, without gradient; see `Scorer.logprobs`."""
        return self.scorer.logprobs(
            prompt_ids, response_ids, temperature=temperature, entropy=entropy, plain=plain
        )

    def update(self, batch: UpdateBatch) -> Metrics:
        """One optimizer step on one mini-batch; metrics as in `metrics.METRICS`.

        The result does not depend on how rows fall into micro-batches. Without a sampled token nothing is
        done; with a non-finite loss or gradient the weights stay as they are.
        """
        job = _Update(batch, self.algorithm, self.trunk.dtype)
        metrics: Metrics = {"tokens": float(job.tokens)}
        if not job.tokens:
            return metrics
        means = TokenMeans()
        totals = {"loss": 0.0, "policy_loss": 0.0}
        with self.trunk.training():
            for packed in job.microbatches(self.trunk, job.active):
                self._add(totals, job, packed, means)
        with torch.no_grad():
            for packed in job.microbatches(self.trunk, job.idle):
                self._add(totals, job, packed, means)
        if not job.active:
            self.stepper.zero_missing_grads()
        metrics |= totals | means.result()
        metrics["idle_tokens"] = job.idle_tokens / job.tokens
        if self.stepper.step(lr_at(self.step, self.train), metrics):
            self.version += 1
        return metrics

    def _add(self, totals: dict[str, float], job: _Update, packed: Packed, means: TokenMeans) -> None:
        """Forward, and backward if gradients are on, of one micro-batch."""
        columns = job.columns_of(packed)
        with self.trunk.precision():
            found = token_logprobs(
                self.model,
                self.trunk.hidden(packed),
                packed.target_M,
                temperature=self.temperature,
                entropy=True,
                entropy_grad=self.algorithm.entropy > 0,
                plain="plain_logprobs" in columns,
            )
        loss_M, policy_M = token_losses(found, columns, columns["session"], self.algorithm, means)
        loss = (columns["weights"] * loss_M).sum()
        if torch.is_grad_enabled():
            loss.backward()
        totals["loss"] += float(loss.detach())
        totals["policy_loss"] += float((columns["weights"] * policy_M.detach()).sum())

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights themselves, not copies; tied ones once."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def fingerprint(self) -> Tensor:
        """Logprobs of a fixed sequence, to compare with the engine's."""
        return self.scorer.fingerprint()

    def save(self, folder: Path) -> None:
        """Write model.safetensors, optimizer.pt and learner.json, for a bit-exact continuation."""
        counters = Counters(version=self.version, step=self.step)
        save_parts(folder, "learner", self.model, self.stepper, counters)

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote; weights are copied into the tensors that are there."""
        counters = load_parts(folder, "learner", self.model, self.stepper)
        self.version, self.step = counters.version, counters.step

    def export(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the model and its tokenizer in HuggingFace format."""
        self.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


class _Update:
    """One mini-batch, with everything known before the first backward pass."""

    def __init__(self, batch: UpdateBatch, algorithm: Algorithm, dtype: torch.dtype) -> None:
        self.rows = Rows(batch.prompt_ids, batch.response_ids)
        self.sampled_M = need_column(batch, "response_mask", "every update").bool()
        self.tokens = int(self.sampled_M.sum())
        self.sessions, count = dense_sessions(batch.sessions)
        session_M = per_token(self.sessions, batch.response_ids.lengths)
        columns = needed_columns(batch, algorithm)
        columns["weights"] = token_weights(algorithm.aggregation, self.sampled_M, session_M, count, dtype)
        self.columns = {name: column.to(dtype) for name, column in columns.items()}
        self.columns["session"] = session_M
        self.whole_sessions = algorithm.loss == "gspo"

        active_S = torch.ones(count, dtype=torch.bool)
        if surely_zero_gradient(algorithm):
            active_S = torch.zeros(count, dtype=torch.bool)
            active_S[session_M[self.sampled_M & (self.columns["advantages"] != 0)]] = True
        self.active = [i for i, session in enumerate(self.sessions) if active_S[session]]
        self.idle = [i for i, session in enumerate(self.sessions) if not active_S[session]]
        self.idle_tokens = int((self.sampled_M & ~active_S[session_M]).sum())

    def microbatches(self, trunk: Trunk, rows: list[int]) -> Iterator[Packed]:
        """Micro-batches of these rows, to predict their sampled tokens."""
        sessions = self.sessions if self.whole_sessions else None
        return trunk.microbatches(self.rows, only=rows, sampled_M=self.sampled_M, sessions=sessions)

    def columns_of(self, packed: Packed) -> dict[str, Tensor]:
        """The columns of the micro-batch's sampled tokens, on its device."""
        device = packed.ids_N.device
        return {name: x_M[packed.column_M].to(device) for name, x_M in self.columns.items()}

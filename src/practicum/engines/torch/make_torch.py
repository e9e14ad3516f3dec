"""Create torch engines from recipes: for the student, or for frozen models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from transformers import PreTrainedConfig, PreTrainedModel

from practicum.devices import count_cores
from practicum.engines.hosted_engine import HostedEngine
from practicum.engines.kind import FrozenModel, WeightSource
from practicum.engines.protocol import Engine
from practicum.engines.torch.engine_thread import share_order
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.models.adapter_files import SavedAdapter
from practicum.models.load_model import context_length, load_model
from practicum.models.lora import bare_base, copy_on_base, has_adapter, put_adapters
from practicum.processes.host import Host
from practicum.recipe.schema.recipe import Model
from practicum.recipe.schema.rollout_sections import Rollout
from practicum.recipe.schema.teacher_sections import Own

UNDECLARED = 8192
"""Maximum sequence length of a model that does not declare one."""
ANSWERS = 16
"""Maximum concurrent responses of a frozen model. Scoring needs no KV memory."""


class TorchKind:
    """See `engines.kind.EngineKind`."""

    shares_model = hosts_lag = True
    module, install, recurrent = "torch", "pip install torch", ""

    def runs_recurrent(self, config: PreTrainedConfig) -> bool:
        return True

    def for_rollout(
        self,
        rollout: Rollout,
        path: str | None,
        model: PreTrainedModel,
        weights: WeightSource | None = None,
    ) -> TorchEngine:
        context = rollout.context_for(context_length(model))
        return TorchEngine(model, slots=rollout.max_num_seqs, context=context)

    def share_order(self, engines: Sequence[Engine]) -> None:
        share_order(engine.thread for engine in engines if isinstance(engine, TorchEngine))

    def merges_adapter(self, model: PreTrainedModel) -> bool:
        return False

    def adapter_problem(self, saved: SavedAdapter, family: str) -> str | None:
        return None

    def for_scoring(self, model: FrozenModel) -> TorchEngine:
        student, is_lent = model.student, False
        if student is not None and model.held is not None:
            # With an adapter, the copy is on the student's base.
            loaded = copy_on_base(student).requires_grad_(False).eval()
            is_lent = has_adapter(student)
        elif student is not None and has_adapter(student):
            loaded, is_lent = bare_base(student), True
        else:
            loaded = load_model(model.spec, model.seed, key=model.model_key)
        if model.adapters:
            put_adapters(loaded, {saved.fingerprint: saved for saved in model.adapters}, model.about)
        context = context_length(loaded) or model.context or UNDECLARED
        return TorchEngine(
            loaded, slots=ANSWERS, context=context, score_tokens=model.batch_tokens, owns_weights=not is_lent
        )

    def in_own_process(self, model: FrozenModel, own: Own) -> list[Engine]:
        host = partial(
            Host,
            model.key,
            partial(_load_scoring, replace(model, student=None)),
            threads=own.threads,
            deadline_s=model.settings.deadline_s,
        )
        return [HostedEngine(host()) for _ in range(own.replicas)]


def _load_scoring(model: FrozenModel) -> list[Engine]:
    return [TorchKind().for_scoring(model)]


def start_lagged_engines(rollout: Rollout, spec: Model, seed: int, threads: int) -> list[HostedEngine]:
    """Start a process with an engine for each copy of the weights that samples."""
    load = partial(_load_lagged, rollout, spec, seed, threads)
    # Less than the sessions' deadline, so that the error names the engine.
    host = Host("the torch engine", load, threads=threads, deadline_s=rollout.deadline_s / 2)
    return [HostedEngine(host, copy) for copy in range(rollout.lag + 1)]


def _load_lagged(rollout: Rollout, spec: Model, seed: int, threads: int) -> list[TorchEngine]:
    model = load_model(spec, seed)
    # Copies share frozen parameters, the base of an adapter, so nothing else may be frozen before.
    copies = [model, *(copy_on_base(model) for _ in range(rollout.lag))]
    engines = [TorchKind().for_rollout(rollout, spec.path, copy.requires_grad_(False)) for copy in copies]
    # While the learner waits, its cores are free, and engines of two steps can run concurrently.
    share_order((engine.thread for engine in engines), max(1, count_cores() // threads))
    return engines

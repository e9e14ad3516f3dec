"""What is added to each of vLLM's workers, in the process of the engine or in one of their own.

In the processes of vLLM only: importing this imports vLLM.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from practicum.devices import gpu_id
from practicum.engines.shared_memory import MemoryBucket
from practicum.engines.vllm.adapter_products import repair_products
from practicum.engines.vllm.plain_logprobs import PlainLogprobSampler
from practicum.engines.vllm.reload_weights import VllmSleep, reload_folder, weight_bytes
from practicum.engines.vllm.vllm_messages import VllmSetup
from practicum.engines.vllm.weight_delivery import SlotBucket
from practicum.engines.vllm.weight_layout import Arrival, LearntParameter
from practicum.engines.vllm.weight_transfer import PracticumTransfer
from practicum.processes.child_main import die_with_parent, message_of_error

repair_products()  # vLLM imports this before it makes the model


class WorkerFacts(NamedTuple):
    """Bytes that a worker holds, its threads, and its GPU."""

    weights: int
    kv: int
    threads: int
    gpu: str | None


class WorkerReply(NamedTuple):
    """What a worker's work gave, or the message of its error: exceptions lose theirs between processes."""

    result: Any
    error: str | None


class PracticumWorker:
    """Mixed into vLLM's worker class (its `worker_extension_cls`), to be called in all workers."""

    def practicum_do(self, what: str, args: tuple[Any, ...]) -> WorkerReply:
        """Do one of the things of `WorkerPart`."""
        part = vars(self).get("_practicum")
        if part is None:
            part = self._practicum = WorkerPart(self)
        try:
            return WorkerReply(getattr(part, what)(*args), None)
        except Exception as error:
            return WorkerReply(None, message_of_error(error))


class WorkerPart:
    """What a worker does beside vLLM's own work."""

    def __init__(self, worker: Any) -> None:
        self._worker, self._runner = worker, worker.model_runner
        self._loading = False

    def prepare(self, setup: VllmSetup, vocab: int) -> None:
        """First of all."""
        if setup.workers > 1:
            # Ctrl-C goes to the whole group: the first process decides. And nothing outlives that.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            threading.Thread(target=die_with_parent, name="parent", daemon=True).start()
            multiprocessing.current_process().name = "vLLM worker"
        self._sampler = PlainLogprobSampler.take_over(self._runner.sampler, vocab)
        self._memory = VllmSleep(self._runner, keeps_weights=setup.keeps_weights)

    def facts(self) -> WorkerFacts:
        """Measured from its tensors."""
        # Layers may have their KV memory in one block.
        blocks = {
            c.untyped_storage().data_ptr(): c.untyped_storage().nbytes() for c in self._runner.kv_caches
        }
        weights, gpu = weight_bytes(self._runner.get_model()), gpu_id(self._runner.device)
        return WorkerFacts(weights, sum(blocks.values()), torch.get_num_threads(), gpu)

    def score_by(self, temperature: float, vocab: int) -> None:
        """What holds for prompts that are scored from now on."""
        self._sampler.temperature, self._sampler.vocab = temperature, vocab

    def sleep(self) -> None:
        self._memory.begin()

    def wake(self) -> None:
        self._memory.end()

    def reload_folder(self) -> None:
        reload_folder(self._runner)

    def begin_load(self) -> None:
        """Expect weights; what is left of an earlier load is forgotten."""
        if self._loading:
            self._transfer.give_up()
            self._worker.finish_weight_update()
        self._worker.start_weight_update()
        self._loading = True

    def init_way(self, way: str, given: Mapping[str, Any]) -> None:
        """Begin with one of vLLM's own backends."""
        self._worker.init_weight_transfer_engine({"way": way, "given": dict(given)})

    def take(self, way: str, given: MemoryBucket | SlotBucket | Mapping[str, Any]) -> None:
        """Take some weights."""
        self._loading = False  # so has vLLM, if it fails
        self._worker.update_weights({"way": way, "given": given})
        self._loading = True

    def check_unused(self, bucket: MemoryBucket) -> None:
        self._transfer.check_unused(bucket)

    def end_load(self) -> tuple[Mapping[str, tuple[int, ...]], list[LearntParameter]] | None:
        """Use the weights; see `PracticumTransfer.learnt`."""
        self._worker.finish_weight_update()
        self._loading = False
        return self._transfer.learnt()

    def use_layout(self, arrivals: Sequence[Sequence[Sequence[Arrival]]]) -> None:
        """Take buckets by this layout from now on: of each worker, what it takes from each."""
        self._transfer.arrivals = arrivals[self._worker.rank]

    @property
    def _transfer(self) -> PracticumTransfer:
        return self._worker.weight_transfer_engine

"""The sending side of weights: from the learner's process, or an actor's, to a vLLM process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import chain
from typing import Any

from torch import Tensor

from practicum.devices import gpu_id
from practicum.engines.shared_memory import SharedBlock
from practicum.engines.vllm.gpu_weights import GroupSender, choose_way, send_ipc
from practicum.engines.vllm.vllm_messages import VllmFacts
from practicum.engines.vllm.weight_delivery import BUCKET_BYTES, LayoutWriter, SlotBucket
from practicum.engines.vllm.weight_layout import WeightLayout
from practicum.errors import EngineError
from practicum.models.offloaded_weights import in_buckets

LOAD_S = 300.0
"""How long vLLM may take for a part of a load, and for any other call that is not sampling or scoring."""
_BUCKET = "a bucket of weights"
Weights = Iterable[tuple[str, Tensor]]
Post = Callable[[str, tuple[object, ...], str], Future[Any]]
"""Asks something of the process: what, with which arguments, and what that is in an error message."""


class WeightSender:
    """Sends one load after the other, and keeps what makes the next one faster."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._block: SharedBlock | None = None
        self._group: GroupSender | None = None
        self.layout: WeightLayout | None = None
        """Where vLLM has the weights, after a load that showed it."""

    def send(self, weights: Weights, version: int, facts: VllmFacts) -> None:
        """All weights; after an error vLLM refuses to work until it got all of another load."""
        about = f"loading weights of version {version}"
        self._ask("load", (), about)
        self._send(iter(weights), facts)
        learnt: WeightLayout | None = self._ask("loaded", (version,), about)
        self.layout = learnt or self.layout

    def free(self) -> None:
        """Give the shared memory back until the next load."""
        block, self._block = self._block, None
        if block is not None:
            block.close()

    def close(self) -> None:
        """After the last load."""
        self.free()
        if self._group is not None:
            self._group.close()

    def _ask(self, what: str, args: tuple[object, ...], about: str) -> Any:
        return await_reply(self._post(what, args, about))

    def _send(self, weights: Iterator[tuple[str, Tensor]], facts: VllmFacts) -> None:
        """By the way that fits where they are."""
        first = next(weights, None)
        if first is None:
            raise EngineError("there are no weights to load")
        weights = chain([first], weights)
        way = choose_way(gpu_id(first[1].device), facts.gpus)
        if way == "memory":
            self._block = self._block or SharedBlock()
            if self.layout is None:
                self._send_by_name(self._block, weights)
            else:
                self._send_by_layout(self._block, self.layout, weights)
            return

        def take(by: str, given: Mapping[str, Any]) -> None:
            self._ask("weights", (by, given), "taking weights of a GPU")

        def begin(by: str, given: Mapping[str, Any]) -> None:
            self._ask("way", (by, given), "meeting the learner's GPU")

        if way == "ipc":
            send_ipc(weights, take)
        else:
            self._group = self._group or GroupSender(facts.workers, begin, take)
            self._group.send(weights)

    def _send_by_name(self, block: SharedBlock, weights: Weights) -> None:
        """For vLLM's own loaders."""
        for some in in_buckets(weights, BUCKET_BYTES):
            self._ask("weights", ("memory", block.fill(some)), _BUCKET)

    def _send_by_layout(self, block: SharedBlock, layout: WeightLayout, weights: Weights) -> None:
        """Write weights to where vLLM has them; it takes some while others are written."""
        reading: deque[tuple[int, Future[Any]]] = deque()

        def free_slot() -> int | None:
            if not reading:
                return None
            slot, read = reading.popleft()
            await_reply(read)
            return slot

        def send(whole: Iterable[tuple[int, SlotBucket]]) -> None:
            for slot, bucket in whole:
                reading.append((slot, self._post("weights", ("memory", bucket), _BUCKET)))

        writer = LayoutWriter(layout, block, free_slot)
        unused: list[tuple[str, Tensor]] = []
        for name, tensor in weights:
            if name in layout.shapes:
                send(writer.put(name, tensor))
            else:
                unused.append((name, tensor.detach().cpu().clone()))
        self._send_unused(unused)
        send(writer.rest())
        while free_slot() is not None:
            pass

    def _send_unused(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Weights that the layout does not know, such as tied ones under another name: vLLM looks at them."""
        if not weights:
            return
        block = SharedBlock()  # the other one is in use
        try:
            for some in in_buckets(weights, BUCKET_BYTES):
                self._ask("unused", (block.fill(some),), _BUCKET)
        finally:
            block.close()


def await_reply(future: Future[Any], seconds: float = LOAD_S) -> Any:
    """The reply to a request, with a deadline."""
    try:
        return future.result(seconds)
    except TimeoutError:
        raise EngineError(f"vLLM did not answer for {seconds:g} s") from None

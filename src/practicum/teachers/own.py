"""A teacher in processes of its own: it scores a row as soon as it is finished, while others roll out."""

from __future__ import annotations

import asyncio
import signal
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from safetensors.torch import load

from practicum.errors import TeacherError
from practicum.recipe.schema import Model
from practicum.recipe.teaching import Own, OwnPlacement, Teacher
from practicum.rollout.protocol import Scores
from practicum.teachers.head import OutputHead
from practicum.teachers.place import Row, Wanted, no_scores
from practicum.teachers.replica import Replica
from practicum.teachers.worker import Facts, Setup

_GRACE_S = 2.0
"""How long a process may take to end when asked, and again when terminated; then it is killed."""


class OwnTeacher:
    """A place with `placement.own.replicas` processes; a row goes to the one with the fewest tokens waiting.

    `model` and `seed` say where each process loads its model from (see `models.load.load_model`). `start`,
    then `ready`, then score; the methods that are no coroutines block and must not be called by coroutines.
    """

    def __init__(self, name: str, teacher: Teacher, *, model: Model | None = None, seed: int = 0) -> None:
        placement = teacher.placement
        options = placement.own if isinstance(placement, OwnPlacement) else Own()
        source = model or Model(path=teacher.model, dtype=teacher.dtype, device=teacher.device)
        setup = Setup(
            model=source,
            seed=seed,
            key=f"teachers.{name}.model",
            threads=options.threads,
            batch_tokens=teacher.batch_tokens,
            context=teacher.context,
        )
        self.name = name
        self.version = 0
        """Of the weights that were loaded last."""
        self._deadline_s = teacher.deadline_s
        self._replicas = [Replica(f"teacher {name}", setup) for _ in range(options.replicas)]
        self._facts: Facts | None = None
        self._started = self._closed = False

    @property
    def busy_s(self) -> float:
        """Seconds of scoring so far, summed over the processes."""
        return sum(replica.busy_s for replica in self._replicas)

    @property
    def pids(self) -> list[int]:
        """The processes' ids, once started."""
        return [replica.pid for replica in self._replicas]

    def start(self) -> None:
        """Launch the processes; they load side by side while the caller goes on."""
        self._started = True
        for replica in self._replicas:
            replica.start()

    def ready(self, timeout: float) -> Facts:
        """Wait until every process has its model. If one fails or is late, all are ended."""
        until = time.monotonic() + timeout
        try:
            for replica in self._replicas:
                self._facts = replica.hello.result(max(0.0, until - time.monotonic()))
        except TimeoutError:
            self.close()
            raise TeacherError(
                f"teacher {self.name} was not ready after {timeout:g} s: a model that large needs more time, "
                "or the machine is too busy"
            ) from None
        except TeacherError:
            self.close()
            raise
        return self.facts()

    def facts(self) -> Facts:
        """What its model is like; known once `ready`."""
        if self._facts is None:
            raise TeacherError(f"teacher {self.name} is not ready: call start() and ready() first")
        return self._facts

    def head(self) -> OutputHead:
        """A copy of the output head as it is now: to be asked for again after `load_weights`."""
        tensors, scalings = self._wait([self._replicas[0].post("head", (), "giving its output head")[1]])[0]
        held = load(tensors)
        return OutputHead(held["weight"], held.get("bias"), *scalings)

    def load_weights(self, path: Path, version: int) -> None:
        """Take the weights of a safetensors file in every process; not while rows are under way.

        If one process can't, all are ended: rows must not be scored by different weights.
        """
        what = f"loading weights from {path}"
        if any(replica.waiting_tokens for replica in self._replicas):
            raise TeacherError(f"teacher {self.name} can't begin {what} while rows are under way")
        try:
            self._wait([r.post("load", (str(path), version), what)[1] for r in self._replicas])
        except TeacherError as error:
            self._break(str(error), self._replicas)
            raise
        self.version = version

    async def score(self, row: Row, wanted: Wanted) -> Scores:
        """Scores of one row, the same bits as from an engine in this process.

        A row without an answer after the teacher's deadline kills the process that had it.
        """
        facts = self.facts()
        for replica in self._replicas:
            replica.check(row.name)
        if facts.context is not None and len(row.ids) > facts.context:
            raise TeacherError(
                f"teacher {self.name} can't score {row.name}: {len(row.ids)} tokens, its context is "
                f"{facts.context}; shorten prompts or answers, or raise teachers.{self.name}.context"
            )
        if row.start == len(row.ids):
            return no_scores(wanted, facts.hidden, self.version)
        replica = min(self._replicas, key=lambda r: r.waiting_tokens)
        args = (list(row.ids), row.start, wanted.top_k, wanted.temperature, wanted.hidden)
        number, future = replica.post("score", args, row.name, len(row.ids))
        # Rows that are handed in during one turn of the event loop go out together.
        asyncio.get_running_loop().call_soon(replica.flush)
        try:
            async with asyncio.timeout(self._deadline_s):
                tensors, version = await asyncio.wrap_future(future)
        except TimeoutError:
            self._break(f"it did not answer for {row.name} within {self._deadline_s:g} s", [replica])
            raise TeacherError(
                f"teacher {self.name} did not answer for {row.name} within {self._deadline_s:g} s; its "
                f"process {replica.pid} was killed. If it is only slow, raise teachers.{self.name}.deadline_s"
            ) from None
        finally:
            replica.forget(number)
        held = load(tensors)
        return Scores(
            held["logprobs"], held.get("topk_ids"), held.get("topk_logprobs"), version, held.get("hidden")
        )

    def close(self) -> None:
        """End the processes: ask, then terminate, then kill; within 5 s. Rows under way fail."""
        if self._closed or not self._started:
            return
        self._closed = True
        for replica in self._replicas:
            replica.ask_to_stop("it was closed")
        left = self._still_there(self._replicas, _GRACE_S)
        for how, grace in ((signal.SIGTERM, 1.0), (signal.SIGKILL, 1.0)):
            for replica in left:
                replica.end(how)
            left = self._still_there(left, grace)
        for replica in self._replicas:
            replica.release()

    def _still_there(self, replicas: list[Replica], grace: float) -> list[Replica]:
        until = time.monotonic() + grace
        return [r for r in replicas if not r.gone(max(0.0, until - time.monotonic()))]

    def _break(self, why: str, replicas: list[Replica]) -> None:
        for replica in replicas:
            replica.kill(why)

    def _wait(self, futures: list[Future[Any]]) -> list[Any]:
        for replica in self._replicas:
            replica.flush()
        until = time.monotonic() + self._deadline_s
        try:
            return [future.result(max(0.0, until - time.monotonic())) for future in futures]
        except TimeoutError:
            why = f"it did not answer within {self._deadline_s:g} s"
            late = [r for r, f in zip(self._replicas, futures, strict=False) if not f.done()]
            self._break(why, late)
            raise TeacherError(f"teacher {self.name}: {why} and was killed") from None

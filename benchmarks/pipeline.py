"""A training step of small actors in two versions that differ in one thing: the way that columns take.

Rollout, reward, teacher, and two learner ranks that compute old logprobs, advantages and an update. Through
the store, the controller has keys and tags. Through the controller, every column that a stage declares comes
to it from who made it, and goes from it to who needs it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from torch import Tensor
from torch.nn.functional import linear, log_softmax

from benchmarks.harness import Measured
from benchmarks.rows import FORMS, draw_lengths, make_batch
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.ragged import Column, Ragged

RANKS = 2
WIDTH, VOCAB, PATCH = 64, 64, 768
CHUNK = 8192
"""Tokens that are computed at once."""
PARTITION = "train"
DEADLINE_S = 120.0
IMAGES = "multi_modal_inputs"


@dataclass(frozen=True, slots=True)
class Load:
    """A batch: rows, fewest and most tokens of one, and patches of the image that each has."""

    rows: int
    tokens: tuple[int, int]
    patches: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """What a stage reads and writes, and who runs it: one worker, or all ranks with a share each."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    role: str
    sees: bool = False
    """Whether it looks at images."""


STAGES = {
    "rollout": Stage((), ("response_ids", "response_mask", "rollout_logprobs"), "rollout", sees=True),
    "reward": Stage(("response_ids",), ("reward",), "reward"),
    "teachers": Stage(("response_ids",), ("teacher_logprobs",), "teacher", sees=True),
    "old_logprobs": Stage(("response_ids",), ("old_logprobs", "values"), "ranks", sees=True),
    "advantages": Stage(
        ("reward", "response_mask", "old_logprobs", "teacher_logprobs"), ("advantages",), "first rank"
    ),
    "update": Stage(
        ("response_ids", "response_mask", "rollout_logprobs", "old_logprobs", "advantages"),
        (),
        "ranks",
        sees=True,
    ),
}


def reads_of(name: str, load: Load) -> list[str]:
    """The fields that a stage reads of this load."""
    stage = STAGES[name]
    return [*stage.reads, *([IMAGES] if stage.sees and load.patches and name != "rollout" else [])]


class Brain:
    """A model of 16 thousand operations for a token: an embedding, a layer, and logprobs over VOCAB.

    Patches of an image are projected and added to their row's tokens.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator) * 0.05).requires_grad_()

        self.embed, self.layer = weight(VOCAB, WIDTH), weight(WIDTH, WIDTH)
        self.look = weight(WIDTH, PATCH)

    def weights(self) -> list[Tensor]:
        """What is learnt."""
        return [self.embed, self.layer, self.look]

    def glance(self, images: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """What each image adds to its row's tokens [B, WIDTH]."""
        seen = [linear(image["pixel_values"], self.look).mean(0) for image in images]
        return torch.stack(seen) if seen else torch.zeros(0, WIDTH)

    def logprobs(self, ids_N: Tensor, seen_NW: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logprob and entropy of each token [N]."""
        found, spread = [], []
        for at in range(0, len(ids_N), CHUNK):
            ids = ids_N[at : at + CHUNK]
            hidden = self.embed[ids] if seen_NW is None else self.embed[ids] + seen_NW[at : at + CHUNK]
            logprobs = log_softmax(linear(torch.tanh(linear(hidden, self.layer)), self.embed), -1)
            found.append(logprobs.gather(1, ids[:, None])[:, 0])
            spread.append(-(logprobs.detach().exp() * logprobs.detach()).sum(-1))
        return torch.cat(found), torch.cat(spread)

    def learn(self, ids_N: Tensor, seen_NW: Tensor | None, weights_N: Tensor) -> None:
        """Forward and backward of a weighted likelihood."""
        for at in range(0, len(ids_N), CHUNK):
            part = slice(at, at + CHUNK)
            seen = None if seen_NW is None else seen_NW[part]
            logprobs, _ = self.logprobs(ids_N[part], seen)
            (logprobs * weights_N[part]).sum().backward(retain_graph=seen_NW is not None)


class StageWorker:
    """An actor that computes stages, on columns of the store or of calls."""

    def __init__(self, handle: Any) -> None:
        torch.set_num_threads(1)
        self._store = handle.connect(DEADLINE_S)
        self.brain = Brain()
        self._images: list[Any] = []

    def prepare(self, load: Load) -> None:
        """Make the images that the prompts of this load bring with them."""
        generator = torch.Generator().manual_seed(1)
        self._images = []
        for _ in range(load.rows if load.patches else 0):
            self._images.append({"pixel_values": torch.rand(load.patches, PATCH, generator=generator)})

    def by_store(self, name: str, batch: BatchRef, load: Load) -> float:
        """Run a stage on rows of the store; gives the seconds of computing."""
        reads = reads_of(name, load)
        columns = self._store.get(batch, reads) if reads else {}
        began = time.perf_counter()
        written = self._compute(name, columns, load)
        seconds = time.perf_counter() - began
        if written:
            self._store.put(batch, written, keep_tags=name != "rollout")
        return seconds

    def by_call(self, name: str, sent: Any, load: Load, form: str) -> tuple[float, Any]:
        """Run a stage on columns that came with the call, and send back what it writes."""
        columns = FORMS[form].unwrap(sent) if sent else {}
        began = time.perf_counter()
        written = self._compute(name, columns, load)
        seconds = time.perf_counter() - began
        return seconds, FORMS[form].wrap(written) if written else None

    def _compute(self, name: str, columns: Mapping[str, Any], load: Load) -> dict[str, Column]:
        if name == "rollout":
            return self._roll_out(load)
        if name == "reward":
            sums = [float(row.sum() % 2) for row in columns["response_ids"].rows]
            return {"reward": torch.tensor(sums)}
        if name == "advantages":
            return {"advantages": _advantages(columns)}
        ids: Ragged = columns["response_ids"]
        images = columns.get(IMAGES, [])
        if name == "update":
            weights_N = columns["advantages"].values * columns["response_mask"].values
            self.brain.learn(ids.values, self._seen(images, ids), weights_N)
            return {}
        with torch.no_grad():
            logprobs, entropy = self.brain.logprobs(ids.values, self._seen(images, ids))
        if name == "teachers":
            return {"teacher_logprobs": Ragged.packed(logprobs, ids.lengths)}
        return {
            "old_logprobs": Ragged.packed(logprobs, ids.lengths),
            "values": Ragged.packed(entropy, ids.lengths),
        }

    @torch.no_grad()
    def _roll_out(self, load: Load) -> dict[str, Column]:
        lengths = draw_lengths(load.rows, load.tokens)
        ids_N = torch.randint(0, VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(2))
        ids = Ragged.packed(ids_N, lengths)
        logprobs, _ = self.brain.logprobs(ids_N, self._seen(self._images, ids))
        written: dict[str, Column] = {
            "response_ids": ids,
            "response_mask": Ragged.packed(torch.ones(len(ids_N), dtype=torch.bool), lengths),
            "rollout_logprobs": Ragged.packed(logprobs, lengths),
        }
        if self._images:
            written[IMAGES] = self._images
        return written

    def _seen(self, images: Sequence[Mapping[str, Tensor]], ids: Ragged) -> Tensor | None:
        if not images:
            return None
        return self.brain.glance(images).repeat_interleave(torch.tensor(ids.lengths), 0)


def _advantages(columns: Mapping[str, Any]) -> Ragged:
    """The reward above the mean, and how much more the teacher likes a token than the student does."""
    reward_B: Tensor = columns["reward"]
    old: Ragged = columns["old_logprobs"]
    above_N = (reward_B - reward_B.mean()).repeat_interleave(torch.tensor(old.lengths))
    pull_N = columns["teacher_logprobs"].values - old.values
    return Ragged.packed((above_N + 0.1 * pull_N) * columns["response_mask"].values, old.lengths)


class Pipeline:
    """The controller of the step, and its workers."""

    def __init__(self, handle: Any) -> None:
        actor: Any = ray.remote(num_cpus=1)(StageWorker)
        ranks = [actor.remote(handle) for _ in range(RANKS)]
        self._workers = {name: [actor.remote(handle)] for name in ("rollout", "reward", "teacher")}
        self._workers |= {"ranks": ranks, "first rank": ranks[:1]}
        self._store = handle.connect(DEADLINE_S)
        self._columns: dict[str, Column] = {}

    def prepare(self, load: Load) -> None:
        """Steps are of this load from now on."""
        self._load, self._lengths = load, draw_lengths(load.rows, load.tokens)
        ray.get(self._workers["rollout"][0].prepare.remote(load))

    def step(self, form: str | None) -> Measured:
        """One step; with a form, columns come and go in it, without one they stay in the store.

        Gives all seconds, and those of computing: of each stage its slowest worker's.
        """
        began = time.perf_counter()
        computed = 0.0
        if form is None:
            batch = make_batch(PARTITION, self._lengths)
            for name in STAGES:
                computed += self._by_store(name, batch)
            self._store.clear(PARTITION)
        else:
            for name in STAGES:
                computed += self._by_calls(name, form)
            self._columns = {}
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "computing": computed, "moving": seconds - computed}

    def _by_store(self, name: str, batch: BatchRef) -> float:
        workers = self._workers[STAGES[name].role]
        size = len(batch) // len(workers)
        parts = [batch.take(range(i * size, (i + 1) * size)) for i in range(len(workers))]
        calls = zip(workers, parts, strict=True)
        return max(ray.get([w.by_store.remote(name, part, self._load) for w, part in calls]))

    def _by_calls(self, name: str, form: str) -> float:
        workers = self._workers[STAGES[name].role]
        reads = {field: self._columns[field] for field in reads_of(name, self._load)}
        size = self._load.rows // len(workers)
        calls = []
        for i, worker in enumerate(workers):
            rows = range(i * size, (i + 1) * size)
            cut = {field: _cut(column, rows) for field, column in reads.items()}
            sent = FORMS[form].wrap(cut) if cut else None
            calls.append(worker.by_call.remote(name, sent, self._load, form))
        answers = ray.get(calls)
        parts = [FORMS[form].unwrap(written) for _, written in answers if written]
        for field in parts[0] if parts else ():
            self._columns[field] = _joined([part[field] for part in parts])
        return max(seconds for seconds, _ in answers)


def _cut(column: Column, rows: range) -> Column:
    return column.select(rows) if isinstance(column, Ragged) else column[rows.start : rows.stop]


def _joined(parts: list[Any]) -> Column:
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Ragged):
        values = torch.cat([part.values for part in parts])
        return Ragged.packed(values, [n for part in parts for n in part.lengths])
    return torch.cat(parts) if isinstance(parts[0], Tensor) else [one for part in parts for one in part]

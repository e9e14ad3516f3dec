"""A teacher in processes of its own: it scores a row as soon as it is finished, while others roll out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import load, save, save_file
from torch import Tensor

from practicum.engines.protocol import Scores
from practicum.errors import TeacherError
from practicum.models.attention import LogitScalings
from practicum.models.output_head import OutputHead
from practicum.places.model_worker import TeacherSetup
from practicum.places.place import ScoreOptions, ScoreRow, no_scores, too_long
from practicum.places.replica_processes import ReplicaProcesses
from practicum.recipe.derived import own_options
from practicum.recipe.schema.recipe import Model
from practicum.recipe.schema.teacher_sections import Teacher


class OwnTeacher(ReplicaProcesses):
    """A place with `placement.own.replicas` processes; a row goes to the one with the fewest tokens waiting.

    `model` and `seed` say where each process loads its model from (see `models.load.load_model`).
    """

    def __init__(self, name: str, teacher: Teacher, *, model: Model | None = None, seed: int = 0) -> None:
        options = own_options(teacher)
        setup = TeacherSetup(
            model=model or Model(path=teacher.model, dtype=teacher.dtype, device=teacher.device),
            seed=seed,
            key=f"teachers.{name}.model",
            threads=options.threads,
            batch_tokens=teacher.batch_tokens,
            context=teacher.context,
        )
        super().__init__(
            f"teacher {name}",
            f"teachers.{name}",
            setup,
            replicas=options.replicas,
            deadline_s=teacher.deadline_s,
        )
        self.name = name
        self.version = 0
        """Of the weights that were loaded last."""

    def head(self) -> OutputHead:
        """A copy of the output head as it is now: to be asked for again after `load_weights`."""
        tensors, scalings = self._wait([self._replicas[0].post("head", (), "giving its output head")[1]])[0]
        held = load(tensors)
        return OutputHead(held["weight"], held.get("bias"), LogitScalings(*scalings))

    def take(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Become what these weights are, in every process."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / "weights.safetensors"
            save_file({key: x.contiguous() for key, x in weights.items()}, path)
            self.load_weights(path, version)

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

    async def score(self, row: ScoreRow, wanted: ScoreOptions) -> Scores:
        """Scores of one row, the same bits as from an engine in this process.

        A row without an answer after the teacher's deadline kills the process that had it.
        """
        facts = self.facts()
        self.check(row.name)
        if facts.context is not None and len(row.ids) > facts.context:
            raise TeacherError(too_long(self.name, row, facts.context))
        if row.start == len(row.ids):
            return no_scores(wanted, facts.hidden, self.version)
        pictures = None if row.images is None else save(row.images.as_inputs())
        args = (
            list(row.ids),
            row.start,
            wanted.top_k,
            wanted.temperature,
            wanted.hidden,
            wanted.vocab,
            pictures,
        )
        tensors, version = await self.ask("score", args, row.name, len(row.ids))
        held = load(tensors)
        return Scores(
            held["logprobs"], held.get("topk_ids"), held.get("topk_logprobs"), version, held.get("hidden")
        )

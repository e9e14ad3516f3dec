"""A teacher behind a URL: an OpenAI-compatible completions server that returns prompt logprobs.

`probe` of `teachers.probe` finds out before the first step whether a server can do that.
"""

from __future__ import annotations

from typing import Any

from practicum.engines.protocol import Scores
from practicum.errors import TeacherError
from practicum.places.http_client import Access, Client
from practicum.places.http_client import Refused as Refused
from practicum.places.http_client import Unreachable as Unreachable
from practicum.places.packed_scores import offers_packed, packed_request
from practicum.places.place import ScoreOptions, ScoreRow, no_scores
from practicum.places.prompt_logprobs import Unusable, read_scores, request_body
from practicum.recipe.schema.teacher_sections import Teacher

_NO_ROOM = "max_tokens must be at least 1"
"""What vLLM says of a sequence that just fills its context."""


class RemoteTeacher(Client):
    """A place behind a URL; at most `teacher.concurrency` requests are open at once."""

    def __init__(self, name: str, teacher: Teacher) -> None:
        assert teacher.url is not None
        assert teacher.model is not None
        access = Access(
            path=f"teachers.{name}",
            url=teacher.url,
            model=teacher.model,
            deadline_s=teacher.deadline_s,
            concurrency=teacher.concurrency,
            retries=teacher.retries,
            api_key_env=teacher.api_key_env,
        )
        super().__init__(f"teacher {name}", access)
        self.name = name
        self._packs = False

    async def score(self, row: ScoreRow, wanted: ScoreOptions) -> Scores:
        """Scores of one row, at temperature 1; all that servers give."""
        if wanted.hidden or wanted.temperature != 1:
            what = "hidden states" if wanted.hidden else f"logprobs at temperature {wanted.temperature:g}"
            raise TeacherError(
                f"teacher {self.name} can't give {what} of {row.name}: "
                "a server gives logprobs at temperature 1"
            )
        if row.images is not None:
            raise TeacherError(
                f"teacher {self.name} can't see the pictures of {row.name}: load it here, without "
                f"teachers.{self.name}.url"
            )
        if row.start == len(row.ids):
            return no_scores(wanted, 0)
        try:
            answer = await self.ask_scores(row, wanted.top_k, wanted.vocab)
        except Refused as refusal:
            if _NO_ROOM not in refusal.message:
                raise
            why = (
                f"its {len(row.ids)} tokens and one that is generated do not fit the server's context "
                f"({refusal.message}): serve it with a longer one, or shorten prompts or answers"
            )
            raise TeacherError(self.problem(row.name, why)) from refusal
        try:
            return read_scores(answer, row.ids, row.start, wanted.top_k)
        except Unusable as error:
            raise TeacherError(self.problem(row.name, str(error))) from error

    async def models(self) -> dict[str, dict[str, Any]]:
        """What the server says of each of its models, by name; Refused if it has no such list."""
        answer = await self.ask("GET", "/models", None, "its models")
        try:
            return {entry["id"]: entry for entry in answer["data"]}
        except (KeyError, TypeError) as error:
            why = f"{self.url}/models without a list of models"
            raise Refused(self.problem("its models", why), 200, why) from error

    async def ask_scores(self, row: ScoreRow, top_k: int, vocab: int | None = None) -> Any:
        """The server's answer about a row, as it came: packed where the server has offered that before."""

        def body() -> Any:
            if self._packs:
                return packed_request(self.model, row.ids, row.start, top_k, vocab)
            return request_body(self.model, row.ids, max(1, top_k))

        answer = await self.ask("POST", "/completions", body, row.name)
        self._packs = self._packs or offers_packed(answer)
        return answer

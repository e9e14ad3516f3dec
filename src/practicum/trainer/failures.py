"""Sessions that failed, and users' tools that raised: told once with the reason, counted to the end."""

from __future__ import annotations

import re
from collections.abc import Callable

from practicum.dataplane.batch import BatchRef
from practicum.user_code import shorten

_SHOWN = 5
_SHOWN_LINES = 12
_SHOWN_CHARS = 300
_KEPT_TRACES = 100


class Failures:
    """Counts failed sessions by reason. Reasons that differ only in numbers are one.

    `say` is told the first of each reason, for the screen; `log` each failure, and each traceback of a user's
    code once.
    """

    def __init__(self, say: Callable[[str], None], log: Callable[[str], None]) -> None:
        self._say, self._log = say, log
        self._counts: dict[str, int] = {}
        self._first: dict[str, str] = {}
        self._traces: set[str] = set()

    def note(self, batch: BatchRef) -> None:
        """The sessions of a batch of which some may have failed."""
        noted: set[tuple[int, int]] = set()
        for key, tags in batch:
            name = key.prompt, key.session
            if tags.failure is not None and name not in noted:
                noted.add(name)
                self._log(f"failed: {key}: {tags.failure}")
                kind = self._tell(f"failed: {key}: ", tags.failure, tags.trace)
                self._counts[kind] = self._counts.get(kind, 0) + 1
            elif tags.failure is None and tags.trace is not None:
                self._tell(f"a tool in {key} raised ", tags.trace.splitlines()[-1], tags.trace)
            if tags.trace is not None and tags.trace not in self._traces and len(self._traces) < _KEPT_TRACES:
                self._traces.add(tags.trace)
                self._log(f"traceback of {key}:\n{tags.trace}")

    def _tell(self, whose: str, reason: str, trace: str | None) -> str:
        """Say a reason that is new, with the end of its traceback; gives its kind."""
        kind = re.sub(r"\d+", "#", reason)
        if kind not in self._first:
            self._first[kind] = reason
            lines = [] if trace is None else trace.splitlines()[:-1][-_SHOWN_LINES:]
            end = [shorten(line, _SHOWN_CHARS) for line in lines]
            self._say("\n".join([f"{whose}{reason}", *end]))
        return kind

    def summary(self) -> list[str]:
        """How many sessions failed, by reason, the most frequent first; nothing if none did."""
        ordered = sorted(self._counts.items(), key=lambda item: -item[1])
        lines = [f"failed {count}×: {self._first[kind]}" for kind, count in ordered[:_SHOWN]]
        rest = ordered[_SHOWN:]
        more = f"failed {sum(count for _, count in rest)}×: for {len(rest)} other reasons, see log.txt"
        return [*lines, *([more] if rest else [])]

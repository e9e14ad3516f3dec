"""A worker of vLLM whose loads can be broken from outside: the file that BREAK names says how."""

from __future__ import annotations

import os
from pathlib import Path

from practicum.compat import vllm as compat
from practicum.engines.vllm.worker import PracticumWorker

BREAK = "PRACTICUM_TEST_BREAK"


class BrokenWorker(PracticumWorker):
    """Forgets to pack a tied head if it is told to."""

    def practicum_load(self, path: str | None) -> str | None:
        repack = compat.repack_head
        if Path(os.environ[BREAK]).read_text() == "head":
            compat.repack_head = lambda model: None
        try:
            return super().practicum_load(path)
        finally:
            compat.repack_head = repack

"""A vLLM process whose loads can be broken from outside: the file that BREAK names says how."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path

from practicum.engines.vllm import vllm_process as host
from practicum.engines.vllm.vllm_messages import VllmSetup

BREAK = "PRACTICUM_TEST_BREAK"


def main(pipe: Connection, setup: VllmSetup) -> None:
    """As `host.main`."""
    how = Path(os.environ[BREAK])
    forget, begin_load = host.VllmProcess._forget, host.VllmProcess._begin_load

    def broken_forget(self: host.VllmProcess) -> None:
        if how.read_text() != "cache":
            forget(self)

    def broken_begin_load(self: host.VllmProcess) -> None:
        from practicum.engines.vllm import reload_weights, weight_transfer

        repack = weight_transfer.__dict__.setdefault("_whole_repack", reload_weights.repack_head)
        chosen = (lambda model: None) if how.read_text() == "head" else repack
        reload_weights.repack_head = weight_transfer.repack_head = chosen
        begin_load(self)

    host.VllmProcess._forget, host.VllmProcess._begin_load = broken_forget, broken_begin_load
    host.main(pipe, setup)

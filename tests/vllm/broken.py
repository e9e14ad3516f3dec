"""A vLLM process whose loads can be broken from outside: the file that BREAK names says how."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path

from practicum.engines.vllm import vllm_process as host
from practicum.engines.vllm.vllm_messages import VllmSetup
from practicum.engines.vllm.weight_delivery import WeightDelivery

BREAK = "PRACTICUM_TEST_BREAK"


def main(pipe: Connection, setup: VllmSetup) -> None:
    """As `host.main`."""
    how = Path(os.environ[BREAK])
    forget, load = host.VllmProcess._forget, host.VllmProcess._load

    def broken_forget(self: host.VllmProcess) -> None:
        if how.read_text() != "cache":
            forget(self)

    def broken_load(self: host.VllmProcess, version: int, delivery: WeightDelivery) -> None:
        from practicum.engines.vllm import reload_weights as reload

        repack = reload._repack_head
        if how.read_text() == "head":
            reload._repack_head = lambda model: None
        try:
            load(self, version, delivery)
        finally:
            reload._repack_head = repack

    host.VllmProcess._forget, host.VllmProcess._load = broken_forget, broken_load
    host.main(pipe, setup)

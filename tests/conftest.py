"""For all tests: examples of hypothesis have no deadline, a Ray that is started stays on loopback.

And Ctrl-C works, however the tests were started.
"""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.cluster import ENV

os.environ.update(ENV)  # Ray reads some of it when it is imported
# Machines are shared: time says nothing. Half of hypothesis' own number of examples: minutes count.
settings.register_profile("practicum", deadline=None, max_examples=50)
settings.load_profile("practicum")

# What a script starts with & ignores Ctrl-C, and so do all processes below it: tests would
# send theirs in vain.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def own_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parts of the user's that a test finds, and their fields, are forgotten afterwards."""
    from practicum.dataplane.fields import FIELDS
    from practicum.recipe import own_parts

    monkeypatch.setattr(own_parts, "_found", {})
    before = dict(FIELDS)
    yield
    FIELDS.clear()
    FIELDS.update(before)

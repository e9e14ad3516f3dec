"""For all tests: examples of hypothesis have no deadline, and a Ray that is started stays on loopback."""

import os

from hypothesis import settings

from tests.cluster import ENV

os.environ.update(ENV)  # Ray reads some of it when it is imported
settings.register_profile("practicum", deadline=None)  # machines are shared: time says nothing
settings.load_profile("practicum")

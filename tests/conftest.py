"""What Ray reads from the environment when it is imported, for tests that start one: loopback only."""

import os

from tests.cluster import ENV

os.environ.update(ENV)

"""For all tests: examples of hypothesis have no deadline, a Ray that is started stays on loopback.

And Ctrl-C works, however the tests were started.
"""

import os
import signal

from hypothesis import settings

from tests.cluster import ENV

os.environ.update(ENV)  # Ray reads some of it when it is imported
settings.register_profile("practicum", deadline=None)  # machines are shared: time says nothing
settings.load_profile("practicum")

# What a script starts with & ignores Ctrl-C, and so do all processes below it: tests would
# send theirs in vain.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

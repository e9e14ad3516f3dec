"""`practicum serve`: from the options to a server that runs until Ctrl-C or SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from practicum.serving.address import announcement, listen
from practicum.serving.options import ServeOptions, resolve


def serve(options: ServeOptions, say: Callable[[str], None]) -> None:
    """Serve a model until SIGINT or SIGTERM, which end it cleanly; what can't be is an error with the fix."""
    try:
        with _sigterm_interrupts():
            _serve(options, say)
    except KeyboardInterrupt:
        say("ended")


def _serve(options: ServeOptions, say: Callable[[str], None]) -> None:
    what = resolve(options)
    # Before the model is loaded: a port that is taken should not cost minutes.
    with listen(options.host, options.port) as bound:
        port = int(bound.getsockname()[1])

        def ready() -> None:
            say(announcement(what, port))

        if what.engine == "torch":
            from practicum.serving.torch_server import serve_torch

            serve_torch(what, bound, ready)
            return
    from practicum.serving.vllm_server import serve_vllm

    serve_vllm(what, port, ready)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

"""HuggingFace's hub: whether it can be reached. Asked once per process and answered within two seconds."""

from __future__ import annotations

import os
import socket
import sys
import threading
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from practicum.errors import RecipeError

_DEADLINE_S = 1.5


def is_unreachable(source: str) -> bool:
    """Whether a folder or hub name is not here and the hub does not answer.

    Then HuggingFace's libraries look into their caches only, where they would wait and try again.
    """
    return not Path(source).expanduser().exists() and not _answers()


def not_found(key: str, source: str, what: str) -> RecipeError:
    """What the user is told of a model or dataset that `is_unreachable`."""
    offline_variable = next(
        (name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name)), None
    )
    why = f"{offline_variable} is set" if offline_variable else f"{_endpoint().hostname} can't be reached"
    found = f"{source!r}, which is neither a folder nor in the cache, and {why}"
    path = Path(source).expanduser()
    near = get_close_matches(path.name, os.listdir(path.parent), n=1) if path.parent.is_dir() else []
    hint = f"did you mean {path.parent / near[0]}?" if near else ""
    return RecipeError(key, found, f"a folder, or a {what} of the hub", hint)


@lru_cache(1)
def _answers() -> bool:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    url = _endpoint()
    proxy = getproxies().get(url.scheme)
    if proxy and not proxy_bypass(url.hostname or ""):
        url = urlsplit(proxy)
    if _connects(url.hostname or "", url.port or (443 if url.scheme == "https" else 80)):
        return True
    constants.HF_HUB_OFFLINE = True
    if "datasets.config" in sys.modules:  # has its own copy
        sys.modules["datasets.config"].HF_HUB_OFFLINE = True  # pyright: ignore[reportAttributeAccessIssue]
    return False


def _endpoint() -> SplitResult:
    from huggingface_hub import constants

    return urlsplit(constants.ENDPOINT)


def _connects(host: str, port: int) -> bool:
    """Whether a connection comes about in time; in a thread, for looking up a name has no deadline."""
    connected = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=_DEADLINE_S).close()
        except OSError:
            return
        connected.set()

    thread = threading.Thread(target=connect, name="practicum-hub", daemon=True)
    thread.start()
    thread.join(_DEADLINE_S)
    return connected.is_set()

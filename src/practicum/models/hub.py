"""Check once per process, within two seconds, if the HuggingFace hub can be reached."""

from __future__ import annotations

import os
import socket
import sys
import threading
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from practicum.errors import RecipeError

_DEADLINE_S = 1.5


def is_unreachable(source: str) -> bool:
    """Return True if a model is neither a folder nor cached, and the hub does not respond. Then HuggingFace's
    libraries look into their caches only, where they would wait and try again."""
    return not os.path.exists(Path(source).expanduser()) and not _answers()


def not_found(key: str, source: str, what: str) -> RecipeError:
    """Return the error about a model or dataset that `is_unreachable`."""
    from huggingface_hub import constants

    offline = next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name)), "")
    why = f"{offline} is set" if offline else f"{urlsplit(constants.ENDPOINT).hostname} can't be reached"
    found = f"{source!r}, which is neither a folder nor in the cache, and {why}"
    return RecipeError(key, found, f"a folder, or a {what} of the hub")


@lru_cache(1)
def _answers() -> bool:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    url = urlsplit(constants.ENDPOINT)
    proxy = getproxies().get(url.scheme)
    if proxy and not proxy_bypass(url.hostname or ""):
        url = urlsplit(proxy)
    address, connected = (url.hostname or "", url.port or (443 if url.scheme == "https" else 80)), []

    def connect() -> None:
        try:
            socket.create_connection(address, timeout=_DEADLINE_S).close()
        except OSError:
            return
        connected.append(True)

    # In a thread, for looking up a name has no deadline.
    thread = threading.Thread(target=connect, name="practicum-hub", daemon=True)
    thread.start()
    thread.join(_DEADLINE_S)
    if connected:
        return True
    constants.HF_HUB_OFFLINE = True
    if "datasets.config" in sys.modules:  # has its own copy
        sys.modules["datasets.config"].HF_HUB_OFFLINE = True  # pyright: ignore[reportAttributeAccessIssue]
    return False

"""Where a server listens, and what a user writes into a recipe to reach it."""

from __future__ import annotations

import errno
import json
import socket

from practicum.errors import ServeError
from practicum.serving.options import KEY_ENV, LOOPBACK, Resolved


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to this address, port 0 being any free one; a ServeError if it can't be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ServeError(f"--host {host}: {error.strerror or error}") from error
    try:
        # A server that has just ended leaves connections behind, which do not hold the port for themselves.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        # Two bound sockets that only listen later would both seem to have got the port.
        bound.listen(128)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ServeError(
                f"port {port} of {host} is in use by another process: end it, or choose another --port "
                "(0: any free one)"
            ) from None
        raise ServeError(f"can't listen at {host}, port {port}: {error.strerror}") from error
    return bound


def base_url(host: str, port: int) -> str:
    """The server's address for this machine and, where it listens to others, for them."""
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def announcement(what: Resolved, port: int) -> str:
    """What a user reads when the server is ready, with the line that a recipe needs."""
    options, url = what.options, base_url(what.options.host, port)
    entry = {"url": f"{url}/v1", "model": what.name, "tokenizer": options.model}
    if options.api_key is not None:
        entry["api_key_env"] = KEY_ENV
    pairs = ", ".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in entry.items())
    lines = [
        f"serving {options.model} at {url} by the {what.engine} engine: {what.dtype} on {what.device}, "
        f"sequences of up to {what.context:,} tokens; Ctrl-C ends it. In a recipe:",
        f"teachers: {{teacher: {{{pairs}}}}}",
    ]
    if options.host not in LOOPBACK and options.api_key is None:
        lines.append(f"warning: whoever reaches {options.host} can use it: set --api-key or {KEY_ENV}")
    return "\n".join(lines)

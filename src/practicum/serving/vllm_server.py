"""vLLM's own OpenAI server as a guarded child of this process, with settings that score well."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx2

from practicum.errors import ServeError
from practicum.models.fingerprint import fingerprint_ids
from practicum.places.http_client import message_of
from practicum.places.prompt_logprobs import request_body
from practicum.serving.address import base_url
from practicum.serving.options import Resolved
from practicum.serving.server_child import ServerChild
from practicum.serving.vllm_diagnosis import cause_of, last_lines

START_S = 600.0
"""Seconds in which the server must answer."""
_EACH_S = 0.25
_ANSWER_S = 120.0


def serve_vllm(what: Resolved, port: int, ready: Callable[[], None], *, start_s: float = START_S) -> None:
    """Start `vllm serve`, call `ready` when it has scored a sequence, and stay until it ends.

    A server that ends by itself is a ServeError. Whatever ends this process, no process of vLLM's stays.
    """
    with ServerChild(command(what, port), environment(what), verbose=what.options.verbose) as child:
        url = base_url(_reachable(what.options.host), port)
        _await_health(child, url, what, start_s)
        _try_out(child, url, what)
        ready()
        code = child.wait()
        raise _ended(child, what, f"has ended with exit code {code}")


def command(what: Resolved, port: int) -> list[str]:
    """The command line; options behind `--` come last, so that they win."""
    options = what.options
    words = [sys.executable, "-m", "practicum.serving.vllm_entry", "serve", options.model]
    words += ["--served-model-name", what.name, "--host", options.host, "--port", str(port)]
    words += ["--dtype", what.dtype, "--max-model-len", str(what.context)]
    # Any top_k; and no settings of the model's own for sampling.
    words += ["--max-logprobs", "-1", "--generation-config", "vllm", "--disable-uvicorn-access-log"]
    if what.device == "cpu":
        # Compiling takes a minute for 15 %; sizing the KV memory by itself fails on some machines.
        words += ["--enforce-eager", "--kv-cache-memory-bytes", str(what.kv_bytes)]
    return [*words, *options.more]


def environment(what: Resolved) -> dict[str, str]:
    """Variables of the server; those that are set already stay as they are."""
    wanted = {"VLLM_NO_USAGE_STATS": "1"}
    if what.device == "cpu":
        # Without the first, a C++ compiler runs at the first logprobs. Threads are not bound to cores, where
        # other processes of this machine may be, and do not spin while they wait.
        wanted |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "GOMP_SPINCOUNT": "0"}
    chosen = {name: value for name, value in wanted.items() if name not in os.environ}
    if what.options.threads is not None:
        chosen["OMP_NUM_THREADS"] = str(what.options.threads)
    if what.options.api_key is not None:
        chosen["VLLM_API_KEY"] = what.options.api_key  # not an argument: those can be read by all users
    # The child finds this package where this process did.
    chosen["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return chosen


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _await_health(child: ServerChild, url: str, what: Resolved, start_s: float) -> None:
    until = time.monotonic() + start_s
    with httpx2.Client(timeout=5.0, trust_env=False) as client:
        while not _healthy(client, url):
            # Nobody tells when a server begins to answer: it is asked, and its end ends the waiting.
            if (code := child.wait(_EACH_S)) is not None:
                raise _ended(child, what, f"ended with exit code {code} before it was ready")
            if time.monotonic() > until:
                raise _ended(child, what, f"was not ready after {start_s:g} s and was ended")


def _healthy(client: httpx2.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health").is_success
    except httpx2.TransportError:
        return False


def _try_out(child: ServerChild, url: str, what: Resolved) -> None:
    """Some models pass the start and kill the engine at the first sequence."""
    ids = fingerprint_ids(what.vocab)[: what.context - 1]
    key = what.options.api_key
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body: Any = request_body(what.name, ids, 1)
    try:
        answer = httpx2.post(
            f"{url}/v1/completions", json=body, headers=headers, timeout=_ANSWER_S, trust_env=False
        )
    except httpx2.TransportError as error:
        child.wait(5)
        raise _ended(child, what, f"broke at its first sequence ({type(error).__name__})") from error
    if not answer.is_success:
        child.wait(5)
        said = message_of(answer.text)
        raise _ended(child, what, f"can't score: status {answer.status_code}, {said}")


def _ended(child: ServerChild, what: Resolved, how: str) -> ServeError:
    log = child.log()
    said = last_lines(log)
    return ServeError(f"vllm serve {what.options.model} {how}: {cause_of(log)}\n{said}".rstrip())

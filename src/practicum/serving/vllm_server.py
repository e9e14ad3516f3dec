"""vLLM's own OpenAI server as a guarded child of this process, with settings that score well."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx2

from practicum.engines.vllm.vllm_errors import cause_in_log, last_lines
from practicum.engines.vllm.vllm_messages import ADAPTED_LAYERS, CPU_ENVIRONMENT, most_rank
from practicum.errors import ServeError
from practicum.models.fingerprint import fingerprint_ids
from practicum.models.load_model import load_model
from practicum.models.lora import base_fingerprint
from practicum.models.saved_adapter import SavedAdapter
from practicum.places.http_client import message_of
from practicum.places.prompt_logprobs import request_body
from practicum.processes.guarded_command import GuardedCommand
from practicum.recipe.schema.recipe import Model
from practicum.serving.serve import Resolved, base_url

START_S = 600.0
"""Seconds in which the server must answer."""
_EACH_S = 0.25
_ANSWER_S = 120.0


def serve_vllm(server: Resolved, port: int, ready: Callable[[], None], *, start_s: float = START_S) -> None:
    """Start `vllm serve`, call `ready` when it has scored a sequence, and stay until it ends.

    A server that ends by itself is a ServeError. Whatever ends this process, no process of vLLM's is left.
    """
    _check_bases(server)
    with GuardedCommand(command(server, port), environment(server), verbose=server.options.verbose) as child:
        url = base_url(_reachable(server.options.host), port)
        _await_health(child, url, server, start_s)
        for name in (server.name, *server.adapters):
            _try_out(child, url, server, name)
        ready()
        code = child.wait()
        raise _ended(child, server, f"has ended with exit code {code}")


def command(server: Resolved, port: int) -> list[str]:
    """The command line; options after `--` come last, so that they win."""
    options = server.options
    arguments = [sys.executable, "-m", "practicum.serving.vllm_entry", "serve", options.model]
    arguments += ["--served-model-name", server.name, "--host", options.host, "--port", str(port)]
    arguments += ["--dtype", server.dtype, "--max-model-len", str(server.context)]
    # Any top_k; and no settings of the model's own for sampling.
    arguments += ["--max-logprobs", "-1", "--generation-config", "vllm", "--disable-uvicorn-access-log"]
    arguments += ["--middleware", "practicum.serving.limits.VllmLimits"]
    if server.adapters:
        arguments += _adapter_arguments(server.adapters)
    if server.device == "cpu":
        # Compiling takes a minute for 15 %; sizing the KV memory by itself fails on some machines.
        arguments += ["--enforce-eager", "--kv-cache-memory-bytes", str(server.kv_bytes)]
    return [*arguments, *options.more]


def _adapter_arguments(adapters: Mapping[str, SavedAdapter]) -> list[str]:
    """They are loaded once and stay: there is room for all."""
    rank, count = max(saved.config["r"] for saved in adapters.values()), str(len(adapters))
    named = [{"name": name, "path": str(saved.folder.resolve())} for name, saved in adapters.items()]
    arguments = ["--enable-lora", "--max-loras", count, "--max-cpu-loras", count]
    arguments += ["--max-lora-rank", str(most_rank(rank)), "--lora-target-modules", *ADAPTED_LAYERS]
    arguments += ["--worker-extension-cls", "practicum.serving.adapter_worker.AdapterWorker"]
    return [*arguments, "--lora-modules", *(json.dumps(adapter) for adapter in named)]


def _check_bases(server: Resolved) -> None:
    """A RecipeError if an adapter was trained on other weights; they are loaded here for a moment."""
    known = [saved for saved in server.adapters.values() if saved.base is not None]
    if known:
        spec = Model(path=server.options.model, dtype="bfloat16", device="cpu")
        fingerprint = base_fingerprint(load_model(spec, seed=0, key="MODEL"))
        for saved in known:
            saved.check_base(fingerprint, server.options.model)


def environment(server: Resolved) -> dict[str, str]:
    """Variables of the server; those that are set already stay as they are."""
    defaults = {"VLLM_NO_USAGE_STATS": "1"} | (CPU_ENVIRONMENT if server.device == "cpu" else {})
    chosen = {name: value for name, value in defaults.items() if name not in os.environ}
    if server.options.threads is not None:
        chosen["OMP_NUM_THREADS"] = str(server.options.threads)
    if server.options.api_key is not None:
        chosen["VLLM_API_KEY"] = server.options.api_key  # not an argument: those can be read by all users
    chosen |= server.limits.environment()
    # The child finds this package where this process did.
    chosen["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return chosen


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _await_health(child: GuardedCommand, url: str, server: Resolved, start_s: float) -> None:
    until = time.monotonic() + start_s
    with httpx2.Client(timeout=5.0, trust_env=False) as client:
        while not _healthy(client, url):
            # A server does not announce that it is ready: it is polled until it answers or ends.
            if (code := child.wait(_EACH_S)) is not None:
                raise _ended(child, server, f"ended with exit code {code} before it was ready")
            if time.monotonic() > until:
                raise _ended(child, server, f"was not ready after {start_s:g} s and was ended")


def _healthy(client: httpx2.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health").is_success
    except httpx2.TransportError:
        return False


def _try_out(child: GuardedCommand, url: str, server: Resolved, name: str) -> None:
    """Some models pass the start and kill the engine at the first sequence."""
    ids = fingerprint_ids(server.vocab)[: server.context - 1]
    key = server.options.api_key
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body: Any = request_body(name, ids, 1)
    try:
        answer = httpx2.post(
            f"{url}/v1/completions", json=body, headers=headers, timeout=_ANSWER_S, trust_env=False
        )
    except httpx2.TransportError as error:
        child.wait(5)
        raise _ended(child, server, f"broke at its first sequence ({type(error).__name__})") from error
    if not answer.is_success:
        child.wait(5)
        raise _ended(child, server, f"can't score: status {answer.status_code}, {message_of(answer.text)}")


def _ended(child: GuardedCommand, server: Resolved, how: str) -> ServeError:
    log = child.log()
    sentence = f"vllm serve {server.options.model} {how}: {cause_in_log(log)}"
    return ServeError(f"{sentence}\n{last_lines(log)}".rstrip())

"""`practicum serve`: from the options to a server that runs until Ctrl-C or SIGTERM."""

from __future__ import annotations

import errno
import importlib.util
import ipaddress
import json
import math
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Literal

import torch

from practicum.devices import pick_device
from practicum.engines.vllm.make_vllm import kv_token_bytes, vllm_adapter_problem
from practicum.errors import MissingExtraError, ServeError
from practicum.models.load_model import require_model_folder, skeleton
from practicum.models.model_files import must_read, read_config
from practicum.models.saved_adapter import SavedAdapter
from practicum.recipe.schema.recipe import Model
from practicum.recipe.schema.teacher_sections import Dtype
from practicum.serving.limits import MOST_CONNECTIONS, ServerLimits, default_body_bytes

EngineName = Literal["auto", "torch", "vllm"]
KEY_ENV = "PRACTICUM_API_KEY"
OWN_OPTIONS = ("--host", "--port", "--api-key", "--uds")
"""Options of vLLM's that stand before `--`: the key is required by them."""
KV_TOKENS = 32_768
"""Tokens of KV memory that vLLM gets on a CPU, if the context is no longer than that."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What a user asks of `practicum serve`; None is chosen by `resolve`."""

    model: str
    adapters: tuple[tuple[str, str], ...] = ()
    """Names and folders of adapters of the model, served beside it."""
    host: str = "127.0.0.1"
    port: int = 8000
    engine: EngineName = "auto"
    name: str | None = None
    context: int | None = None
    dtype: Dtype | None = None
    threads: int | None = None
    kv_gb: float | None = None
    api_key: str | None = None
    no_key: bool = False
    """Serve other machines without a key."""
    max_body_mb: float | None = None
    connections: int = MOST_CONNECTIONS
    verbose: bool = False
    more: tuple[str, ...] = ()
    """Further options of `vllm serve`."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """The options with everything chosen."""

    options: ServeOptions
    engine: Literal["torch", "vllm"]
    name: str
    context: int
    dtype: Dtype
    device: str
    kv_bytes: int
    """KV memory of vLLM on a CPU."""
    vocab: int
    limits: ServerLimits
    adapters: Mapping[str, SavedAdapter]


def serve(options: ServeOptions, say: Callable[[str], None]) -> None:
    """Serve a model until SIGINT or SIGTERM, which end it cleanly; mistakes are errors with the fix."""
    try:
        with _sigterm_interrupts():
            _serve(options, say)
    except KeyboardInterrupt:
        say("ended")


def _serve(options: ServeOptions, say: Callable[[str], None]) -> None:
    resolved = resolve(options)
    # Before the model is loaded: a port that is taken should not cost minutes.
    with listen(options.host, options.port) as bound:
        port = int(bound.getsockname()[1])

        def ready() -> None:
            say(announcement(resolved, port))

        if resolved.engine == "torch":
            from practicum.serving.torch_server import serve_torch

            serve_torch(resolved, bound, ready)
            return
    from practicum.serving.vllm_server import serve_vllm

    serve_vllm(resolved, port, ready)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def resolve(options: ServeOptions) -> Resolved:
    """Choose what was left open; mistakes are errors here, before any weights are loaded."""
    engine = _engine(options)
    _check_key(options)
    require_model_folder(options.model, "MODEL")
    with must_read(options.model, "MODEL", "a causal language model in HuggingFace format"):
        config = read_config(options.model).get_text_config()
    adapters = _adapters(options, engine)
    device = pick_device("auto").type
    dtype = options.dtype or ("float32" if device == "cpu" else "bfloat16")
    context = _context(options, getattr(config, "max_position_embeddings", None))
    kv_bytes = _kv_bytes(options, config, context, dtype) if engine == "vllm" and device == "cpu" else 0
    # A folder is known to vLLM and to recipes by one name, wherever it was typed.
    options = replace(options, model=os.path.expanduser(options.model))
    most = default_body_bytes(context) if options.max_body_mb is None else int(options.max_body_mb * 2**20)
    return Resolved(
        options,
        engine,
        options.name or options.model,
        context,
        dtype,
        device,
        kv_bytes,
        vocab=int(config.vocab_size),
        limits=ServerLimits(most, options.connections),
        adapters=adapters,
    )


def _adapters(options: ServeOptions, engine: str) -> dict[str, SavedAdapter]:
    """The adapters by their names; an error if one does not fit the model, or not the engine."""
    adapters: dict[str, SavedAdapter] = {}
    for name, path in options.adapters:
        if name in adapters or name == (options.name or options.model):
            raise ServeError(f"--adapter {name}=…: two models can't have one name on a server")
        adapters[name] = SavedAdapter.read(path, "--adapter")
    if not adapters:
        return {}
    bare = skeleton(Model(path=os.path.expanduser(options.model)))
    for name, saved in adapters.items():
        saved.check_fits(bare, options.model)
        problem = vllm_adapter_problem(saved, bare.config.model_type) if engine == "vllm" else None
        if problem is not None:
            raise ServeError(f"--adapter {name}=…: vLLM can't serve {problem}: use --engine torch")
    return adapters


def _check_key(options: ServeOptions) -> None:
    key = options.api_key
    if key == "":
        raise ServeError(f"the API key is empty: give --api-key or {KEY_ENV} a value, or leave both out")
    if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
        raise ServeError("the API key has characters that a header can't have: use ASCII without spaces")
    if key is not None and options.no_key:
        raise ServeError(f"--no-key and a key (--api-key or {KEY_ENV}): leave one out")
    if key is None and not options.no_key and not is_loopback(options.host):
        raise ServeError(
            f"--host {options.host} is reached by other machines, and there is no key: set {KEY_ENV} (or "
            "--api-key), or add --no-key to let everybody use the server"
        )
    for option in options.more:
        name = option.partition("=")[0].replace("_", "-")
        if own := next((own for own in OWN_OPTIONS if len(name) > 3 and own.startswith(name)), None):
            raise ServeError(f"-- {option}: {own} is not for vLLM alone; give it before --")


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _engine(options: ServeOptions) -> Literal["torch", "vllm"]:
    installed = importlib.util.find_spec("vllm") is not None
    if options.engine == "vllm" and not installed:
        raise MissingExtraError("--engine vllm", "vllm")
    engine = "vllm" if options.engine == "vllm" or (options.engine == "auto" and installed) else "torch"
    if engine == "torch" and options.more:
        raise ServeError(f"{' '.join(options.more)}: further options are vLLM's; the torch engine has none")
    return engine


def _context(options: ServeOptions, longest: int | None) -> int:
    asked = options.context
    if asked is not None and longest is not None and asked > longest:
        raise ServeError(
            f"--context {asked} is more than the {longest} tokens that {options.model} was made for: "
            f"set --context {longest} or less"
        )
    if (context := asked or longest) is None:
        raise ServeError(f"the config of {options.model} names no longest sequence: set --context")
    return context


def _kv_bytes(options: ServeOptions, config: Any, context: int, dtype: str) -> int:
    """KV memory on a CPU: as asked, else for KV_TOKENS tokens or one sequence of the whole context."""
    per_token = kv_token_bytes(config, getattr(torch, dtype))
    needed = per_token * 128 * math.ceil(context / 128)  # vLLM's memory is in blocks of 128 tokens
    if options.kv_gb is not None:
        given = int(options.kv_gb * 2**30)
        if given < needed:
            raise ServeError(
                f"--kv-gb {options.kv_gb:g} is too little for one sequence of {context} tokens, which takes "
                f"{needed / 2**30:.3g} GiB of KV memory: raise it, or lower --context"
            )
        return given
    return max(needed, per_token * KV_TOKENS)


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to this address, port 0 being any free one; a ServeError if it is not available."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ServeError(f"--host {host}: {error.strerror or error}") from error
    try:
        # Connections of a server that has just ended must not block the port.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        # Before it listens, another socket could be bound to the port too.
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


def announcement(server: Resolved, port: int) -> str:
    """What a user reads when the server is ready, with the line that a recipe needs."""
    options, url = server.options, base_url(server.options.host, port)
    names = {name: name for name in server.adapters} or {"teacher": server.name}
    entries = (f"{_yaml(teacher)}: {{{_entry(server, url, name)}}}" for teacher, name in names.items())
    beside = f" and its adapters {', '.join(server.adapters)}" if server.adapters else ""
    lines = [
        f"serving {options.model}{beside} at {url} by the {server.engine} engine: {server.dtype} on "
        f"{server.device}, sequences of up to {server.context:,} tokens; Ctrl-C ends it. In a recipe:",
        f"teachers: {{{', '.join(entries)}}}",
    ]
    if options.no_key:
        lines.append(f"warning: there is no key (--no-key): whoever reaches {options.host} can use it")
    return "\n".join(lines)


def _entry(server: Resolved, url: str, name: str) -> str:
    """The keys of a teacher in a recipe."""
    entry = {"url": f"{url}/v1", "model": name, "tokenizer": server.options.model}
    if server.options.api_key is not None:
        entry["api_key_env"] = KEY_ENV
    return ", ".join(f"{key}: {_yaml(value)}" for key, value in entry.items())


def _yaml(text: str) -> str:
    return text if text.isidentifier() else json.dumps(text, ensure_ascii=False)

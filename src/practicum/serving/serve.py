"""`practicum serve`: run a scoring server until Ctrl-C or SIGTERM."""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import FrameType

import torch

from practicum.devices import pick_device
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.errors import ServeError
from practicum.models.adapter_files import SavedAdapter
from practicum.models.load_model import load_model, require_known_layers, skeleton
from practicum.models.lora import put_adapters
from practicum.models.model_files import must_read, read_config
from practicum.processes.http_server import CONNECTIONS, make_server
from practicum.recipe.schema.recipe import Model
from practicum.recipe.schema.teacher_sections import Dtype
from practicum.serving.completions import RequestScorer, scoring_app

KEY_ENV = "PRACTICUM_API_KEY"
_MIB = 1 << 20
_TOKEN_BYTES = 32
"""Maximum bytes of a request per token of the context."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of `practicum serve`. `resolve` chooses values for those that are None."""

    model: str
    adapters: tuple[tuple[str, str], ...] = ()
    """Names and folders of adapters of the model."""
    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    context: int | None = None
    dtype: Dtype | None = None
    threads: int | None = None
    api_key: str | None = None
    no_key: bool = False
    """Serve other machines without a key."""
    max_body_mb: float | None = None
    connections: int = CONNECTIONS


@dataclass(frozen=True, slots=True)
class Resolved:
    """The options, and the values chosen for those that were None."""

    options: ServeOptions
    name: str
    context: int
    dtype: Dtype
    device: str
    vocab: int
    max_body: int
    adapters: Mapping[str, SavedAdapter]


def serve(options: ServeOptions, say: Callable[[str], None]) -> None:
    """Serve a model until SIGINT or SIGTERM."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        server = resolve(options)
        # Bind before loading the model, so that a port in use fails immediately.
        with listen(options.host, options.port) as bound:
            _serve(server, bound, say)
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
    say("ended")


def _serve(server: Resolved, bound: socket.socket, say: Callable[[str], None]) -> None:
    options = server.options
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    spec = Model(path=options.model, dtype=server.dtype, device=server.device)
    model = load_model(spec, seed=0, key="MODEL")
    if server.adapters:
        put_adapters(model, {saved.fingerprint: saved for saved in server.adapters.values()}, options.model)
    adapters = {name: saved.fingerprint for name, saved in server.adapters.items()}
    engine = TorchEngine(model, slots=1, context=server.context)
    scorer = RequestScorer(engine, server.name, context=server.context, vocab=server.vocab, adapters=adapters)
    folders = {name: str(saved.folder) for name, saved in server.adapters.items()}
    app = scoring_app(scorer, {server.name: options.model} | folders, server.max_body, options.api_key)
    http = make_server(app, options.connections)

    def stop(number: int, frame: FrameType | None) -> None:
        http.should_exit = True  # an exception would be lost in a destructor

    signal.signal(signal.SIGTERM, stop)
    say(announcement(server, int(bound.getsockname()[1])))  # the socket listens already
    http.run(sockets=[bound])


def resolve(options: ServeOptions) -> Resolved:
    """Choose values for unset options, and raise errors for mistakes before loading weights."""
    _check_key(options)
    require_known_layers(options.model, "MODEL")
    with must_read(options.model, "MODEL", "a causal language model in HuggingFace format"):
        config = read_config(options.model).get_text_config()
    options = replace(options, model=os.path.expanduser(options.model))
    device, name = pick_device("auto").type, options.name or options.model
    longest = getattr(config, "max_position_embeddings", None)
    context = options.context or longest
    if context is None:
        raise ServeError(f"the config of {options.model} has no maximum sequence length: set --context")
    if longest is not None and context > longest:
        raise ServeError(f"--context {context} exceeds the {longest} tokens of {options.model}")
    max_body = max(_MIB, _TOKEN_BYTES * context)
    if options.max_body_mb is not None:
        max_body = int(options.max_body_mb * _MIB)
    adapters: dict[str, SavedAdapter] = {}
    for adapter, path in options.adapters:
        if adapter in adapters or adapter == name:
            raise ServeError(f"--adapter {adapter}=…: the name is already in use on this server")
        adapters[adapter] = SavedAdapter.read(path, "--adapter")
    if adapters:
        bare = skeleton(Model(path=options.model))
        for saved in adapters.values():
            saved.check_fits(bare, options.model)
    dtype = options.dtype or ("float32" if device == "cpu" else "bfloat16")
    return Resolved(options, name, context, dtype, device, int(config.vocab_size), max_body, adapters)


def _check_key(options: ServeOptions) -> None:
    key, host = options.api_key, options.host
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise ServeError(f"the API key (--api-key or {KEY_ENV}) must be printable ASCII without spaces")
    if key is not None and options.no_key:
        raise ServeError(f"--no-key conflicts with the key of --api-key or {KEY_ENV}: remove one")
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if key is None and not options.no_key and not is_loopback:
        raise ServeError(
            f"--host {host} serves other machines without a key: set {KEY_ENV} or --api-key, or add --no-key "
            "to allow access without a key"
        )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address. Port 0 chooses a free one."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ServeError(f"--host {host}: {error.strerror or error}") from error
    try:
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ServeError(f"port {port} of {host} is in use: choose another --port (0: any)") from None
        raise ServeError(f"can't listen at {host}, port {port}: {error.strerror}") from error


def announcement(server: Resolved, port: int) -> str:
    """Return the message that the server is ready, with the lines for a recipe."""
    options, host = server.options, server.options.host
    host = socket.gethostname() if host in ("0.0.0.0", "::") else host
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    names = {name: name for name in server.adapters} or {"teacher": server.name}
    key = {} if options.api_key is None else {"api_key_env": KEY_ENV}
    teachers = {
        teacher: {"url": f"{url}/v1", "model": name, "tokenizer": options.model, **key}
        for teacher, name in names.items()
    }
    beside = f" and its adapters {', '.join(server.adapters)}" if server.adapters else ""
    lines = [
        f"serving {options.model}{beside} at {url}: {server.dtype} on {server.device}, sequences of up to "
        f"{server.context:,} tokens. Ctrl-C stops it. In a recipe:",
        f"teachers: {json.dumps(teachers, ensure_ascii=False)}",  # JSON is YAML too
    ]
    if options.no_key:
        lines.append(
            f"warning: without a key (--no-key), everyone who can reach {options.host} can use the server"
        )
    return "\n".join(lines)

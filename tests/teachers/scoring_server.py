"""A scoring server that misbehaves as it is told; the one that does not is in `tests.serving.servers`."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from transformers import PreTrainedModel

from practicum.engines.protocol import ScoreOptions, ScoreRequest, Scores
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.serving.completions import prompt_logprobs
from tests.serving.servers import MODEL


@dataclass
class Manners:
    """How the server behaves, and what it has seen."""

    max_logprobs: int = 20
    max_model_len: int | None = 128
    api_key: str | None = None
    ignores_prompt_logprobs: bool = False
    shifts_ids: bool = False
    echoes_ids: bool = True
    noise: float = 0.0
    fails_first: int = 0
    """This many completions get `fail_status` before one is answered."""
    fail_status: int = 503
    retry_after: str | None = None
    drops_first: int = 0
    """This many completions have their connection closed without an answer."""
    refuses_prompts_of: int | None = None
    """A completion of this many tokens is a status 400."""
    hangs: threading.Event = field(default_factory=threading.Event)
    """While set, completions are not answered; `release` lets them go."""
    release: threading.Event = field(default_factory=threading.Event)
    answers_when_open: int = 1
    """A completion is answered when this many were open at once."""
    linger_s: float = 0.0

    completions: int = 0
    answered: int = 0
    open: int = 0
    most_open: int = 0
    connections: set[Any] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)


@dataclass(frozen=True)
class ScoringServer:
    url: str
    manners: Manners
    engine: TorchEngine


@contextmanager
def scoring_server(model: PreTrainedModel, **manners: Any) -> Iterator[ScoringServer]:
    """A server on a free port of this machine; its URL ends in /v1."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    engine = TorchEngine(model, slots=1, context=2)
    behaviour = Manners(**manners)

    def score(ids: list[int], k: int) -> Scores:
        return asyncio.run_coroutine_threadsafe(
            engine.score(ScoreRequest(ids, 1), ScoreOptions(top_k=k)), loop
        ).result(30)

    class Handler(_Handler):
        manners = behaviour
        score_ids = staticmethod(score)

    http = _Http(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    serving.start()
    try:
        yield ScoringServer(f"http://127.0.0.1:{http.server_address[1]}/v1", behaviour, engine)
    finally:
        behaviour.release.set()
        http.shutdown()
        http.server_close()
        engine.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class _Http(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # callers that went away are part of the tests
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    manners: Manners
    score_ids: Any

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if not self._admitted():
            return
        if self.path != "/v1/models":
            self._error(404, "Not Found")
            return
        entry: dict[str, Any] = {"id": MODEL, "object": "model"}
        if self.manners.max_model_len is not None:
            entry["max_model_len"] = self.manners.max_model_len
        self._json(200, {"object": "list", "data": [entry]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._admitted():
            return
        manners = self.manners
        with manners.changed:
            manners.completions += 1
            manners.connections.add(self.client_address)
            number = manners.completions
            manners.open += 1
            manners.most_open = max(manners.most_open, manners.open)
            manners.changed.notify_all()
            manners.changed.wait_for(lambda: manners.most_open >= manners.answers_when_open, timeout=20)
        try:
            if manners.hangs.is_set():
                manners.release.wait()
            time.sleep(manners.linger_s)
            self._complete(body, number)
        finally:
            with manners.changed:
                manners.open -= 1
                manners.changed.notify_all()

    def _complete(self, body: dict[str, Any], number: int) -> None:
        manners = self.manners
        ids, k = body["prompt"], body.get("prompt_logprobs")
        if number <= manners.drops_first:
            self.close_connection = True
            return
        if number <= manners.fails_first:
            more = {} if manners.retry_after is None else {"Retry-After": manners.retry_after}
            self._error(manners.fail_status, "overloaded", more)
        elif len(ids) == manners.refuses_prompts_of:
            self._error(400, f"a prompt of {len(ids)} tokens is not to my taste")
        elif k is not None and k > manners.max_logprobs:
            limit = manners.max_logprobs
            self._error(400, f"Requested prompt logprobs of {k}, which is greater than max allowed: {limit}")
        else:
            manners.answered += 1
            self._json(200, {"model": MODEL, "choices": [self._choice(ids, k, number)]})

    def _choice(self, ids: list[int], k: int | None, number: int) -> dict[str, Any]:
        manners = self.manners
        choice: dict[str, Any] = {"index": 0, "text": "?", "finish_reason": "length", "logprobs": None}
        if manners.shifts_ids:
            ids = [1, *ids[:-1]]
        if manners.echoes_ids:
            choice["prompt_token_ids"] = ids
        if k is None or manners.ignores_prompt_logprobs:
            choice["prompt_logprobs"] = None
            return choice
        entries = prompt_logprobs(self.score_ids(ids, k), ids, k)
        noise = random.Random(number).random() * manners.noise
        for entry in entries[1:]:
            for one in entry.values():
                one["logprob"] -= noise
        choice["prompt_logprobs"] = entries
        return choice

    def _admitted(self) -> bool:
        key = self.manners.api_key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self._error(401, "Unauthorized")
        return False

    def _error(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        self._json(status, {"error": {"message": message, "type": "error", "code": status}}, headers)

    def _json(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            self.close_connection = True  # the caller did not wait

"""Requests to the scoring server, right and wrong: each has an answer, and the server keeps working."""

from __future__ import annotations

import http.client
import json
import random
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

from tests.engines.engines import tiny
from tests.serving.servers import MODEL, served

TIMEOUT_S = 60.0
_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2, 5, 63, 64, 127, 128, 10**9, 2**70, 0.0, 0.5, 1e308, "x", "", [], {}, [0],
    [1, 2, 3], list(range(60)), [0] * 127, [0] * 500, [[1]], ["a"], [None], [-1], [2**63], MODEL, "\ud800",
    {"start": 1, "top_k": 2},
    {"start": 3, "top_k": 0, "vocab": 5}, {"start": 10**9, "top_k": 10**9}, {"start": 0},
)  # fmt: skip
_KEYS = (
    "model", "prompt", "max_tokens", "prompt_logprobs", "temperature", "n", "stream", "logprobs",
    "return_token_ids", "packed_scores", "seed", "x",
)  # fmt: skip
RIGHT = {"model": MODEL, "prompt": [1, 2, 3, 4], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 2}


def fuzz_server(count: int, first: int) -> dict[str, Any]:
    """Counts by status, and what went wrong: no answer, a status of 500 or more, or no JSON."""
    statuses, failures = Counter[str](), list[dict[str, Any]]()
    with served(tiny("qwen3", 0)) as server:
        place = urlsplit(server.url)
        assert place.hostname is not None
        address = place.hostname, place.port or 80
        expected = _ask(address, "POST", "/v1/completions", json.dumps(RIGHT).encode(), {})[1]
        for seed in range(first, first + count):
            rng = random.Random(seed)
            method, path, body, headers = _request(rng)
            try:
                status, text = _ask(address, method, path, body, headers)
                statuses[f"{status // 100}xx"] += 1
                if status >= 500:
                    raise ValueError(f"status {status}: {text[:200]!r}")
                if text and method not in ("HEAD", "X"):  # X is no HTTP, and has its own refusal
                    json.loads(text)
            except (OSError, http.client.HTTPException, ValueError) as error:
                failures.append({"seed": seed, "error": f"{type(error).__name__}: {error}"[:300]})
                print(f"FAILED request {seed}: {method} {path} {headers} {body[:200]!r}: {error}")
        again = _ask(address, "POST", "/v1/completions", json.dumps(RIGHT).encode(), {})[1]
        if _scores(again) != _scores(expected):
            failures.append({"seed": -1, "error": "a right request has another answer afterwards"})
    accepted = statuses.pop("2xx", 0)
    return {"kind": "requests", "accepted": accepted, "refused": sum(statuses.values()), "failures": failures}


def _scores(text: bytes) -> Any:
    return json.loads(text)["choices"]


def _request(rng: random.Random) -> tuple[str, str, bytes, dict[str, str]]:
    body: Any = dict(RIGHT)
    for _ in range(rng.choice([0, 1, 1, 2, 4])):
        key = rng.choice(_KEYS)
        if rng.random() < 0.2:
            body.pop(key, None)
        else:
            body[key] = rng.choice(_VALUES)
    if rng.random() < 0.05:
        body = rng.choice(_VALUES)
    data = json.dumps(body).encode()
    if rng.random() < 0.1:
        at = rng.randrange(len(data) + 1)
        data = data[:at] + rng.choice([b"", b"\xff", b"\0", b"{", b'"']) + data[at + 1 :]
    if rng.random() < 0.02:
        data = b"[" * 50_000
    method = rng.choice(["POST"] * 12 + ["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "X"])
    path = rng.choice(
        ["/v1/completions"] * 12 + ["/v1/models", "/", "/v1/chat/completions", "/%00", "/" + "a" * 5000]
    )
    headers = rng.choice(
        [{}] * 6 + [{"Content-Type": "text/plain"}, {"Authorization": "Bearer x"}, {"X": "y" * 9000}]
    )
    return method, path, data, headers


def _ask(
    address: tuple[str, int], method: str, path: str, body: bytes, headers: dict[str, str]
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*address, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"} | headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except TimeoutError:
        raise OSError(f"no answer in {TIMEOUT_S:g} s") from None
    finally:
        connection.close()

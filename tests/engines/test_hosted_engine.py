"""Engines in a separate process: the same bits, and what happens when the process is gone or hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from practicum.engines.hosted_engine import HostedEngine
from practicum.engines.protocol import (
    Counter,
    Engine,
    GenerateRequest,
    Generation,
    ScoreOptions,
    ScoreRequest,
)
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.errors import EngineError
from practicum.models.offloaded_weights import named_tensors
from practicum.processes.host import Host

from .engines import engine_of, picture_prompt, pictures, prompts, sampling, tiny

FAMILIES = ("qwen3", "qwen3_moe", "qwen2_5_vl")
SETTINGS: dict[str, Any] = {"slots": 16, "context": 96}


def load(families: tuple[str, ...] = FAMILIES) -> list[TorchEngine]:
    """Runs in the process."""
    return [TorchEngine(tiny(family), **SETTINGS) for family in families]


def host_of(load: Any, deadline_s: float = 120.0) -> Host:
    return Host("the torch engine", load, threads=1, deadline_s=deadline_s)


@contextmanager
def started(*, deadline_s: float = 120.0) -> Iterator[HostedEngine]:
    engine = HostedEngine(host_of(partial(load, FAMILIES[:1]), deadline_s))
    try:
        engine.ready()
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    found = host_of(load)
    try:
        found.ready()
        yield found
    finally:
        found.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int, seconds: float = 30.0) -> bool:
    until = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not alive(pid)


def first_request(number: int = 0, length: int = 12) -> GenerateRequest:
    return GenerateRequest(prompts(1, seed=number)[0], sampling(length), Counter(0, number))


async def two_turns(engine: Engine, family: str) -> list[Generation]:
    """Sessions of two turns side by side; the second turn continues the first, experts included."""
    model = tiny(family)
    images = pictures(model, (2, 3)) if family == "qwen2_5_vl" else None
    asked = [picture_prompt(model, (2, 3))] * 3 if images else prompts(3)

    async def session(number: int) -> list[Generation]:
        ids, made, experts = list(asked[number]), list[Generation](), None
        for turn in range(2):
            counter = Counter(1, number, 0, turn)
            request = GenerateRequest(ids, sampling(10, stop=(7,)), counter, images, experts, keep=True)
            made.append(await engine.generate(request))
            experts = made[-1].experts
            ids = [*ids, *made[-1].tokens.tolist(), 5, 6]
        return made

    sessions = await asyncio.gather(*map(session, range(3)))
    return [one for made in sessions for one in made]


def assert_same(found: list[Generation], expected: list[Generation]) -> None:
    for one, other in zip(found, expected, strict=True):
        for name in ("tokens", "logprobs", "plain_logprobs"):
            assert torch.equal(getattr(one, name), getattr(other, name))
        assert (one.finish, one.version_min, one.version_max) == (
            other.finish,
            other.version_min,
            other.version_max,
        )
        assert (one.experts is None) == (other.experts is None)
        if one.experts is not None and other.experts is not None:
            assert torch.equal(one.experts, other.experts)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_and_scores_are_the_bits_of_an_engine_in_this_process(host: Host, family: str):
    engine = HostedEngine(host, FAMILIES.index(family))
    row, options = (
        ScoreRequest(prompts(1, seed=3, shortest=9)[0], 2, "a row"),
        ScoreOptions(top_k=3, hidden=True),
    )
    with engine_of(tiny(family), **SETTINGS) as here:
        assert_same(asyncio.run(two_turns(engine, family)), asyncio.run(two_turns(here, family)))
        found, expected = (asyncio.run(one.score(row, options)) for one in (engine, here))
        assert torch.equal(engine.fingerprint(), here.fingerprint())
    for name in ("logprobs", "topk_ids", "topk_logprobs", "hidden"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


def test_new_weights_are_taken_whole_or_not_at_all(host: Host):
    engine, other = HostedEngine(host), tiny(seed=1)
    before = engine.fingerprint()
    with pytest.raises(EngineError, match=r"missing"):
        engine.load_weights(list(named_tensors(other).items())[:3], 8)
    assert torch.equal(engine.fingerprint(), before)
    assert engine.version == 0
    engine.load_weights(named_tensors(other).items(), 9)
    with engine_of(other, version=9, **SETTINGS) as here:
        assert torch.equal(engine.fingerprint(), here.fingerprint())
        assert_same(asyncio.run(two_turns(engine, "qwen3")), asyncio.run(two_turns(here, "qwen3")))


def test_errors_are_those_of_an_engine_in_this_process(host: Host):
    with pytest.raises(EngineError, match=r"context of 96"):
        asyncio.run(HostedEngine(host).generate(first_request(4, length=1000)))


def test_an_engine_that_sleeps_says_so_and_wakes(host: Host):
    engine = HostedEngine(host)
    assert engine.sleep().kv > 0
    assert engine.memory().kv == 0
    with pytest.raises(EngineError, match="the engine sleeps"):
        asyncio.run(engine.generate(first_request()))
    engine.wake()
    assert len(asyncio.run(engine.generate(first_request())).tokens) == 12


def test_ctrl_c_and_abandoned_requests_leave_the_process_at_work(host: Host):
    """Ctrl-C goes to the whole group of processes: whoever started the engine decides."""
    engine = HostedEngine(host)

    async def abandon() -> None:
        task = asyncio.ensure_future(engine.generate(first_request(1, length=60)))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])

    os.kill(host.pid, signal.SIGINT)
    asyncio.run(abandon())
    assert len(asyncio.run(engine.generate(first_request(2))).tokens) == 12


@pytest.mark.long
def test_a_process_that_dies_fails_what_is_under_way_with_its_name():
    with started() as engine:

        async def die_meanwhile() -> None:
            os.kill(engine.host.pid, signal.SIGSTOP)  # so that the request is surely under way
            task = asyncio.ensure_future(engine.generate(first_request()))
            await asyncio.sleep(0.2)
            os.kill(engine.host.pid, signal.SIGKILL)
            with pytest.raises(EngineError, match=r"the torch engine .*SIGKILL"):
                await task

        asyncio.run(die_meanwhile())
        with pytest.raises(EngineError, match=r"the torch engine .*SIGKILL"):
            engine.fingerprint()


@pytest.mark.long
def test_a_process_that_is_silent_is_killed_with_its_name():
    with started(deadline_s=2.0) as engine:
        os.kill(engine.host.pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match=r"the torch engine .*did not answer for 2 s"):
            asyncio.run(engine.generate(first_request()))
        assert gone(engine.host.pid)
    with started(deadline_s=2.0) as engine:
        os.kill(engine.host.pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match=r"the torch engine: fingerprint did not return within 2 s"):
            engine.fingerprint()
        assert gone(engine.host.pid)


def hang() -> list[TorchEngine]:
    """Runs in the process: an engine whose first step never ends."""
    engines = load(FAMILIES[:1])
    engines[0].thread._step = lambda jobs: time.sleep(3600)  # pyright: ignore
    return engines


@pytest.mark.long
def test_a_step_that_never_ends_is_named():
    engine = HostedEngine(host_of(hang, deadline_s=4.0))
    try:
        engine.ready()
        with pytest.raises(EngineError, match=r"the torch engine .*a step has not ended"):
            asyncio.run(engine.generate(first_request()))
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("families", "start_s", "words"),
    [(("no such family",), 60.0, "no such family"), (FAMILIES[:1], 0.01, r"was not ready after 0\.01 s")],
    ids=["can not load", "late"],
)
def test_a_start_that_fails_says_why_and_leaves_no_process(families: Any, start_s: float, words: str):
    host = Host("the torch engine", partial(load, families), threads=1, deadline_s=2.0, start_s=start_s)
    with pytest.raises(EngineError, match=words):
        host.ready()
    assert gone(host.pid)


def test_close_ends_even_a_stopped_process_and_fails_open_calls():
    async def close_meanwhile(engine: HostedEngine) -> None:
        task = asyncio.ensure_future(engine.generate(first_request()))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineError, match="it was closed"):
            await task

    with started() as engine:
        os.kill(engine.host.pid, signal.SIGSTOP)
        asyncio.run(close_meanwhile(engine))
        assert gone(engine.host.pid)


PARENT = """
import sys
from tests.engines.test_hosted_engine import started

with started() as engine:
    print(engine.host.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.long
def test_a_parent_that_is_killed_leaves_no_process(tmp_path: Path):
    """Its script has no `if __name__ == "__main__"`: the child does not run it."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    command, env = [sys.executable, str(script)], os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    assert gone(pid)

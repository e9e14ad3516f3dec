"""Calls of real actors: what they raise, and how they end when a worker dies or is late."""

import asyncio
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest
import ray
from tests.cluster import local_ray
from tests.runtime.actors import Caller, start

from practicum import errors
from practicum.concurrency.event_loop import run_async
from practicum.errors import DeadlineError, PracticumError, RecipeError, StoreError
from practicum.processes.http_client import Refused, Unreachable
from practicum.runtime.ray.actor_calls import WorkerDied, ask, ask_async, each_report
from practicum.sessions.tools.tool import ToolError

WHO = ["first", "second"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_ray():
        yield


def worker(broken: str = "") -> Any:
    return start(Caller, broken)


@pytest.fixture(scope="module")
def pair(cluster: None) -> list[Any]:
    return [worker(), worker()]


def kill(actor: Any) -> None:
    os.kill(ask([actor.pid.remote()], timeout=60, owner="test", who=["it"])[0], signal.SIGKILL)


def one(ref, who: str = "first", timeout: float = 60):
    return run_async(ask_async(ref, timeout=timeout, owner="test", who=who), timeout=90, owner="test")


EXAMPLES: list[PracticumError] = [
    RecipeError("student.model", "3", "a path", "quote it"),
    errors.RecipeErrors("demo.yaml", [RecipeError("a", "b", "c"), RecipeError("d", "e", "f", "g")]),
    errors.MissingExtraError("runtime: ray", "ray"),
    Refused("teacher math says no", 404, "no such model"),
    WorkerDied("rollout 1", "killed", "ab12"),
    *(kind("what, where, fix") for kind in (StoreError, DeadlineError, ToolError, Unreachable)),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
def test_errors_cross_processes_whole(error: PracticumError):
    error.add_note("a note")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert {k: str(v) for k, v in vars(again).items()} == {k: str(v) for k, v in vars(error).items()}


def test_every_error_of_ours_can_be_pickled():
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, PracticumError)]
    for kind in kinds:
        raised = kind.__new__(kind, "a sentence")
        assert str(pickle.loads(pickle.dumps(raised))) == "a sentence"
    assert len(kinds) > 10


def test_an_error_of_ours_is_raised_as_the_worker_raised_it(pair):
    error = RecipeError("student.model", "3", "a path", "quote it")
    for call in (lambda r: ask([r], timeout=60, owner="test", who=["first"]), one):
        with pytest.raises(RecipeError) as raised:
            call(pair[0].breaks.remote(error))
        assert type(raised.value) is RecipeError
        assert str(raised.value) == str(error)
        assert raised.value.suggestion == "quote it"
        assert "raised in first" in raised.value.__notes__


def test_other_errors_keep_their_type_and_the_remote_traceback(pair):
    with pytest.raises(ValueError, match="plain") as raised:
        one(pair[0].breaks.remote(ValueError("plain")))
    assert type(raised.value) is ValueError
    assert str(raised.value) == "plain"
    assert "in breaks" in raised.value.__notes__[0]
    with pytest.raises(Exception, match="made of two parts") as odd:
        one(pair[0].breaks_oddly.remote())
    assert "first" in odd.value.__notes__[0]


def test_a_timeout_inside_a_worker_is_not_our_deadline(pair):
    with pytest.raises(TimeoutError, match="its own"):
        one(pair[0].breaks.remote(TimeoutError("its own")))


def test_the_first_failure_ends_the_wait_for_the_others(pair):
    waits = pair[0].waits.remote()
    with pytest.raises(StoreError, match="row 3 is missing") as raised:
        ask([waits, pair[1].breaks.remote(StoreError("row 3 is missing"))], timeout=600, owner="t", who=WHO)
    assert "raised in second" in raised.value.__notes__
    ray.cancel(waits)


def test_a_deadline_names_the_owner_and_those_who_lack(pair):
    refs = [pair[0].waits.remote(), pair[1].give.remote(1)]
    with pytest.raises(DeadlineError) as raised:
        ask(refs, timeout=0.5, owner="the update", who=WHO)
    assert str(raised.value) == "the update waited 0.5 s for first: no answer"
    ray.cancel(refs[0])
    with pytest.raises(DeadlineError, match=r"test waited 0\.2 s for first"):
        one(pair[0].waits.remote(), timeout=0.2)


def test_a_call_that_nobody_awaits_any_more_is_cancelled_at_the_worker(cluster: None):
    actor = worker()

    async def give_up() -> None:
        assert await ask_async(actor.give.remote(1), timeout=60, owner="test", who="it") == 1
        async with asyncio.timeout(0.3):
            await ask_async(actor.waits.remote(), timeout=60, owner="test", who="it")

    with pytest.raises(TimeoutError):
        run_async(give_up(), timeout=60, owner="test")
    assert one(actor.was_cancelled.remote())
    with pytest.raises(DeadlineError):
        one(actor.waits.remote(), timeout=0.3)
    assert one(actor.was_cancelled.remote())


def test_a_killed_worker_is_named_at_once(pair):
    victim = worker()
    refs = [pair[0].waits.remote(), victim.waits.remote()]
    kill(victim)
    with pytest.raises(WorkerDied, match="second died: The actor is dead because") as raised:
        ask(refs, timeout=600, owner="test", who=WHO)
    assert raised.value.actor == victim._actor_id.hex()
    assert "Some common causes" not in str(raised.value)
    with pytest.raises(WorkerDied, match="gone died"):
        one(victim.pid.remote(), who="gone")
    ray.cancel(refs[0])


def test_a_worker_that_can_not_start_says_why(cluster: None):
    with pytest.raises(WorkerDied, match=r"broken died: .*EngineError: no such model"):
        one(worker("no such model").pid.remote(), who="broken")


def test_a_death_that_a_worker_saw_is_not_its_own(pair):
    for asking in ("asks", "gets"):
        victim = worker()
        lost = victim.waits.remote()
        kill(victim)
        with pytest.raises(WorkerDied, match=r"^an(other| actor that first asked) died") as raised:
            one(getattr(pair[0], asking).remote([lost]))
        assert raised.value.actor == victim._actor_id.hex()
        assert one(pair[0].give.remote(1)) == 1


async def reports(actor: Any, upto: int, then: str) -> list[int]:
    got: list[int] = []
    calls = actor.counts.options(num_returns="streaming").remote(upto, then)
    async for number in each_report(calls, who="first"):
        got.append(number)
        if then == "dies" and number == 1:
            os.kill(await ask_async(actor.pid.remote(), timeout=60, owner="test", who="it"), signal.SIGKILL)
        elif then == "waits" and number == 1:
            this = asyncio.current_task()
            assert this is not None
            this.cancel()
    return got


def test_reports_come_one_by_one_and_end_with_the_error(pair):
    def run(actor: Any, upto: int, then: str) -> list[int]:
        return run_async(reports(actor, upto, then), timeout=60, owner="test")

    assert run(pair[0], 3, "ends") == [0, 1, 2]
    with pytest.raises(StoreError, match="after the last") as raised:
        run(pair[0], 3, "fails")
    assert raised.value.__notes__ == ["raised in first"]
    actor = worker()
    with pytest.raises(CancelledError):
        run(actor, 2, "waits")
    assert one(actor.was_cancelled.remote())
    with pytest.raises(WorkerDied, match="first died") as died:
        run(actor, 10**6, "dies")
    assert died.value.actor == actor._actor_id.hex()


def test_ctrl_c_passes_through(pair):
    ref = pair[0].waits.remote()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        ask([ref], timeout=60, owner="test", who=["first"])
    ray.cancel(ref)

"""Run external agents as agent loops: a program, or a user's function."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import IO, Any

from practicum.concurrency.user_calls import call_each
from practicum.errors import RecipeError, SessionError
from practicum.recipe.schema.rollout_sections import CommandLoop, FunctionLoop
from practicum.recipe.user_functions import import_function
from practicum.sessions.endpoint.agent_session import AgentSession
from practicum.sessions.endpoint.endpoint import running_endpoint
from practicum.sessions.endpoint.other_python import check_other_python, running_process
from practicum.sessions.session import Session, Trajectory
from practicum.tasks.messages import Message, prompt_text
from practicum.user_code import finite_number, short_repr, shorten

Result = tuple[list[Trajectory], Any] | list[Trajectory]
_TAIL = 1 << 16
"""Bytes at the end of a program's output to search for a reward or error."""
_ROUNDS = 50
"""Number of searches for remaining processes of an ended program."""
_NEVER_S = 10**9
"""The session's deadline ends a function."""


@dataclass(frozen=True, slots=True)
class AgentTask:
    """Argument of a function loop: the prompt, and the model's endpoint."""

    base_url: str
    """Base URL for OpenAI's clients. Anthropic's use `anthropic_url`."""
    api_key: str
    prompt: str
    messages: list[Message]
    answer: Any
    row: dict[str, Any]
    model: str = "student"

    @property
    def anthropic_url(self) -> str:
        return self.base_url.removesuffix("/v1")


async def run_function(spec: FunctionLoop, session: Session) -> Result:
    """Run a function with the endpoint. Its result, if not None, is the reward."""
    endpoint = running_endpoint()
    async with endpoint.open(session) as (key, agent):
        prompt = session.prompt
        task = AgentTask(
            f"{endpoint.url}/v1",
            key,
            prompt_text(prompt.content),
            session.opening,
            prompt.answer,
            dict(prompt.row),
        )
        if spec.python is not None:
            outcome = await _unless_trouble(
                agent, running_process(spec).call({**asdict(task), "anthropic_url": task.anthropic_url})
            )
        else:
            function = import_function(spec.function, "agent.loop.function")
            name = f"agent {spec} in {session.prompt}"
            call = call_each(function, [task], _NEVER_S, stop_early=False, named=lambda _: name)
            (outcome,) = await _unless_trouble(agent, call)
        if outcome.error is not None:
            raise outcome.error
        if outcome.failure is not None:
            raise SessionError(f"{outcome.failure}{_refused(agent)}")
        return await _result(agent, outcome.value)


async def run_command(spec: CommandLoop, session: Session) -> Result:
    """Run a program with the endpoint in its environment, then end all its processes.

    A JSON object in the last line of its output may set the `reward` and its `parts`. A non-zero exit code is
    a failure of the session.
    """
    endpoint = running_endpoint()
    async with endpoint.open(session) as (key, agent):
        with ExitStack() as files:
            prompt = prompt_text(session.prompt.content)
            stdin, stdout, stderr = (files.enter_context(TemporaryFile()) for _ in range(3))
            fills = {"{prompt}": prompt}
            if any("{prompt_file}" in part for part in spec.command):
                named = files.enter_context(NamedTemporaryFile("w", suffix=".txt", encoding="utf-8"))
                named.write(prompt)
                named.flush()
                fills["{prompt_file}"] = named.name
            elif not any("{prompt}" in part for part in spec.command):
                stdin.write(prompt.encode())
                stdin.seek(0)
            command = [_filled(part, fills) for part in spec.command]
            code = await _unless_trouble(agent, _run(command, key, endpoint.url, (stdin, stdout, stderr)))
            if code != 0:
                ended = f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"
                last = shorten(" ".join(_tail(stderr)[-3:]), 300)
                raise SessionError(f"{ended}{f': {last}' if last else ''}{_refused(agent)}")
            return await _result(agent, _printed_reward(_tail(stdout)))


async def _unless_trouble(agent: AgentSession, work: Any) -> Any:
    """Return the work's result. An error of the engine cancels it and is raised."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, agent.trouble}, return_when=asyncio.FIRST_COMPLETED)
        if agent.trouble.done() and not agent.trouble.cancelled():
            agent.trouble.result()
        return await task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _result(agent: AgentSession, returned: Any) -> Result:
    """Return the trajectories and the reward: the agent's result, else a posted reward, else None. A mapping
    has the `reward`, and may have its `parts` by name."""
    trajectories = await agent.end()
    fields = returned if isinstance(returned, Mapping) else {"reward": returned}
    reward = agent.reward if fields.get("reward") is None else fields["reward"]
    parts = fields.get("parts") or {}
    if not isinstance(parts, Mapping) or any(finite_number(part) is None for part in parts.values()):
        raise SessionError(f"returned the parts {short_repr(parts)}, expected finite numbers by name")
    if not trajectories and agent.counts["refused"]:
        raise SessionError(f"has no turn{_refused(agent)}")
    for trajectory in trajectories[-1:]:
        trajectory.reward_parts = {str(name): float(part) for name, part in parts.items()} or None
        endpoint = running_endpoint()
        strays, endpoint.strays = endpoint.strays, 0
        trajectory.requests = {**agent.counts, **({"stray": strays} if strays else {})}
        trajectory.clients = tuple(f"{path} {client}".strip() for path, client in agent.requests)
    return trajectories if reward is None else (trajectories, reward)


def _refused(agent: AgentSession) -> str:
    return f" ({agent.counts['refused']} of its requests were refused)" if agent.counts["refused"] else ""


def _filled(part: str, fills: dict[str, str]) -> str:
    for name, value in fills.items():
        if name in part:
            return part.replace(name, value)
    return part


async def _run(command: Sequence[str], key: str, url: str, files: tuple[IO[bytes], ...]) -> int:
    """Run a program, and return its exit code after ending all its processes."""
    environment = {
        **os.environ,
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
    }
    stdin, stdout, stderr = files
    if shutil.which(command[0]) is None:
        raise RecipeError("agent.loop.command", repr(command[0]), "a program that can be started")
    # It also ends if this process is killed.
    guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    # Not asyncio's subprocesses, which leak pipes if their start is cancelled.
    process = subprocess.Popen(
        [*guard, *command], stdin=stdin, stdout=stdout, stderr=stderr, env=environment, start_new_session=True
    )
    # Separate threads, because the event loop's pool is smaller than the number of sessions.
    ended = asyncio.ensure_future(_in_thread(process.wait))
    try:
        return await asyncio.shield(ended)
    finally:
        await _in_thread(lambda: _kill(process.pid, key))
        await asyncio.wait({ended})


async def _in_thread(call: Callable[[], Any]) -> Any:
    (outcome,) = await call_each(lambda _: call(), [None], _NEVER_S, stop_early=False, named=str)
    return outcome.value


def _kill(group: int, key: str) -> None:
    """Kill a program's process group, and processes outside of it with its key in their environment."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    for _ in range(_ROUNDS):
        processes = list(_having(key.encode()))
        if not processes:
            return
        for pid in processes:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _having(key: bytes) -> Iterator[int]:
    """Yield the processes with the key in their environment, or none without /proc."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (
                key in (entry / "environ").read_bytes()
                and "\nState:\tZ" not in (entry / "status").read_text()
            ):
                yield int(entry.name)


def _tail(file: IO[bytes]) -> list[str]:
    """Return the last lines of a file that are not empty."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL))
    return [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]


def _printed_reward(lines: Sequence[str]) -> Any:
    try:
        last = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return None
    return last if isinstance(last, dict) else None


def check_function(spec: FunctionLoop) -> None:
    """Raise a RecipeError if the function can't be imported or does not take one argument."""
    if spec.python is not None:
        check_other_python(spec.python, spec.function)
        return
    function = import_function(spec.function, "agent.loop.function")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise RecipeError("agent.loop.function", f"{spec}: {error}", "a function of one AgentTask") from None

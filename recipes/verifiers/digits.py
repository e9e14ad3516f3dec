# pyright: reportMissingImports=false
"""A verifiers environment: digits to sort, a loop in this process, and a rubric of two rewards.

`python digits.py FOLDER` writes the rows of its tasks, for training and for evaluation.
"""

import asyncio
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import verifiers.v1 as vf

__all__ = ["ChatHarness", "Digits"]
# All requests stay on this machine. Without certificates to read, a client is made in 1 ms in place of 30.
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)
os.environ.pop("SSL_CERT_FILE", None)


class DigitsData(vf.TaskData):
    answer: str


class DigitsTask(vf.Task[DigitsData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def sorted_digits(self, trace: vf.Trace) -> float:
        return float(said(trace) == self.data.answer)

    @vf.reward(weight=0.1)
    async def as_long(self, trace: vf.Trace) -> float:
        return float(len(said(trace)) == len(self.data.answer))


def said(trace: vf.Trace) -> str:
    return str(trace.last_message.content or "").strip()


class Digits(vf.Taskset[DigitsTask]):
    def load(self) -> Iterator[DigitsTask]:
        draw = random.Random(1)
        for _ in range(1024):
            digits = "".join(draw.choice("0123456789") for _ in range(draw.randint(2, 3)))
            data = DigitsData(prompt=f"sort:{digits}=", answer="".join(sorted(digits)))
            yield DigitsTask(data, self.config.task)


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """One question and one answer, without a program and without a container."""

    APPENDS_SYSTEM_PROMPT, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        headers = {"authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=600) as client:
            url = f"{endpoint.removesuffix('/')}/chat/completions"
            (await client.post(url, json=body, headers=headers)).raise_for_status()
        return vf.ProgramResult(0, "", "")


def make_env() -> vf.Env:
    agent = {"harness": {"id": "digits"}, "runtime": {"type": "subprocess"}, "network_notice": False}
    config = {"taskset": {"id": "digits"}, "agent": agent, "interception": {"type": "server"}}
    return vf.load_environment(vf.SingleAgentEnvConfig.model_validate(config))


class Served:
    """The environment, served once for all sessions of this process."""

    def __init__(self) -> None:
        self.env = make_env()
        self.tasks = list(self.env.taskset)
        self.ready, self.done = asyncio.Event(), asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        async with self.env.serving():
            self.ready.set()
            await asyncio.Event().wait()


SERVED: list[Served] = []


async def solve(task) -> dict:
    """Run an episode of the row's task; return its reward and the rubric's parts."""
    if not SERVED:
        SERVED.append(Served())
    (served,) = SERVED
    await served.ready.wait()
    # Its clients are shared by sessions, so the URL names the session.
    url = task.base_url.replace("/v1", f"/sessions/{task.api_key}/v1")
    context = vf.ModelContext(task.model, vf.EvalClientConfig(base_url=url, api_key_var="NO_KEY"))
    episode = await served.env.run_episode(served.tasks[task.row["idx"]], context)
    if not episode.ok:
        raise RuntimeError(f"{[*episode.errors, *(trace.errors for trace in episode.traces)]}")
    (trace,) = episode.traces
    return {"reward": trace.reward, "parts": {name: part.score for name, part in trace.rewards.items()}}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    lines = [task.data.model_dump_json(include={"prompt", "answer", "idx"}) for task in make_env().taskset]
    (folder / "train.jsonl").write_text("\n".join(lines[128:]))
    (folder / "eval.jsonl").write_text("\n".join(lines[:128]))

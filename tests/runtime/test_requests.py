"""What crosses to workers is complete, and small."""

from __future__ import annotations

import pickle

from practicum.dataplane.keys import Key
from practicum.engines.protocol import Sampling
from practicum.runtime.ray.rollout_worker import RolloutRequest
from practicum.runtime.ray.workers import pack_prompts
from practicum.sessions.attempts import Attempt
from practicum.tasks.prompts import Prompt

SAMPLES = 8
PROMPTS = [Prompt(uid, "math", "sums", f"{uid} + 1 =", str(uid + 1), {"a": uid}, 0, uid) for uid in range(20)]


def request(prompts: list[Prompt]) -> RolloutRequest:
    drawn, greedy = Sampling(32, frozenset({2})), Sampling(32, frozenset({2}), greedy=True)
    attempts = [Attempt(prompt, i, drawn) for prompt in prompts for i in range(SAMPLES)]
    attempts += [Attempt(prompt, SAMPLES, greedy, is_baseline=True) for prompt in prompts]
    return RolloutRequest(False, 1, attempts, "train", 7, 3, eager=True)


def test_a_request_survives_pickling():
    sent = request(PROMPTS)
    again: RolloutRequest = pickle.loads(pickle.dumps(sent))
    assert type(again) is RolloutRequest
    assert again == sent
    assert len({id(attempt.prompt) for attempt in again.attempts}) == len(PROMPTS)


def test_more_samples_of_a_prompt_take_few_bytes():
    assert len(pickle.dumps(request(PROMPTS))) < len(pickle.dumps(PROMPTS))


def test_prompts_of_rows_are_sent_once():
    rows = {Key(prompt.uid, i): prompt for prompt in PROMPTS for i in range(SAMPLES)}
    assert len(pack_prompts(rows)) == len(pack_prompts({Key(prompt.uid): prompt for prompt in PROMPTS}))

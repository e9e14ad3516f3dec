"""The scoring server over the torch engine, met over HTTP: as a teacher, and by requests of all kinds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import torch
from transformers import PreTrainedModel

from practicum.engines.protocol import Counter, GenerateRequest, Sampling, ScoreOptions, ScoreRequest, Scores
from practicum.errors import EngineError, RecipeError, TeacherError
from practicum.recipe.schema.teacher_sections import Teacher
from practicum.teachers.remote_teacher import RemoteScorer, probe_teacher
from tests.engines.engines import engine_of, tiny
from tests.serving.servers import MODEL, Served, served
from tests.teachers.models import assert_same, in_process, rows, score_rows

VOCAB = 63
IDS = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny()


@pytest.fixture(scope="module")
def server(model: PreTrainedModel) -> Iterator[Served]:
    """For tests that leave it as it was."""
    with served(model) as server:
        yield server


def score(url: str, some: list[ScoreRequest], wanted: ScoreOptions, **options: Any) -> list[Scores]:
    async def run() -> list[Scores]:
        given: dict[str, Any] = {"url": url, "model": MODEL} | options
        teacher = RemoteScorer("chat", Teacher(**given))
        try:
            return await score_rows(teacher, some, wanted)
        finally:
            await teacher.aclose()

    return asyncio.run(run())


def run_probe(url: str, *, top_k: int = 5, context: int = 100, **options: Any) -> None:
    async def run() -> None:
        given: dict[str, Any] = {"url": url, "model": MODEL} | options
        teacher = RemoteScorer("chat", Teacher(**given))
        try:
            await probe_teacher(teacher, ScoreOptions(top_k=top_k), VOCAB, context)
        finally:
            await teacher.aclose()

    asyncio.run(run())


async def open_requests(server: Served, count: int) -> None:
    """Wait until the engine has this many to do."""
    async with asyncio.timeout(30):
        while server.engine.thread.open_jobs < count:
            await asyncio.sleep(0.01)


def ask(url: str, **body: Any) -> httpx2.Response:
    asked = {"model": MODEL, "prompt": IDS, "max_tokens": 1, "temperature": 0} | body
    return httpx2.post(f"{url}/completions", json=asked, timeout=30)


@pytest.mark.parametrize("top_k", [0, 1, 7])
def test_a_teacher_behind_it_says_what_a_colocated_one_says(
    model: PreTrainedModel, server: Served, top_k: int
):
    some, wanted = rows(12), ScoreOptions(top_k=top_k)
    got = score(server.url, some, wanted, concurrency=1)
    here = in_process(model, some, wanted)
    # The first answer is in vLLM's form, of the whole sequence, and offers the packed one.
    torch.testing.assert_close(got[0].logprobs, here[0].logprobs, rtol=0, atol=1e-5)
    assert_same(got[1:], here[1:])


def test_outputs_beyond_the_students_do_not_count(model: PreTrainedModel, server: Served):
    some = [ScoreRequest([3 + i, 4, 5, 6, 7], 2, f"prompt {i}") for i in range(3)]

    async def here() -> list[Scores]:
        with engine_of(model) as engine:
            return [
                await engine.score(ScoreRequest(row.ids, row.start), ScoreOptions(top_k=4, vocab=20))
                for row in some
            ]

    got = score(server.url, some, ScoreOptions(top_k=4, vocab=20), concurrency=1)
    assert_same(got[1:], asyncio.run(here())[1:])


def test_vllms_form_has_the_prompts_own_tokens_and_the_most_likely_ones(
    model: PreTrainedModel, server: Served
):
    choice = ask(server.url, prompt_logprobs=3, return_token_ids=True).json()["choices"][0]
    alone = ask(server.url, prompt_logprobs=0).json()["choices"][0]
    expected = in_process(model, [ScoreRequest(IDS, 1, "row")], ScoreOptions(top_k=3))[0]
    assert expected.topk_ids is not None
    assert choice["prompt_token_ids"] == IDS
    assert choice["prompt_logprobs"][0] is None
    for at, entry in enumerate(choice["prompt_logprobs"][1:]):
        best = sorted(entry, key=lambda token: entry[token]["rank"])[:3]
        assert [int(token) for token in best] == expected.topk_ids[at].tolist()
        assert entry[str(IDS[at + 1])]["logprob"] == pytest.approx(expected.logprobs[at].item(), abs=1e-5)
    assert [list(entry) for entry in alone["prompt_logprobs"][1:]] == [[str(token)] for token in IDS[1:]]


def test_the_one_token_is_what_the_model_would_say(model: PreTrainedModel, server: Served):
    async def greedy(ids: list[int]) -> int:
        with engine_of(model) as engine:
            sampling = Sampling(max_new_tokens=1, stop=frozenset(), greedy=True)
            return int((await engine.generate(GenerateRequest(ids, sampling, Counter(0, 0)))).tokens[0])

    for ids in (IDS, [9]):
        said = ask(server.url, prompt=ids, return_token_ids=True).json()
        assert said["choices"][0]["token_ids"] == [asyncio.run(greedy(ids))]
        assert said["usage"]["total_tokens"] == len(ids) + 1


def test_a_teacher_behind_a_url_answers_greedily_up_to_a_stop_token(model: PreTrainedModel, server: Served):
    def answers(stop: set[int], *, remote: bool, most: int = 6) -> tuple[list[int], str]:
        async def run() -> tuple[list[int], str]:
            teacher = RemoteScorer("chat", Teacher(url=server.url, model=MODEL))
            try:
                with engine_of(model) as engine:
                    sampling = Sampling(most, frozenset(stop), greedy=True)
                    request = GenerateRequest(IDS, sampling, Counter(0, 0))
                    found = await (teacher if remote else engine).generate(request)
            finally:
                await teacher.aclose()
            return found.tokens.tolist(), found.finish

        return asyncio.run(run())

    whole = answers(set(), remote=True)
    assert whole == answers(set(), remote=False)
    assert whole[1] == "length"
    stop = {whole[0][2]}
    assert answers(stop, remote=True) == answers(stop, remote=False)
    assert answers(stop, remote=True)[1] == "stop"
    with pytest.raises(EngineError, match="status 400"):
        answers(set(), remote=True, most=126)


def test_rows_that_come_while_the_engine_is_busy_are_scored_together(model: PreTrainedModel):
    calls: list[int] = []
    layer: Any = model.get_submodule("model.layers.0")
    hook = layer.register_forward_pre_hook(lambda *_: calls.append(1))
    body = {"prompt": IDS, "max_tokens": 0, "prompt_logprobs": 1}

    async def run(server: Served) -> list[httpx2.Response]:
        async with httpx2.AsyncClient(timeout=30) as client:
            asked = asyncio.gather(*(client.post(f"{server.url}/completions", json=body) for _ in range(8)))
            await open_requests(server, 8)
            server.engine.thread.turn.release()
            return await asked

    with served(model) as server:
        server.engine.thread.turn.acquire()  # as a long step would
        answers = asyncio.run(run(server))
    hook.remove()
    assert all(answer.is_success for answer in answers)
    assert len(calls) <= 2, "those that came first, and all others"


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"model": "other"}, 404, "unknown model 'other', expected 'tiny'"),
        ({"prompt": [5, 63]}, 400, "token id 63 is not below the vocabulary's size of 63"),
        ({"prompt": [5, -1]}, 400, "prompt.1: "),
        ({"prompt": []}, 400, "prompt: "),
        ({"prompt": "text"}, 400, "prompt: "),
        ({"prompt": [5] * 128}, 400, "128 tokens and max_tokens 1 are more than the context of 128"),
        ({"max_tokens": -1}, 400, "max_tokens: "),
        ({"max_tokens": 125}, 400, "4 tokens and max_tokens 125 are more than the context of 128"),
        ({"temperature": None}, 400, "temperature must be 0"),
        ({"temperature": 0.7}, 400, "temperature: "),
        ({"stream": True}, 400, "stream: "),
        ({"n": 2}, 400, "n: "),
        ({"prompt_logprobs": 64}, 400, "the limit of 63"),
        ({"packed_scores": {"start": 5, "top_k": 1}}, 400, "packed_scores.start is 5"),
        ({"packed_scores": {"start": 1, "top_k": 9, "vocab": 8}}, 400, "the limit of 8"),
    ],
)
def test_what_it_can_not_do_is_refused_with_a_sentence(
    server: Served, body: dict[str, Any], status: int, words: str
):
    answer = ask(server.url, **body)
    assert ask(server.url).is_success, "the next request is served"
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


def test_no_json_and_no_route_are_refused_with_a_sentence(server: Served):
    kind = {"Content-Type": "application/json"}
    broken = httpx2.post(f"{server.url}/completions", content=b"{", headers=kind)
    nowhere = httpx2.get(f"{server.url}/nothing")
    assert (broken.status_code, nowhere.status_code) == (400, 404)
    assert "JSON" in broken.json()["error"]["message"]
    assert nowhere.json()["error"]["message"] == "Not Found"


def test_the_key_opens_all_but_the_health(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CHAT_KEY", "s3cret")
    monkeypatch.setenv("WRONG_KEY", "s3cre")
    with served(model, api_key="s3cret") as server:
        assert httpx2.get(f"{server.url.removesuffix('/v1')}/health").is_success
        run_probe(server.url, api_key_env="CHAT_KEY")
        assert len(score(server.url, rows(2), ScoreOptions(), api_key_env="CHAT_KEY")) == 2
        wrong: tuple[dict[str, Any], ...] = ({}, {"api_key_env": "WRONG_KEY"})
        for options in wrong:
            with pytest.raises(RecipeError, match=r"teachers\.chat\.api_key_env: .*401") as probed:
                run_probe(server.url, **options)
            with pytest.raises(TeacherError, match=r"teacher chat at .*status 401") as scored:
                score(server.url, rows(1), ScoreOptions(), **options)
            for raised in (probed, scored):
                assert options.get("api_key_env", "401") in str(raised.value)


def test_the_probe_passes_up_to_the_limits_and_names_them(server: Served):
    run_probe(server.url, top_k=VOCAB, context=127)
    with pytest.raises(RecipeError, match=r"128 tokens .*expected 129 or more"):
        run_probe(server.url, context=128)
    with pytest.raises(RecipeError, match=r"found other, expected a model of .*: tiny"):
        run_probe(server.url, model="other")
    with pytest.raises(RecipeError, match=r"distill.top_k"):
        run_probe(server.url, top_k=64)


def test_a_row_beyond_the_servers_context_is_named(server: Served):
    long = ScoreRequest([5] * 128, 1, "prompt 9/session 1")
    with pytest.raises(TeacherError, match=r"prompt 9/session 1: .*128 tokens .*the context of 128"):
        score(server.url, [long], ScoreOptions())


def test_weights_that_are_not_finite_are_reported():
    broken = tiny()
    with served(broken) as server:
        with torch.no_grad():
            next(iter(broken.parameters())).fill_(torch.nan)
        answer = ask(server.url, prompt_logprobs=1)
    assert answer.status_code == 500
    assert "not finite" in answer.json()["error"]["message"]

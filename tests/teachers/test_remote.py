"""Teachers behind a URL whose server misbehaves: tried again, or a named error for each way to fail."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
import torch
from transformers import PreTrainedModel

from practicum.engines.protocol import ScoreOptions, ScoreRequest, Scores
from practicum.errors import RecipeError, TeacherError
from practicum.processes.http_client import Unusable, message_of
from practicum.recipe.schema.teacher_sections import Teacher
from practicum.teachers.prompt_logprobs import Misaligned, read_scores
from practicum.teachers.remote_teacher import RemoteScorer, probe_teacher
from tests.engines.engines import tiny
from tests.serving.servers import MODEL
from tests.teachers.models import assert_same, in_process, rows, score_rows
from tests.teachers.scoring_server import scoring_server

VOCAB = 63
T = TypeVar("T")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny()


def use(url: str, work: Callable[[RemoteScorer], Coroutine[Any, Any, T]], **options: Any) -> T:
    """Run some work with a teacher at this URL, and close it."""

    async def run() -> T:
        given: dict[str, Any] = {"url": url, "model": MODEL} | options
        teacher = RemoteScorer("chat", Teacher(**given))
        try:
            return await work(teacher)
        finally:
            await teacher.aclose()

    return asyncio.run(run())


def score(
    url: str, some: list[ScoreRequest], wanted: ScoreOptions | None = None, **options: Any
) -> list[Scores]:
    return use(url, lambda teacher: score_rows(teacher, some, wanted or ScoreOptions()), **options)


def run_probe(url: str, *, top_k: int = 5, context: int = 100, **options: Any) -> None:
    use(url, lambda teacher: probe_teacher(teacher, ScoreOptions(top_k=top_k), VOCAB, context), **options)


def as_the_server(model: PreTrainedModel, some: list[ScoreRequest], wanted: ScoreOptions) -> list[Scores]:
    """What an engine says of the rows when it scores them from their second token on, as servers do."""
    whole = in_process(model, [ScoreRequest(row.ids, 1, row.name) for row in some], wanted)
    return [_tail(scores, row.start - 1) for row, scores in zip(some, whole, strict=True)]


def _tail(scores: Scores, skip: int) -> Scores:
    ids, best = scores.topk_ids, scores.topk_logprobs
    top = (None, None) if ids is None or best is None else (ids[skip:], best[skip:])
    return Scores(scores.logprobs[skip:], *top, scores.version)


def test_a_row_without_response_tokens_asks_nobody(model: PreTrainedModel):
    with scoring_server(model) as server:
        scores = score(server.url, [ScoreRequest([5, 6, 7], 3, "prompt 0")], ScoreOptions(top_k=4))[0]
        assert server.manners.completions == 0
    assert scores.topk_ids is not None
    assert scores.logprobs.shape == (0,)
    assert scores.topk_ids.shape == (0, 4)


@pytest.mark.parametrize("wanted", [ScoreOptions(temperature=0.5), ScoreOptions(hidden=True)])
def test_what_servers_do_not_give_is_refused(wanted: ScoreOptions):
    with pytest.raises(TeacherError, match=r"teacher chat can't return .*prompt 0"):
        score("http://127.0.0.1:9/v1", rows(1), wanted)


def test_no_more_requests_are_open_than_allowed(model: PreTrainedModel):
    with scoring_server(model, answers_when_open=3, linger_s=0.02) as server:
        score(server.url, rows(12), concurrency=3)
        assert server.manners.most_open == 3
        assert len(server.manners.connections) <= 3, "connections are kept"


def test_busy_time_counts_open_requests_once(model: PreTrainedModel):
    async def work(teacher: RemoteScorer) -> tuple[float, float]:
        await score_rows(teacher, rows(4), ScoreOptions())
        first = teacher.busy_s
        await asyncio.sleep(0.05)
        return first, teacher.busy_s

    with scoring_server(model, answers_when_open=4, linger_s=0.05) as server:
        busy, later = use(server.url, work)
    assert 0.05 <= busy == later


@pytest.mark.parametrize(
    "trouble",
    [{"fails_first": 2}, {"fails_first": 2, "fail_status": 429, "retry_after": "0.01"}, {"drops_first": 2}],
    ids=["503", "429", "dropped connection"],
)
def test_passing_trouble_is_tried_again(model: PreTrainedModel, trouble: dict[str, Any]):
    some = rows(1)
    with scoring_server(model, **trouble) as server:
        got = score(server.url, some)
        assert server.manners.completions == 3
    assert_same(got, as_the_server(model, some, ScoreOptions()))


def test_trouble_that_stays_is_reported_with_teacher_row_and_tries(model: PreTrainedModel):
    with scoring_server(model, fails_first=100) as server:
        expected = (
            r"teacher chat at http.*, prompt 0/session 0: no response after 4 tries: status 503: overloaded"
        )
        with pytest.raises(TeacherError, match=expected):
            score(server.url, rows(1))
        assert server.manners.completions == 4


def test_a_server_that_asks_for_a_pause_beyond_the_deadline_is_not_waited_for(model: PreTrainedModel):
    with (
        scoring_server(model, fails_first=1, fail_status=429, retry_after="3000") as server,
        pytest.raises(TeacherError, match="no response after 1 try: status 429"),
    ):
        score(server.url, rows(1), deadline_s=1000.0)


def test_a_refusal_is_not_tried_again_and_cancels_the_other_rows(model: PreTrainedModel):
    some = rows(3)
    bad = ScoreRequest([5] * 77, 1, "prompt 9/session 1")
    with scoring_server(model, refuses_prompts_of=77) as server:
        expected = r"teacher chat at .*, prompt 9/session 1: status 400: a prompt of 77 tokens is not to my"
        with pytest.raises(TeacherError, match=expected):
            # One at a time: the rows behind the bad one are never asked for.
            score(server.url, [some[0], bad, *some[1:]], concurrency=1)
        assert server.manners.completions == 2


def test_a_server_that_hangs_is_named_at_the_deadline(model: PreTrainedModel):
    with scoring_server(model) as server:
        server.manners.hangs.set()
        with pytest.raises(TeacherError, match=r"teacher chat at .*, prompt 0/.*: no response within 0.3 s"):
            score(server.url, rows(1), deadline_s=0.3)


def test_an_answer_without_scores_is_reported_with_teacher_and_row(model: PreTrainedModel):
    with (
        scoring_server(model, ignores_prompt_logprobs=True) as server,
        pytest.raises(TeacherError, match=r"teacher chat at .*, prompt 0/.* no prompt_logprobs"),
    ):
        score(server.url, rows(1))


def test_closing_works_from_another_thread_and_ends_scoring(model: PreTrainedModel):
    async def work(teacher: RemoteScorer) -> None:
        await score_rows(teacher, rows(1), ScoreOptions())
        await asyncio.to_thread(teacher.close)
        with pytest.raises(TeacherError, match="teacher chat was closed"):
            await score_rows(teacher, rows(1), ScoreOptions())

    with scoring_server(model) as server:
        use(server.url, work)


def test_a_key_that_is_not_in_the_environment_is_a_recipe_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CHAT_KEY", raising=False)
    with pytest.raises(RecipeError, match=r"teachers\.chat\.api_key_env: found CHAT_KEY, which is not set"):
        RemoteScorer("chat", Teacher(url="http://127.0.0.1:9/v1", model=MODEL, api_key_env="CHAT_KEY"))


@pytest.mark.parametrize(
    ("manners", "asked", "path", "words"),
    [
        ({"ignores_prompt_logprobs": True}, {}, "url", "can't score prompts.*vllm serve"),
        ({"shifts_ids": True}, {}, "url", "not aligned: it scored 16 other token ids"),
        ({"shifts_ids": True, "echoes_ids": False}, {}, "url", "not aligned: the logprobs of position"),
        ({"noise": 0.5}, {}, "url", "not deterministic: one sequence scored twice differs by"),
        ({}, {"top_k": 21}, "url", "status 400 .*--max-logprobs.*distill.top_k"),
        ({"refuses_prompts_of": 16}, {}, "url", "rejects the scores of a known sequence with status 400"),
        ({"fails_first": 9}, {}, "url", "can't be reached .*503"),
    ],
)
def test_the_probe_says_what_is_wrong_where_and_what_to_do(
    model: PreTrainedModel, manners: dict[str, Any], asked: dict[str, Any], path: str, words: str
):
    with scoring_server(model, **manners) as server, pytest.raises(RecipeError) as caught:
        run_probe(server.url, **asked)
    assert caught.value.path == f"teachers.chat.{path}"
    assert re.search(words, str(caught.value), re.DOTALL), str(caught.value)


def test_small_noise_and_a_server_that_names_no_length_pass_the_probe(model: PreTrainedModel):
    with scoring_server(model, noise=1e-4, max_model_len=None) as server:
        run_probe(server.url, context=10_000)


def test_the_probe_names_a_url_where_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: nobody else gets the port
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(RecipeError, match=r"teachers\.chat\.url: found http.*can't be reached"):
            run_probe(url)


def test_the_probe_knows_a_url_that_lacks_its_v1(model: PreTrainedModel):
    with (
        scoring_server(model) as server,
        pytest.raises(RecipeError, match=r"(?s)teachers\.chat\.url: .*404.*ends in /v1"),
    ):
        run_probe(server.url.removesuffix("/v1"))


def position(*tokens: tuple[int, float, int]) -> dict[str, Any]:
    return {str(token): {"logprob": logprob, "rank": rank} for token, logprob, rank in tokens}


def answer(*positions: Any, ids: list[int] | None = None) -> Any:
    return {"choices": [{"prompt_logprobs": list(positions), "prompt_token_ids": ids}]}


def test_the_top_k_is_by_rank_and_without_the_extra_token():
    entries = answer(
        None, position((4, -9.0, 40), (7, -0.5, 2), (3, -0.1, 1)), position((3, -1.0, 1), (9, -2.0, 2))
    )
    scores = read_scores(entries, [1, 4, 9], 1, 2)
    assert scores.topk_ids is not None
    assert scores.topk_logprobs is not None
    assert scores.logprobs.tolist() == [-9.0, -2.0]
    assert scores.topk_ids.tolist() == [[3, 7], [3, 9]]
    assert torch.equal(scores.topk_logprobs, torch.tensor([[-0.1, -0.5], [-1.0, -2.0]]))


def test_a_token_as_likely_as_the_last_of_the_top_k_does_not_take_its_place():
    entries = answer(None, position((4, -0.5, 2), (7, -0.5, 2), (3, -0.1, 1)))
    scores = read_scores(entries, [1, 4], 1, 2)
    assert scores.topk_ids is not None
    assert scores.topk_ids.tolist() == [[3, 7]]


@pytest.mark.parametrize(
    ("found", "error", "words"),
    [
        ({"choices": []}, Unusable, "no choices"),
        ([], Unusable, "no choices"),
        (answer(), Unusable, "no prompt_logprobs"),
        (answer(None, position((4, -1.0, 1), (5, -2.0, 2))), Misaligned, "2 positions for 3 tokens"),
        (answer(None, None, position((9, -1.0, 1), (5, -2.0, 2))), Unusable, "no logprobs for position 1"),
        (answer(None, position((4, -1.0, 1)), position((9, -1.0, 1))), Unusable, "1 of the 2 most likely"),
        (answer(None, {"4": 1.0}, {"9": 1.0}), Unusable, "can't be read"),
        (answer(None, {"4": {}}, {"9": {}}), Unusable, "can't be read"),
        (answer(None, position((4, float("nan"), 1), (5, -1.0, 2)), position((9, -1.0, 1), (5, -1.0, 2))),
         Unusable, "not finite"),
        (answer(None, None, None, ids=[1, 4, 8]), Misaligned, "other token ids"),
    ],
)  # fmt: skip
def test_an_answer_with_something_missing_is_unusable(found: Any, error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        read_scores(found, [1, 4, 9], 1, 2)


def test_positions_of_the_prompt_are_not_read():
    scores = read_scores(answer(None, None, position((9, -1.5, 3))), [1, 4, 9], 2, 0)
    assert scores.logprobs.tolist() == [-1.5]


def test_what_a_server_says_is_unwrapped():
    assert message_of('{"error": {"message": "no  such\\nthing"}}') == "no such thing"
    assert message_of('{"object": "error", "message": "bad"}') == "bad"
    assert message_of('{"detail": [{"msg": "x"}]}') == "[{'msg': 'x'}]"
    assert message_of("<html>") == "<html>"

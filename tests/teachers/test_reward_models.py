"""Reward models: one score in three places, and a named error for each way to fail."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from practicum.errors import RecipeError, RecipeErrors, TeacherError
from practicum.models.tokenizer import make_tokenizer
from practicum.recipe.schema.teacher_sections import Own, OwnPlacement, RewardModel
from practicum.rewards.judge import CannotScore, Judge, JudgeInput, question, read_score
from practicum.rewards.local_judges import Classifier, encode_case, load_judge
from practicum.rewards.remote_judge import RemoteJudge
from practicum.rewards.reward_scorer import HostedJudge, RewardScorer, check_reward_models, place_model
from tests.serving.servers import MODEL
from tests.teachers.models import save_tiny
from tests.teachers.tiny_reward_models import (
    cases,
    judging_server,
    local,
    run,
    save_classifier,
    save_judge,
    score_all,
    values,
    vllm_probs,
)

PROMPT = "{prompt}{response}?"


def classifier_of(folder: Path | str, **more: Any) -> RewardModel:
    given: dict[str, Any] = {"model": str(folder), "device": "cpu", "label": 1}
    return RewardModel(**given | more)


def judge_of(folder: Path | str, **more: Any) -> RewardModel:
    given: dict[str, Any] = {"kind": "judge", "model": str(folder), "device": "cpu"}
    return RewardModel(**given | {"prompt": PROMPT, "max_new_tokens": 24} | more)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    save_classifier(folder)
    return folder


@contextmanager
def started(spec: RewardModel) -> Iterator[RewardScorer]:
    """A reward model in a separate process."""
    scorer = place_model("rm", spec, 60)
    try:
        scorer.judges[0].ready()
        yield scorer
    finally:
        scorer.close()


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    save_judge(folder)
    return folder


@pytest.fixture(scope="module")
def own(classifier: Path) -> Iterator[RewardScorer]:
    """A process that the tests which do not end it share."""
    with started(classifier_of(classifier, placement="own")) as scorer:
        yield scorer


def scorer_of(judge: Judge) -> RewardScorer:
    return RewardScorer("rm", [judge], deadline_s=None)


def scores_here(spec: RewardModel, some: list[JudgeInput]) -> list[float | CannotScore]:
    with local(spec) as model:
        return run(score_all(scorer_of(model), some))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("pad", [None, 0])
def test_a_classifiers_score_does_not_depend_on_its_batch(tmp_path: Path, family: str, pad: int | None):
    model = save_classifier(tmp_path, family=family, pad_token_id=pad)
    some, tokenizer = cases(24), make_tokenizer()
    with torch.no_grad():
        alone = [model(torch.tensor([encode_case(c, tokenizer)])).logits[0, 1].item() for c in some]
    found = [
        values(scores_here(classifier_of(tmp_path, batch_tokens=budget), some)) for budget in (1, 90, 8192)
    ]
    torch.testing.assert_close(found[0], alone, rtol=0, atol=1e-5)
    assert found[0] == found[1] == found[2], "to the bit: timing decides what arrives together"
    assert max(alone) - min(alone) > 1e-2, "a test of rows that differ"


def test_without_any_padding_token_rows_are_judged_one_by_one(tmp_path: Path):
    model = save_classifier(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    some = cases(5)
    with torch.no_grad():
        alone = [model(torch.tensor([encode_case(c, tokenizer)])).logits[0, 1].item() for c in some]
    torch.testing.assert_close(values(scores_here(classifier_of(tmp_path), some)), alone, rtol=0, atol=1e-5)


def test_batches_keep_their_token_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_classifier(tmp_path, pad_token_id=0)
    sizes: list[int] = []
    next_batch = Classifier._next_batch

    def noting(self: Classifier) -> Any:
        jobs = next_batch(self)
        sizes.append(sum(self._width(job.ids) for job in jobs))
        return jobs

    monkeypatch.setattr(Classifier, "_next_batch", noting)
    scores_here(classifier_of(tmp_path, batch_tokens=90), cases(24))
    assert max(sizes) <= 90
    assert max(sizes) > 45, "rows go together"


def test_a_chat_goes_through_the_classifiers_template():
    tokenizer = make_tokenizer()
    plain, chat = cases(3)[2], cases(3, chat=True)[2]
    assert (
        tokenizer.decode(encode_case(chat, tokenizer))
        == f"<user>{chat.prompt}<assistant>{chat.response}<eos>"
    )
    assert tokenizer.decode(encode_case(plain, tokenizer)) == plain.prompt + plain.response
    tokenizer.chat_template = None
    assert encode_case(chat, tokenizer) == encode_case(plain, tokenizer)


@pytest.mark.parametrize("chat", [False, True])
def test_a_classifier_gives_the_same_scores_in_all_places(classifier: Path, own: RewardScorer, chat: bool):
    some = cases(12, chat=chat)
    here = values(scores_here(classifier_of(classifier), some))
    assert values(run(score_all(own, some))) == pytest.approx(here, rel=0, abs=1e-5)
    with judging_server(classifier_of(classifier)) as (url, _):
        assert values(ask(url, some, label=1)) == pytest.approx(here, rel=0, abs=1e-5)


@pytest.mark.parametrize("labels", [1, 3])
def test_a_server_without_use_activation_gives_probabilities_and_the_probe_says_so(
    tmp_path: Path, labels: int
):
    model, some = save_classifier(tmp_path, labels=labels), cases(6)
    tokenizer = make_tokenizer()
    with torch.no_grad():
        rows = [model(torch.tensor([encode_case(c, tokenizer)])).logits[0] for c in some]
    spec = classifier_of(tmp_path, label=labels - 1)
    with judging_server(spec, knows_use_activation=False) as (url, _):
        found = values(ask(url, some, label=labels - 1))
        assert "probabilities" in probe(url, label=labels - 1)
    assert found == pytest.approx([vllm_probs(row)[-1].item() for row in rows], rel=0, abs=1e-5)
    with judging_server(spec) as (url, _):
        assert "unchanged by activations" in probe(url, label=labels - 1)


@pytest.mark.long
def test_a_judge_gives_the_same_verdicts_in_all_places(judge: Path):
    spec, some = judge_of(judge), cases(12)
    here = scores_here(spec, some)
    numbers = [verdict for verdict in here if isinstance(verdict, float)]
    assert 0 < len(numbers) < len(some), "a test of cases with and without a number"
    with started(judge_of(judge, placement=OwnPlacement(own=Own(threads=1)))) as scorer:
        assert_same(run(score_all(scorer, some)), here)
    with judging_server(spec) as (url, _):
        assert_same(ask(url, some, kind="judge", prompt=PROMPT, max_new_tokens=24), here)


def assert_same(found: list[float | CannotScore], expected: list[float | CannotScore]) -> None:
    assert [str(verdict) for verdict in found] == [str(verdict) for verdict in expected]


@pytest.mark.parametrize(
    ("reply", "score"),
    [("7", 0.7), (" 8.5/10", 0.85), ("-2", -0.2), ("I say 3, not 9.", 0.3), ("10\n\nQuestion: 4", 1.0)],
)
def test_the_first_number_of_a_reply_counts(reply: str, score: float):
    assert read_score(reply) == pytest.approx(score)


@pytest.mark.parametrize("reply", ["", "good", "ten out of ten " * 20])
def test_a_reply_without_a_number_is_shown(reply: str):
    with pytest.raises(CannotScore, match=f"replied '{reply[:40]}.*which has no number") as caught:
        read_score(reply)
    assert len(str(caught.value)) < 130


def test_a_number_that_no_reward_can_hold_is_no_score():
    with pytest.raises(CannotScore, match="expected a finite number"):
        read_score("9" * 60)


def test_a_question_is_filled_in():
    spec = judge_of("m", prompt="{{x}} {prompt}|{response}|{answer}")
    assert question(spec, JudgeInput("p", "1+1=", "{2}", "2")) == "{x} 1+1=|{2}|2"
    with pytest.raises(CannotScore, match=r"a prompt with \{answer\}, and this row has none"):
        question(spec, JudgeInput("p", "1+1=", "2", None))


@pytest.mark.parametrize("kind", ["classifier", "judge"])
def test_a_case_beyond_the_context_fails_alone_in_words(classifier: Path, judge: Path, kind: str):
    spec = classifier_of(classifier) if kind == "classifier" else judge_of(judge, prompt="{response}5")
    long = JudgeInput("prompt 9", "1" * 100, "2" * 120, None)
    first, second = scores_here(spec, [long, JudgeInput("prompt 1", "1+1=", "2", None)])
    assert isinstance(first, CannotScore)
    assert re.search("a context of [0-9]+ tokens", str(first))
    assert isinstance(second, float) or "no number" in str(second)


@pytest.mark.parametrize("kind", ["classifier", "judge"])
@pytest.mark.parametrize("where", ["host", "disk"])
def test_a_model_that_slept_gives_the_same_scores(classifier: Path, judge: Path, kind: str, where: Any):
    spec = classifier_of(classifier) if kind == "classifier" else judge_of(judge)
    some = cases(6)
    with local(spec) as model:
        place = scorer_of(model)
        before = run(score_all(place, some))
        assert model.sleeper is not None
        model.sleeper.sleep()
        model.sleeper.offload(where)
        with pytest.raises(TeacherError, match=r"reward model rm failed in prompt 0/session 0: .* sleeps"):
            run(place.judge(some[0]))
        model.sleeper.wake()
        assert_same(run(score_all(place, some)), before)


@pytest.mark.long
def test_a_process_that_hangs_is_named_at_the_deadline_and_killed(classifier: Path):
    with started(classifier_of(classifier, placement="own", deadline_s=1.0)) as scorer:
        assert isinstance(scorer.judges[0], HostedJudge)
        os.kill(scorer.judges[0].host.pid, signal.SIGSTOP)
        with pytest.raises(TeacherError, match=r"reward model rm .*did not answer"):
            run(score_all(scorer, cases(1)))
        with pytest.raises(TeacherError, match=r"reward model rm can't continue: .* was killed"):
            run(score_all(scorer, cases(1)))


def test_an_own_process_tells_why_it_can_not_judge_a_case(own: RewardScorer):
    failure = run(own.judge(JudgeInput("prompt 9", "1" * 100, "2" * 100, None)))
    assert isinstance(failure, CannotScore)
    assert "a context of 128 tokens; prompt and answer take 200" in str(failure)


def rewarder(url: str, **options: Any) -> RemoteJudge:
    given: dict[str, Any] = {"url": url, "model": MODEL}
    return RemoteJudge("rm", RewardModel(**given | options))


def ask(url: str, some: list[JudgeInput], **options: Any) -> list[float | CannotScore]:
    async def work() -> list[float | CannotScore]:
        place = rewarder(url, **options)
        try:
            return await score_all(scorer_of(place), some)
        finally:
            await place.aclose()

    return asyncio.run(work())


def probe(url: str, *, chat: bool = False, **options: Any) -> str:
    async def work() -> str:
        place = rewarder(url, **options)
        try:
            return await place.probe(chat=chat)
        finally:
            await place.aclose()

    return asyncio.run(work())


def test_a_case_that_the_server_refuses_is_unjudged_and_other_refusals_stop(classifier: Path):
    for status, kind in ((400, CannotScore), (403, TeacherError)):
        with judging_server(classifier_of(classifier), fails_first=1, fail_status=status) as (url, _):
            if kind is CannotScore:
                (verdict,) = ask(url, cases(1))
                assert "refused with status 400: overloaded" in str(verdict)
            else:
                with pytest.raises(TeacherError, match=r"reward model rm at .*status 403"):
                    ask(url, cases(1))


@pytest.mark.parametrize(
    ("asked", "key", "words"),
    [
        ({"model": "other"}, "model", "found other, expected a model of .*: tiny"),
        ({"label": 3}, "label", "found 3, expected 0 to 2: it has 3 outputs"),
        ({"kind": "judge", "prompt": PROMPT}, "url", "refuses a question with status 404"),
    ],
)
def test_the_probe_says_what_is_wrong_where(classifier: Path, asked: dict[str, Any], key: str, words: str):
    with judging_server(classifier_of(classifier)) as (url, _), pytest.raises(RecipeError) as caught:
        probe(url, **asked)
    assert caught.value.path == f"reward.models.rm.{key}"
    assert re.search(words, str(caught.value)), str(caught.value)


def test_the_probe_of_a_judge_and_of_nobody(judge: Path):
    with judging_server(judge_of(judge)) as (url, _):
        assert probe(url, kind="judge", prompt=PROMPT, max_new_tokens=24) == "replies to prompts"
        with pytest.raises(RecipeError, match=r"(?s)refuses to classify with status 404.*kind: judge"):
            probe(url)
    with pytest.raises(RecipeError, match=r"reward\.models\.rm\.url: found http.*can't be reached"):
        probe("http://127.0.0.1:9/v1")


def test_the_probe_needs_the_servers_key(classifier: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RM_KEY", "s3cret")
    with judging_server(classifier_of(classifier), api_key="s3cret") as (url, _):
        assert "3 outputs" in probe(url, api_key_env="RM_KEY", chat=True)
        with pytest.raises(RecipeError, match=r"reward\.models\.rm\.api_key_env: .*401"):
            probe(url)
    monkeypatch.delenv("RM_KEY")
    with pytest.raises(RecipeError, match=r"reward\.models\.rm\.api_key_env: found RM_KEY, which is not set"):
        rewarder("http://127.0.0.1:9/v1", api_key_env="RM_KEY")


def check(longest: int = 20, **models: RewardModel) -> list[str]:
    return check_reward_models(models, make_tokenizer(), longest)


def test_sound_models_are_described(classifier: Path, judge: Path):
    found = check(rm=classifier_of(classifier), asked=judge_of(judge), far=judge_of("x", url="http://x/v1"))
    assert found == [
        "reward model rm: Qwen3ForSequenceClassification, output 1 of 3",
        "reward model asked: Qwen3ForCausalLM, replies with a number",
    ]


def test_what_is_wrong_with_models_is_found_without_their_weights(
    classifier: Path, judge: Path, tmp_path: Path
):
    wrong = {
        "label": classifier_of(classifier, label=3),
        "kind": classifier_of(judge),
        "asked": judge_of(classifier),
        "nowhere": classifier_of(tmp_path / "nowhere"),
        "short": judge_of(judge),
    }
    with pytest.raises(RecipeErrors) as caught:
        check(longest=104, **wrong)
    found = {error.path: str(error) for error in caught.value.errors}
    assert list(found) == [f"reward.models.{name}" for name in (
        "label.label", "kind.model", "asked.model", "nowhere.model", "short.model"
    )]  # fmt: skip
    assert "0 to 2" in found["reward.models.label.label"]
    assert "kind: judge" in found["reward.models.kind.model"]
    assert "kind: classifier" in found["reward.models.asked.model"]
    assert "tokens + 1 of the judge's prompt + 24 of the reply = 129" in found["reward.models.short.model"]


def test_a_label_beyond_the_outputs_is_refused_when_loaded(classifier: Path):
    with pytest.raises(RecipeError, match=r"reward\.models\.rm\.label: found 3, expected 0 to 2"):
        load_judge("rm", classifier_of(classifier, label=3), 60)


def test_a_language_model_is_not_taken_for_a_classifier_with_random_outputs(tmp_path: Path):
    save_tiny(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"reward\.models\.rm\.model: .*without the weights score.weight"):
        load_judge("rm", classifier_of(tmp_path), 60)

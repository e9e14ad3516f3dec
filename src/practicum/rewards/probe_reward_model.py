"""Whether a server can be a reward model, found out before the first step; if not, a RecipeError says why."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

from practicum.errors import RecipeError
from practicum.places.http_client import Refused, Unreachable
from practicum.rewards.loaded_reward_model import check_label
from practicum.rewards.prompted_judge import question
from practicum.rewards.remote_reward_model import RemoteRewardModel, Unreadable
from practicum.rewards.reward_place import JudgeInput

T = TypeVar("T")


async def probe_reward_model(place: RemoteRewardModel, *, chat: bool) -> str:
    """Ask for the server's models and about one answer; what it gives, in words.

    `chat`: cases will be conversations.
    """
    models = await _asked(place, "its list of models", place.ask("GET", "/models", None, "its models"))
    _check_models(place, models)
    talk = ({"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"})
    case = JudgeInput("the probe", "1+1=", "2", "2", talk if chat else None)
    if place.spec.kind == "judge":
        await _asked(place, "a question", place.reply(question(place.spec, case), case.name))
        return "answers questions"
    plain = await _asked(place, "to classify", place.outputs(case, activation=False))
    check_label(place.path, place.spec.label, len(plain))
    active = await _asked(place, "to classify", place.outputs(case, activation=True))
    if plain != active:
        return f"gives {len(plain)} outputs as the model has them"
    likely = min(plain) >= 0 and max(plain) <= 1
    return f"gives {len(plain)} outputs, " + (
        "which look like probabilities: it does not know use_activation"
        if likely
        else "which its model has without softmax or sigmoid"
    )


def _check_models(place: RemoteRewardModel, answer: Any) -> None:
    try:
        names = sorted(str(entry["id"]) for entry in answer["data"])
    except (KeyError, TypeError) as error:
        raise RecipeError(
            f"{place.path}.url",
            f"{place.url}/models without a list of models",
            "an OpenAI-compatible server",
        ) from error
    if place.model not in names:
        raise RecipeError(
            f"{place.path}.model",
            place.model,
            f"a model of {place.url}: {', '.join(names) or 'it has none'}",
            "take one of these names, or serve the model under this one (vllm serve … --served-model-name)",
        )


async def _asked(place: RemoteRewardModel, what: str, answer: Awaitable[T]) -> T:
    try:
        return await answer
    except Refused as refusal:
        found = f"a server that refuses {what} with status {refusal.status} ({refusal.message})"
        if refusal.status in (401, 403):
            advice = "name the environment variable that holds the server's key"
            raise RecipeError(
                f"{place.path}.api_key_env", found, "a key that it accepts", advice
            ) from refusal
        raise RecipeError(f"{place.path}.url", found, _expected(place), _advice(place)) from refusal
    except Unreadable as error:
        raise RecipeError(f"{place.path}.url", str(error), _expected(place), _advice(place)) from error
    except Unreachable as error:
        raise RecipeError(
            f"{place.path}.url",
            f"{place.url}, which can't be reached ({error})",
            "a server that answers",
            f"start it (vllm serve {place.model} --port …), or correct the URL",
        ) from error


def _expected(place: RemoteRewardModel) -> str:
    if place.spec.kind == "judge":
        return "an OpenAI-compatible server with /models and /completions below this URL"
    return "a server of a classification model with /v1/models and /classify, such as vllm serve"


def _advice(place: RemoteRewardModel) -> str:
    if not place.url.endswith("/v1"):
        return "the URL of such servers ends in /v1"
    return "" if place.spec.kind == "judge" else "a language model is asked with kind: judge"

"""What can be known of reward models from files and configs, without their weights."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from practicum.errors import RecipeError, RecipeErrors
from practicum.models.load_model import require_model_folder
from practicum.models.model_files import must_read, read_config
from practicum.recipe.checks.value_forms import fill
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.teacher_sections import RewardModel
from practicum.rewards.loaded_reward_model import check_label, load_tokenizer

_CLASSIFIER = "ForSequenceClassification"


def check_reward_models(recipe: Recipe, student: PreTrainedTokenizerBase, longest: int) -> list[str]:
    """What each reward model that is loaded here is, in sentences; all mistakes come together.

    `longest` is the longest prompt and answer together, in the student's tokens.
    """
    findings, problems = [], []
    for name, spec in recipe.reward.models.items():
        if spec.url is not None:
            continue
        try:
            findings.append(f"reward model {name}: {_describe(f'reward.models.{name}', spec)}")
            _check_context(f"reward.models.{name}", spec, student, longest)
        except RecipeError as problem:
            problems.append(problem)
    if problems:
        raise RecipeErrors(f"recipe {recipe.name}", problems)
    return findings


def _describe(path: str, spec: RewardModel) -> str:
    config = _config(path, spec)
    named = next(iter(getattr(config, "architectures", None) or ()), type(config).__name__)
    is_classifier = named.endswith(_CLASSIFIER)
    if spec.kind == "classifier":
        if not is_classifier:
            expected = f"a model with an architecture …{_CLASSIFIER}"
            advice = "a language model is asked with kind: judge"
            raise RecipeError(f"{path}.model", f"{spec.model}, a {named}", expected, advice)
        check_label(path, spec.label, config.num_labels)
        return f"{named}, output {spec.label} of {config.num_labels}"
    if is_classifier:
        expected, advice = "a causal language model", "set kind: classifier"
        raise RecipeError(f"{path}.model", f"{spec.model}, a {named}", expected, advice)
    return f"{named}, asked for a number"


def _check_context(path: str, spec: RewardModel, student: PreTrainedTokenizerBase, longest: int) -> None:
    """Lengths are known only if the model reads texts as the student does."""
    context = getattr(_config(path, spec).get_text_config(), "max_position_embeddings", None)
    tokenizer = load_tokenizer(spec.model, path)
    if context is None or tokenizer.get_vocab() != student.get_vocab():
        return
    needed, parts = longest, f"prompt and answer of {longest} tokens"
    if spec.kind == "judge":
        template_tokens = len(tokenizer.encode(_bare(spec.prompt)))
        needed += template_tokens + spec.max_new_tokens
        parts += f" + {template_tokens} of the question + {spec.max_new_tokens} of the reply"
    if needed > context:
        advice = "use a model with a longer context, or shorten prompts, answers or the question"
        raise RecipeError(f"{path}.model", f"{parts} = {needed}", f"at most its context of {context}", advice)


def _bare(prompt: str) -> str:
    return fill(prompt, {"prompt": "", "response": "", "answer": ""})


def _config(path: str, spec: RewardModel) -> Any:
    require_model_folder(spec.model, f"{path}.model")
    with must_read(spec.model, f"{path}.model", "a model in HuggingFace format"):
        return read_config(spec.model)

"""Whether a teacher means the same by a token as the student: content is compared, not size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from practicum.errors import RecipeError

_SHOWN = 3


def compare_vocabularies(
    student: PreTrainedTokenizerBase,
    teacher: PreTrainedTokenizerBase,
    name: str,
    *,
    chat: bool = True,
    key: str = "model",
) -> list[RecipeError]:
    """Every difference that would make scores of token ids be about other text than the student's.

    `chat`: prompts go through the chat template, which must then be the same. `key` is the key of
    teachers.<name> that the tokenizer comes from.
    """
    path = f"teachers.{name}.{key}"
    if problem := _compare_tokens(student.get_vocab(), teacher.get_vocab(), path):
        return [problem]
    problems = [
        RecipeError(
            path,
            f"the {what} token {_shown(theirs)}, where the student has {_shown(ours)}",
            f"the student's {what} token",
            f"the teacher was trained with a different {what} token: set model.tokenizer to the teacher's, "
            f"or teachers.{name}.tokenizer to one with the student's tokens if the teacher knows them",
        )
        for what, ours, theirs in (
            ("EOS", student.eos_token, teacher.eos_token),
            ("BOS", student.bos_token, teacher.bos_token),
        )
        if ours != theirs
    ]
    problems += _compare_specials(student, teacher, path)
    if chat and _template(student) != _template(teacher):
        problems.append(_other_template(student, teacher, path))
    return problems


def _compare_tokens(ours: dict[str, int], theirs: dict[str, int], path: str) -> RecipeError | None:
    missing = sorted(ours.keys() - theirs.keys(), key=ours.__getitem__)
    more = sorted(theirs.keys() - ours.keys(), key=theirs.__getitem__)
    moved = sorted((t for t in ours if theirs.get(t, ours[t]) != ours[t]), key=ours.__getitem__)
    moved_text = [f"{token!r} is {ours[token]} here, {theirs[token]} there" for token in moved[:_SHOWN]]
    parts = [f"{len(missing):,} of the student's tokens are missing ({_first(missing)})"] if missing else []
    parts += [f"{len(more):,} are not the student's ({_first(more)})"] if more else []
    parts += [f"{len(moved):,} have other ids ({', '.join(moved_text)})"] if moved else []
    if not parts:
        return None
    return RecipeError(
        path,
        f"a vocabulary of {len(theirs):,} tokens that differs from the student's {len(ours):,}: "
        + "; ".join(parts),
        "the same tokens with the same ids",
        "scores are exchanged by token id: take a teacher of the student's family, or a student of the "
        "teacher's",
    )


def _compare_specials(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, path: str
) -> list[RecipeError]:
    """Tokens that only one side treats as special, except BOS, EOS and padding (which is never scored)."""
    ignored = _named_specials(student) | _named_specials(teacher)
    ours, theirs = set(student.all_special_tokens) - ignored, set(teacher.all_special_tokens) - ignored
    if ours == theirs:
        return []
    parts = [f"{_first(sorted(theirs - ours))} only of the teacher"] if theirs - ours else []
    parts += [f"{_first(sorted(ours - theirs))} only of the student"] if ours - theirs else []
    advice = "text around them is split into other tokens: set model.tokenizer to the teacher's"
    return [RecipeError(path, f"special tokens {' and '.join(parts)}", "the same special tokens", advice)]


def _named_specials(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    return {str(t) for t in (tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token) if t is not None}


def _other_template(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, path: str
) -> RecipeError:
    sides = (("the teacher", teacher), ("the student", student))
    missing = [who for who, tokenizer in sides if not _template(tokenizer)]
    found = f"no chat template of {missing[0]}" if missing else "a chat template that is not the student's"
    advice = (
        "the teacher would read prompts in a format that it was not trained on: set model.tokenizer to the "
        "teacher's"
    )
    return RecipeError(path, found, "the student's chat template", advice)


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    template: Any = tokenizer.chat_template
    return str(template or "").strip()


def _first(tokens: Sequence[str]) -> str:
    return ", ".join(map(repr, tokens[:_SHOWN])) + (", …" if len(tokens) > _SHOWN else "")


def _shown(token: Any) -> str:
    return "none" if token is None else repr(str(token))

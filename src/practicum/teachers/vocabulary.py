"""Compare a teacher's vocabulary with the student's, token by token."""

from __future__ import annotations

from collections.abc import Sequence

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
    """Return every difference by which token ids would stand for different text.

    With `chat`, prompts use the chat template, which must be equal too. `key` is the key of teachers.<name>
    that the tokenizer comes from.
    """
    path = f"teachers.{name}.{key}"
    if problem := _compare_tokens(student.get_vocab(), teacher.get_vocab(), path):
        return [problem]
    problems = [
        RecipeError(
            path,
            f"the {what} token {_shown(theirs)}, while the student has {_shown(ours)}",
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
    # Padding is never scored, and BOS and EOS are compared above.
    sides = (student, teacher)
    ignored = {str(token) for t in sides for token in (t.pad_token, t.eos_token, t.bos_token)}
    ours, theirs = (set(t.all_special_tokens) - ignored for t in sides)
    if ours != theirs:
        parts = [f"{_first(sorted(theirs - ours))} only of the teacher"] if theirs - ours else []
        parts += [f"{_first(sorted(ours - theirs))} only of the student"] if ours - theirs else []
        advice = "they change how text is split into tokens: set model.tokenizer to the teacher's"
        found = f"special tokens {' and '.join(parts)}"
        problems.append(RecipeError(path, found, "the same special tokens", advice))
    own, other = (str(t.chat_template or "").strip() for t in sides)
    if chat and own != other:
        found = "a chat template that differs from the student's"
        if not own or not other:
            found = f"no chat template of the {'student' if other else 'teacher'}"
        advice = "the teacher was not trained on the student's format: set model.tokenizer to the teacher's"
        problems.append(RecipeError(path, found, "the student's chat template", advice))
    return problems


def _compare_tokens(ours: dict[str, int], theirs: dict[str, int], path: str) -> RecipeError | None:
    missing = sorted(ours.keys() - theirs.keys(), key=ours.__getitem__)
    more = sorted(theirs.keys() - ours.keys(), key=theirs.__getitem__)
    moved = sorted((t for t in ours if theirs.get(t, ours[t]) != ours[t]), key=ours.__getitem__)
    moved_text = [
        f"{token!r} is {ours[token]} of the student, {theirs[token]} of the teacher"
        for token in moved[:_SHOWN]
    ]
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
        "scores are exchanged by token id: use a teacher of the student's family, or a student of the "
        "teacher's",
    )


def _first(tokens: Sequence[str]) -> str:
    return ", ".join(map(repr, tokens[:_SHOWN])) + (", …" if len(tokens) > _SHOWN else "")


def _shown(token: object) -> str:
    return "none" if token is None else repr(str(token))

"""What a row of a dataset file must look like."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

_ROLES = ("system", "developer", "user", "assistant", "tool")


def find_fault(row: Any, prompt_column: str, answer_column: str, needs_answer: bool) -> str | None:
    """What is wrong with a row, in words; None if it is good."""
    if not isinstance(row, dict):
        return f"a row is an object with named columns, this is {_named(row)}"
    if prompt_column not in row:
        return _lacks(row, prompt_column, "prompt")
    fault = _prompt_fault(row[prompt_column])
    if fault:
        return f"column {prompt_column!r}: {fault}"
    if needs_answer:
        if answer_column not in row:
            return _lacks(row, answer_column, "answer")
        fault = _answer_fault(row[answer_column])
        if fault:
            return f"column {answer_column!r}: {fault}"
    return None


def _lacks(row: Mapping[str, Any], column: str, role: str) -> str:
    near = get_close_matches(column, row, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"no column {column!r} for the {role}, only {', '.join(map(repr, row)) or 'none'}{hint}"


def _prompt_fault(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return None if prompt.strip() else "the prompt is empty"
    if not isinstance(prompt, list):
        return f"a prompt is a string or a list of messages, this is {_named(prompt)}"
    if not prompt:
        return "the prompt has no messages"
    for n, message in enumerate(prompt, start=1):
        if not isinstance(message, dict):
            return f"message {n} is {_named(message)}, expected an object with role and content"
        if message.get("role") not in _ROLES:
            return f"message {n} has role {message.get('role')!r}, expected {', '.join(_ROLES)}"
        if not isinstance(message.get("content"), str):
            return f"message {n} has content {_named(message.get('content'))}, expected a string"
    if prompt[-1]["role"] == "assistant":
        return "the last message is the assistant's own, so nothing is left to answer"
    if not any(message["content"].strip() for message in prompt):
        return "every message is empty"
    return None


def _answer_fault(answer: Any) -> str | None:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return f"an answer is a string or a number, this is {_named(answer)}"
    if isinstance(answer, str) and not answer.strip():
        return "the answer is empty"
    return None


def _named(value: Any) -> str:
    if value is None:
        return "null"
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 40 else shown[:37] + '...'}"

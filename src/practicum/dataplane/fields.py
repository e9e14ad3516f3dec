"""The table of fields: dtype, shape, writer, padding rule and clock of each.

Everything that builds or checks a row is driven by this table. Rows are ragged and unpadded. The
ragged axis is always the first one, so position ids of several axes are held as [P+R, D].
P prompt tokens, R response tokens, K teacher's top-k, L MoE layers, E experts per token,
D position axes, H hidden size of the widest teacher.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from practicum.errors import StoreError

Extent = Literal["scalar", "prompt", "response", "sequence", "object"]
Clock = Literal["frozen", "behaviour", "learner"]
"""Validity of a field: independent of weights (always valid), of the weights that sampled its row, or of the
weights that the step trains (valid in that step only)."""
NO_MATCH, SHARED_TOKEN, SAME_TOKENS, NUMERAL = 0, 1, 2, 4
"""Values of teacher_match: the teacher has no such token; both have it; both have the same vocabulary. Of the
first two, NUMERAL is added for tokens with a digit."""
Padding = Literal["end_token", "zero", "positions", "empty"]
"""Padding rules: the end token, zeros (false), positions from 0, an empty mapping."""


@dataclass(frozen=True, slots=True)
class Field:
    """A column. `extent` is the meaning of its first axis, `trailing` has the other axes.

    An axis is a size, or a letter whose size follows from the recipe and its models. `padding` is the padding
    rule, which is required for padding.
    """

    name: str
    dtype: str
    extent: Extent
    writer: str
    about: str
    padding: Padding | None = None
    trailing: tuple[str | int, ...] = ()
    clock: Clock = "learner"

    @property
    def itemsize(self) -> int:
        """Bytes of one entry, or 0 for objects, whose size differs from row to row."""
        return _BYTES[self.dtype]


_frozen, _behaviour = partial(Field, clock="frozen"), partial(Field, clock="behaviour")
_FIELDS = (
    _frozen("prompt_ids", "int64", "prompt", "rollout", "tokens of the prompt", "end_token"),
    _frozen("response_ids", "int64", "response", "rollout", "tokens after the prompt", "end_token"),
    _frozen("response_mask", "bool", "response", "rollout", "true where the student sampled", "zero"),
    _behaviour("rollout_logprobs", "float32", "response", "rollout", "as really sampled from", "zero"),
    _behaviour("plain_logprobs", "float32", "response", "rollout", "of the model at T = 1, uncut", "zero"),
    _behaviour("rollout_topk_ids", "int64", "response", "rollout", "most likely tokens", "zero", ("K",)),
    _frozen(
        "position_ids", "int64", "sequence", "rollout", "if a model needs several axes", "positions", ("D",)
    ),
    _frozen("multi_modal_inputs", "object", "object", "rollout", "image inputs of vision models", "empty"),
    _behaviour(
        "routed_experts", "int64", "sequence", "rollout", "experts each token took", "zero", ("L", "E")
    ),
    _frozen("reward", "float32", "scalar", "reward", "the session's outcome", "zero"),
    _frozen("reward_tokens", "float32", "response", "reward", "rewards of single tokens", "zero"),
    _frozen("teacher_logprobs", "float32", "response", "teachers", "of the sampled token", "zero"),
    _frozen("teacher_topk_ids", "int64", "response", "teachers", "most likely tokens", "zero", ("K",)),
    _frozen("teacher_topk_logprobs", "float32", "response", "teachers", "their logprobs", "zero", ("K",)),
    _frozen(
        "teacher_match",
        "int64",
        "response",
        "teachers",
        "0 not compared, 1 at tokens of both, 2 at all",
        "zero",
    ),
    _frozen("teacher_hidden", "float32", "response", "teachers", "last hidden states", "zero", ("H",)),
    Field("old_logprobs", "float32", "response", "old_logprobs", "the student before the update", "zero"),
    _frozen("ref_logprobs", "float32", "response", "ref_logprobs", "the reference policy", "zero"),
    Field("values", "float32", "response", "values", "the critic before each token", "zero"),
    Field("advantages", "float32", "response", "advantages", "what each token is worth", "zero"),
    Field("returns", "float32", "response", "advantages", "what the critic should have said", "zero"),
    Field("token_weight", "float32", "response", "the user", "factor of the token in the loss", "zero"),
    Field("teacher_weight", "float32", "response", "the user", "factor of the teacher's term alone", "zero"),
)
_BYTES = {
    **dict.fromkeys(("int64", "float64"), 8),
    **dict.fromkeys(("int32", "float32"), 4),
    **dict.fromkeys(("int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool"), 1),
    "object": 0,
}
"""Bytes of one entry, by dtype: the dtypes that a field may have."""
FIELDS: dict[str, Field] = {field.name: field for field in _FIELDS}
_LETTERS = {str(axis) for field in _FIELDS for axis in field.trailing}


def register_field(field: Field) -> None:
    """Add a field in every process that uses it. A second call has no effect."""
    if field.dtype not in _BYTES or (field.dtype == "object") != (field.extent == "object"):
        known = ", ".join(name for name in _BYTES if name != "object")
        raise StoreError(
            f"field {field.name} has dtype {field.dtype} and extent {field.extent}: expected one of "
            f"{known}, or object for both"
        )
    if letters := [axis for axis in field.trailing if isinstance(axis, str) and axis not in _LETTERS]:
        known = ", ".join(sorted(_LETTERS))
        raise StoreError(
            f"field {field.name} has an axis {letters[0]!r}: expected its width, or one of {known}"
        )
    if field.padding is None:
        known = ", ".join(get_args(Padding))
        raise StoreError(f"field {field.name} has no padding rule: set padding= to {known}")
    if FIELDS.setdefault(field.name, field) != field:
        raise StoreError(f"field {field.name} already exists: {FIELDS[field.name]}")

"""The one table of fields: what a row may hold, its type and shape, and who writes it.

Everything that builds or checks a row is driven by this table. Rows are ragged and unpadded. The
ragged axis is always the first one, so position ids of several axes are held as [P+R, D].
P prompt tokens, R response tokens, K teacher's top-k, L MoE layers, E experts per token,
D position axes, H hidden size of the widest teacher.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from practicum.errors import StoreError

Extent = Literal["scalar", "prompt", "response", "sequence", "object"]
Padding = Literal["end_token", "zero", "positions", "empty"]
"""What a padding row holds: the end token, zeros (false), positions from 0 on, an empty mapping."""


@dataclass(frozen=True, slots=True)
class Field:
    """One column. `extent` says what its first axis counts; `trailing` names the axes behind it.

    `padding` is the rule by which padding rows are built; a field without one can't be padded.
    """

    name: str
    dtype: str
    extent: Extent
    writer: str
    about: str
    padding: Padding | None = None
    trailing: tuple[str, ...] = ()


_FIELDS = (
    Field("prompt_ids", "int64", "prompt", "rollout", "tokens of the prompt", "end_token"),
    Field("response_ids", "int64", "response", "rollout", "tokens after the prompt", "end_token"),
    Field("response_mask", "bool", "response", "rollout", "true where the student sampled", "zero"),
    Field("rollout_logprobs", "float32", "response", "rollout", "as really sampled from", "zero"),
    Field("plain_logprobs", "float32", "response", "rollout", "of the model at T = 1, uncut", "zero"),
    Field(
        "position_ids", "int64", "sequence", "rollout", "if a model needs several axes", "positions", ("D",)
    ),
    Field("multi_modal_inputs", "object", "object", "rollout", "image inputs of vision models", "empty"),
    Field("routed_experts", "int64", "sequence", "rollout", "experts each token took", "zero", ("L", "E")),
    Field("reward", "float32", "scalar", "reward", "the session's outcome", "zero"),
    Field("reward_tokens", "float32", "response", "reward", "rewards of single tokens", "zero"),
    Field("teacher_logprobs", "float32", "response", "teachers", "of the sampled token", "zero"),
    Field("teacher_topk_ids", "int64", "response", "teachers", "most likely tokens", "zero", ("K",)),
    Field("teacher_topk_logprobs", "float32", "response", "teachers", "their logprobs", "zero", ("K",)),
    Field("teacher_hidden", "float32", "response", "teachers", "last hidden states", "zero", ("H",)),
    Field("old_logprobs", "float32", "response", "old_logprobs", "the student before the update", "zero"),
    Field("ref_logprobs", "float32", "response", "ref_logprobs", "the reference policy", "zero"),
    Field("entropy", "float32", "response", "old_logprobs", "of the student at each position", "zero"),
    Field("values", "float32", "response", "values", "the critic before each token", "zero"),
    Field("advantages", "float32", "response", "advantages", "what each token is worth", "zero"),
    Field("returns", "float32", "response", "advantages", "what the critic should have said", "zero"),
)
FIELDS: dict[str, Field] = {field.name: field for field in _FIELDS}


def check_padding_rules(names: Iterable[str]) -> None:
    """A StoreError naming those fields that padding rows could not be given; for the start of a run."""
    lacking = [name for name in names if FIELDS[name].padding is None]
    if lacking:
        raise StoreError(
            f"there is no padding rule for {', '.join(lacking)}: give each Field in dataplane/fields.py a "
            f"padding= of {', '.join(get_args(Padding))}"
        )

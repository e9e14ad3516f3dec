"""The one table of fields: what a row may hold, its type and shape, and who writes it.

Everything that builds or checks a row is driven by this table. Rows are ragged and unpadded. The
ragged axis is always the first one, so position ids of several axes are held as [P+R, D].
P prompt tokens, R response tokens, K teacher's top-k, L MoE layers, E experts per token,
D position axes, H hidden size of the widest teacher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Extent = Literal["scalar", "prompt", "response", "sequence", "object"]


@dataclass(frozen=True, slots=True)
class Field:
    """One column. `extent` says what its first axis counts; `trailing` names the axes behind it."""

    name: str
    dtype: str
    extent: Extent
    writer: str
    about: str
    trailing: tuple[str, ...] = ()


_FIELDS = (
    Field("prompt_ids", "int64", "prompt", "rollout", "tokens of the prompt"),
    Field("response_ids", "int64", "response", "rollout", "tokens after the prompt"),
    Field("response_mask", "bool", "response", "rollout", "true where the student sampled"),
    Field("rollout_logprobs", "float32", "response", "rollout", "as really sampled from"),
    Field("plain_logprobs", "float32", "response", "rollout", "of the model at T = 1, uncut"),
    Field("position_ids", "int64", "sequence", "rollout", "if a model needs several axes", ("D",)),
    Field("multi_modal_inputs", "object", "object", "rollout", "image inputs of vision models"),
    Field("routed_experts", "int64", "sequence", "rollout", "experts each token took", ("L", "E")),
    Field("reward", "float32", "scalar", "reward", "the session's outcome"),
    Field("reward_tokens", "float32", "response", "reward", "rewards of single tokens"),
    Field("teacher_logprobs", "float32", "response", "teachers", "of the sampled token"),
    Field("teacher_topk_ids", "int64", "response", "teachers", "most likely tokens", ("K",)),
    Field("teacher_topk_logprobs", "float32", "response", "teachers", "their logprobs", ("K",)),
    Field("teacher_hidden", "float32", "response", "teachers", "last hidden states", ("H",)),
    Field("old_logprobs", "float32", "response", "old_logprobs", "the student before the update"),
    Field("ref_logprobs", "float32", "response", "ref_logprobs", "the reference policy"),
    Field("entropy", "float32", "response", "old_logprobs", "of the student at each position"),
    Field("values", "float32", "response", "values", "the critic before each token"),
    Field("advantages", "float32", "response", "advantages", "what each token is worth"),
    Field("returns", "float32", "response", "advantages", "what the critic should have said"),
)
FIELDS: dict[str, Field] = {field.name: field for field in _FIELDS}

"""Rows that a role writes or shows on behalf of the trainer: padding, and texts for people."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.fields import check_padding_rules
from practicum.dataplane.padding_rows import padding_batch
from practicum.dataplane.plan import Plan
from practicum.dataplane.stage import Columns
from practicum.dataplane.store import Store
from practicum.errors import RecipeError
from practicum.models.experts import routes_of
from practicum.models.vision import AXES
from practicum.recipe.schema.recipe import Recipe


def padding_fields(plan: Plan) -> list[str]:
    """The fields of a padding row: all that a stage of the plan writes."""
    return list(dict.fromkeys(name for stage in plan for name in stage.writes))


def put_padding(
    store: Store,
    plan: Plan,
    partition: str,
    count: int,
    tokenizer: PreTrainedTokenizerBase,
    widths: Mapping[str, int],
) -> BatchRef:
    """Write `count` rows that do nothing, in one put, with every field that this plan's stages write."""
    assert isinstance(tokenizer.eos_token_id, int)
    fields = padding_fields(plan)
    batch, columns = padding_batch(partition, count, fields, end_id=tokenizer.eos_token_id, widths=widths)
    store.put(batch, columns)
    return batch


def field_widths(recipe: Recipe, model: PreTrainedModel, teacher_width: int) -> dict[str, int]:
    """The trailing axes of fields, by their letters in the fields table."""
    widths = {"D": AXES}
    if recipe.distill is not None:
        widths |= {"K": recipe.distill.top_k, "H": teacher_width}
    if (routes := routes_of(model)) is not None:
        widths |= {"L": routes.layers, "E": routes.per_token}
    return widths


def check_fields(recipe: Recipe, plan: Plan, model: PreTrainedModel) -> None:
    """Every field of the plan can be padded and made: experts to be replayed can be recorded."""
    if "pad" in plan:
        check_padding_rules(padding_fields(plan))
    if not any("routed_experts" in stage.writes for stage in plan):
        return
    routes = routes_of(model)
    if routes is None or not routes.can_replay:
        found = f"true with {type(model).__name__}, whose routers can't be recorded and replayed"
        raise RecipeError("train.replay_experts", found, "false")


def row_texts(store: Store, tokenizer: PreTrainedTokenizerBase, batch: BatchRef) -> list[tuple[str, str]]:
    """Prompt and response of each row as people read them; a failed session may have left no tokens."""
    written = batch.where(lambda _, tags: tags.prompt_tokens > 0)
    texts: dict = {}
    if len(written):
        columns = Columns("samples", store.get(written, ["prompt_ids", "response_ids"]))
        rows = zip(*(columns.ragged(name).rows for name in ("prompt_ids", "response_ids")), strict=True)
        pairs = [(str(tokenizer.decode(prompt)), str(tokenizer.decode(answer))) for prompt, answer in rows]
        texts = dict(zip(written.keys, pairs, strict=True))
    return [texts.get(key, ("", "")) for key in batch.keys]

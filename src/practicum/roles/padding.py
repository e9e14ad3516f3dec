"""The padding role: how many rows fill a batch up, what they hold, and the stage that writes them.

What a padding row looks like is `dataplane/padding_rows.py`'s; how mini-batches are cut is
`learning/minibatches.py`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.fields import check_padding_rules
from practicum.dataplane.padding_rows import padding_batch
from practicum.dataplane.ragged import Column, Columns
from practicum.dataplane.stages import Plan
from practicum.dataplane.store import Store
from practicum.errors import RecipeError
from practicum.learning.minibatches import needed_multiple, padding_needed, running_cuts, spare_padding
from practicum.models.experts import routes_of
from practicum.models.vision import AXES
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.learner_rows import whole_sessions
from practicum.roles.run_stage import StepInfo, stage


class PaddingRole:
    """Fills batches up with rows that do nothing, for `ranks` data-parallel ranks."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        store: Store,
        tokenizer: PreTrainedTokenizerBase,
        widths: Mapping[str, int],
        ranks: int,
    ) -> None:
        self.recipe, self.plan, self.store = recipe, plan, store
        self.widths, self.ranks = widths, ranks
        assert isinstance(tokenizer.eos_token_id, int)
        self._end_id = tokenizer.eos_token_id

    @stage("pad")
    def pad(self, batch: BatchRef, columns: Columns, step: StepInfo) -> tuple[dict[str, Column], BatchRef]:
        """Write the padding rows that the step needs, with every field that a stage writes; reports them."""
        count = padding_rows_needed(self.recipe, batch, step.number, self.ranks)
        if not count:
            return {}, batch.take([])
        options = {"end_id": self._end_id, "widths": self.widths}
        padding, written = padding_batch(batch.partition, count, padding_fields(self.plan), **options)
        self.store.put(padding, written)
        return {}, padding


def padding_rows_needed(recipe: Recipe, batch: BatchRef, step: int, ranks: int) -> int:
    """Padding rows with which all updates of a step are cut evenly over mini-batches and ranks."""
    cuts, spare = running_cuts(recipe, step), 0
    if ranks > 1 and whole_sessions(recipe):
        largest = max(Counter(key[:2] for key in batch.keys).values())
        spare = max(spare_padding(largest, cut.steps(len(batch)), ranks) for cut in cuts)
    return spare + padding_needed(len(batch) + spare, needed_multiple(ranks, cuts))


def padding_fields(plan: Plan) -> list[str]:
    """The fields of a padding row: all that a stage of the plan writes."""
    return list(dict.fromkeys(name for stage in plan for name in stage.writes))


def field_widths(recipe: Recipe, model: PreTrainedModel, teacher_width: int) -> dict[str, int]:
    """The trailing axes of fields, by their letters in the fields table."""
    widths = {"D": AXES}
    if recipe.distill is not None:
        widths |= {"K": recipe.distill.top_k, "H": teacher_width}
    if (routes := routes_of(model)) is not None:
        widths |= {"L": routes.layers, "E": routes.per_token}
    return widths


def check_fields(plan: Plan, model: PreTrainedModel) -> None:
    """Every field of the plan can be padded and made: experts to be replayed can be recorded."""
    if "pad" in plan:
        check_padding_rules(padding_fields(plan))
    if not any("routed_experts" in stage.writes for stage in plan):
        return
    routes = routes_of(model)
    if routes is None or not routes.can_replay:
        found = f"true with {type(model).__name__}, whose routers can't be recorded and replayed"
        raise RecipeError("train.replay_experts", found, "false")

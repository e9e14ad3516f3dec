"""How a recipe's prompts become tokens and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from practicum.models.load_model import model_facts
from practicum.models.processor import Processor, load_processor
from practicum.recipe.derived import rollout_context
from practicum.recipe.schema.recipe import Recipe, Task
from practicum.sessions.tools.toolbox import Toolbox
from practicum.tasks.prompts import Encoded, Prompt, encode_prompt


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encodes prompts by their tasks' chat settings, with the agent's tools and the model's processor."""

    tasks: Mapping[str, Task]
    tokenizer: PreTrainedTokenizerBase
    tools: Sequence[Mapping[str, Any]] = ()
    processor: Processor | None = None
    most_tokens: int | None = None
    """Tokens that a prompt may have, where its task says `too_long: cut`."""

    def __call__(self, prompt: Prompt) -> Encoded:
        """The prompt's tokens, pictures and messages; of a prompt that is to be cut, the last tokens."""
        encoded, room = self.whole(prompt), self.room(prompt.task)
        if room is None or len(encoded.ids) <= room or encoded.messages is not None:
            return encoded
        return replace(encoded, ids=encoded.ids[-room:])

    def room(self, task: str) -> int | None:
        """Tokens that prompts of this task are cut to, if they are plain text; None if they are not cut."""
        return self.most_tokens if self.tasks[task].too_long == "cut" and not self.tasks[task].chat else None

    def whole(self, prompt: Prompt) -> Encoded:
        """The prompt as it is, however long."""
        task = self.tasks[prompt.task]
        return encode_prompt(
            prompt,
            self.tokenizer,
            chat=task.chat,
            system=task.system,
            tools=self.tools or None,
            processor=self.processor,
        )


def make_encoder(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """The encoder of a recipe's prompts; tools and processors that can't be had are RecipeErrors."""
    toolbox = Toolbox(recipe.agent.tools)
    processor = load_processor(recipe.model, tokenizer)
    most_tokens = None
    if any(task.too_long == "cut" for task in recipe.tasks.values()):
        model_context, _ = model_facts(recipe.model, len(tokenizer))
        most_tokens = max(1, rollout_context(recipe, model_context) - recipe.rollout.max_new_tokens)
    return Encoder(recipe.tasks, tokenizer, toolbox.schemas, processor, most_tokens)

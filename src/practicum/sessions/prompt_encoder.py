"""How a recipe's prompts become tokens and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from practicum.models.processor import Processor, load_processor
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

    def __call__(self, prompt: Prompt) -> Encoded:
        """The prompt's tokens, pictures and messages."""
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
    return Encoder(recipe.tasks, tokenizer, toolbox.schemas, processor)

# pyright: reportMissingImports=false
"""What the package `renderers` continues conversations with: `python bridges.py < cases.json`.

A case has the folder of a tokenizer, the renderer's settings, the tokens so far and the messages that follow.
The program runs in the environment of verifiers and prints the tokens of each, or null.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic import TypeAdapter
from renderers import RendererConfig, create_renderer
from transformers import PreTrainedTokenizerFast


def bridge(case: dict[str, Any], made: dict[str, Any]) -> list[int] | str | None:
    """Return the tokens up to the next turn; None if it renders all again; text if it raises."""
    try:
        if case["folder"] not in made:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(case["folder"])
            config: Any = TypeAdapter(RendererConfig).validate_python(case["config"])
            made[case["folder"]] = create_renderer(tokenizer, config)
        renderer = made[case["folder"]]
        found = renderer.bridge_to_next_turn(case["prompt"], case["turn"], case["new"], tools=case["tools"])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if found is None else list(found.token_ids)


if __name__ == "__main__":
    made: dict[str, Any] = {}
    print(json.dumps([bridge(case, made) for case in json.load(sys.stdin)]))

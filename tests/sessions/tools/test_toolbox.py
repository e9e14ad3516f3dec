"""The toolbox: tools from the recipe, and calls that never raise for what a model or a tool did wrong."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from practicum.errors import RecipeError
from practicum.recipe.schema.rollout_sections import ToolSection as ToolSpec
from practicum.sessions.tools.toolbox import Toolbox, ToolOutcome

from . import own_tools
from .test_python import needs_bubblewrap

HERE = "tests.sessions.tools.own_tools"


def toolbox_of(*uses: str, **options: Any) -> Toolbox:
    return Toolbox([ToolSpec(use=f"{HERE}:{use[1:]}" if use[0] == ":" else use, **options) for use in uses])


def ran(box: Toolbox, name: str, **arguments: Any) -> ToolOutcome:
    return asyncio.run(box.run(name, arguments))


def problem(*uses: str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        toolbox_of(*uses)
    return caught.value


@needs_bubblewrap
def test_built_in_tools_answer():
    box = toolbox_of("calculator", "python", timeout_s=60)
    assert ran(box, "calculator", expression="12+30") == ToolOutcome("42", True)
    assert ran(box, "python", code="print(6 * 7)") == ToolOutcome("42", True)
    assert ran(box, "calculator", expression="1/0") == ToolOutcome("division by zero.", False)
    assert (box.calls, box.errors) == (3, 1)
    assert box.seconds > 0
    box.close()


@needs_bubblewrap
def test_limits_come_from_the_recipe():
    box = toolbox_of("python", timeout_s=0.5)
    assert ran(box, "python", code="while True: pass") == ToolOutcome(
        "the program took longer than 0.5 s and was stopped.", False
    )
    box = toolbox_of("python", timeout_s=60)
    assert "cut after 2000 characters" in ran(box, "python", code="print('x' * 2001)").text


def test_a_functions_schema_comes_from_signature_and_docstring():
    assert toolbox_of(":weather").schemas == [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "What the weather will be like.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string", "description": "Where."},
                        "days": {"type": "integer", "description": "How many days ahead."},
                        "exact": {"type": "boolean"},
                    },
                    "required": ["city"],
                },
            },
        }
    ]
    (schema,) = toolbox_of(":total").schemas
    properties = schema["function"]["parameters"]["properties"]
    assert properties == {"numbers": {"type": "array"}, "names": {"type": "object"}}


def test_sync_and_async_functions_answer():
    box = toolbox_of(":weather", ":total", ":clock")
    assert ran(box, "weather", city="Ulm", days=2).text == "{'city': 'Ulm', 'days': 2, 'exact': None}"
    assert ran(box, "total", numbers=[1, 2.5]) == ToolOutcome("3.5", True)
    assert ran(box, "clock") == ToolOutcome("noon", True)


@pytest.mark.parametrize(
    ("given_days", "days"),
    [("3", 3), (3.0, 3), (None, 1), ("2.0", 2)],
    ids=["text", "whole", "null", "float text"],
)
def test_arguments_are_put_into_their_types(given_days: Any, days: int):
    box = toolbox_of(":weather")
    said = ran(box, "weather", city=5, days=given_days, exact="True")
    assert said == ToolOutcome(str({"city": "5", "days": days, "exact": True}), True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "missing parameter city: weather takes city, days, exact."),
        ({"city": "a", "town": "b"}, "unknown parameter 'town': weather takes city, days, exact."),
        ({"city": None}, "parameter city must be text, found None."),
        ({"city": ["a"]}, "parameter city must be text, found ['a']."),
        ({"city": "a", "days": "many"}, "parameter days must be an integer, found 'many'."),
        ({"city": "a", "days": 1.5}, "parameter days must be an integer, found 1.5."),
        ({"city": "a", "days": True}, "parameter days must be an integer, found True."),
        ({"city": "a", "days": "1e999"}, "parameter days must be an integer, found '1e999'."),
        ({"city": "a", "exact": 1}, "parameter exact must be true or false, found 1."),
    ],
)
def test_bad_arguments_are_told_by_name(arguments: dict[str, Any], sentence: str):
    box = toolbox_of(":weather")
    assert asyncio.run(box.run("weather", arguments)) == ToolOutcome(sentence, False)
    assert box.errors == 1


def test_an_unknown_tool_is_told_with_the_known_ones():
    box = toolbox_of("calculator", ":clock")
    assert ran(box, "abacus") == ToolOutcome(
        "no tool is named 'abacus': the tools are calculator, clock.", False
    )


def test_a_functions_failure_is_told():
    box = toolbox_of(":broken", ":refusing")
    assert ran(box, "broken", text="tea") == ToolOutcome("broken raised ValueError: no tea today", False)
    assert ran(box, "refusing", text="tea") == ToolOutcome("ask me something else.", False)


@pytest.mark.parametrize("name", ["hanging", "sleeping"])
def test_a_function_that_takes_too_long_is_given_up(name: str):
    box = toolbox_of(f":{name}", timeout_s=0.05)
    assert ran(box, name, text="x") == ToolOutcome(f"{name} did not answer within 0.05 s", False)
    own_tools.release.set()


def test_text_that_no_tokenizer_takes_is_mended():
    assert ran(toolbox_of(":surrogate"), "surrogate", text="a") == ToolOutcome("?a", True)


def test_mistakes_in_the_recipe_are_told_where_they_are():
    unknown = problem("python", "calcullator")
    assert unknown.path == "agent.tools[1].use"
    assert unknown.suggestion == "did you mean calculator?"
    assert "a second tool named clock" in str(problem(":clock", ":clock"))
    assert "did you mean" in str(problem(":wether"))
    assert problem(":NOT_A_FUNCTION").expected == "a function"
    assert "declare each parameter" in str(problem(":packed"))
    assert "str, int, float, bool, list or dict" in str(problem(":odd"))
    assert "Nowhere" in str(problem(":unknown_type"))

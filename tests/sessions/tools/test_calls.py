"""Tool calls are read as models write them; what can't be read is told, never dropped."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.sessions.tools.calculator import CALCULATOR
from practicum.sessions.tools.tool import Parameter, Tool, ToolError
from practicum.sessions.tools.tool_calls import BadCall, Call, read_calls, write_call


async def _run(arguments: dict[str, Any]) -> str:
    return ""


CLOCK = Tool("clock", "Tells the time.", (), _run)
SEARCH = Tool("search", "Finds.", (Parameter("limit", "integer", required=False), Parameter("query")), _run)
TOOLS = (CALCULATOR, CLOCK, SEARCH)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def reason_of(text: str, style: Any, tools: tuple[Tool, ...] = TOOLS) -> str:
    (bad,) = read_calls(text, style, tools)
    assert isinstance(bad, BadCall)
    return bad.reason


@given(
    st.lists(st.builds(Call, st.text(), st.dictionaries(st.text(), JSON, max_size=3)), max_size=3), st.text()
)
def test_json_calls_read_back_as_written(calls: list[Call], between: str):
    between = between.replace("<", "")
    text = between + between.join(write_call(call, "json", ()) + between for call in calls)
    assert read_calls(text, "json", ()) == calls


@given(st.sampled_from([(CALCULATOR,), TOOLS]), st.text(alphabet="ab1+: []\n", max_size=12))
def test_plain_calls_read_back_as_written_or_are_refused(tools: tuple[Tool, ...], text: str):
    call = Call("calculator", {"expression": text})
    try:
        written = write_call(call, "plain", tools)
    except ToolError:
        depths = [text[:n].count("[") - text[:n].count("]") for n in range(len(text) + 1)]
        assert text != text.strip() or min(depths) < 0 or depths[-1]
        return
    assert read_calls(f"so {written} and {written}", "plain", tools) == [call, call]


def test_json_arguments_may_be_a_string_of_json_or_be_left_out():
    asked = json.dumps({"name": "search", "arguments": json.dumps({"query": "x"})})
    assert read_calls(f"<tool_call>{asked}</tool_call>", "json", TOOLS) == [Call("search", {"query": "x"})]
    assert read_calls('<tool_call>{"name": "clock"}</tool_call>', "json", TOOLS) == [Call("clock")]


def test_the_last_block_may_be_unclosed():
    block = '<tool_call>\n{"name": "clock"}\n'
    assert read_calls(f"ok {block}</tool_call>\n{block}", "json", TOOLS) == [Call("clock")] * 2
    assert read_calls(block * 2, "json", TOOLS) == [Call("clock")] * 2
    assert read_calls("[12+30", "plain", (CALCULATOR,)) == [Call("calculator", {"expression": "12+30"})]


def test_an_argument_may_hold_tags_brackets_and_line_breaks():
    program = "print([1, 2][0])\n# </tool_call> <tool_call>"
    call = Call("python", {"program": program})
    assert read_calls(write_call(call, "json", ()), "json", ()) == [call]
    raw = '<tool_call>{"name": "python", "arguments": {"program": "a\nb"}}</tool_call>'
    assert read_calls(raw, "json", ()) == [Call("python", {"program": "a\nb"})]
    nested = Call("calculator", {"expression": "a[1]: b"})
    assert read_calls("[calculator: a[1]: b]", "plain", TOOLS) == [nested]


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ("12+30", "'+30' follows the JSON"),
        ("calculator(1)", "not JSON: Expecting value"),
        ("", "not JSON"),
        ('{"name": "a"', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"name": "a", "arguments": {"x": NaN}}', "NaN is not a JSON number"),
        ('{"name": "a", "arguments": {"x": ' + "1" * 5000 + "}}", "not JSON"),
        ('{"name": "a"}}', "'}' follows the JSON"),
        ("[]", 'must be {"name"'),
        ('{"name": 3}', 'must be {"name"'),
        ('{"arguments": {}}', 'must be {"name"'),
        ('{"name": "a", "arguments": [1]}', "must be a mapping"),
        ('{"name": "a", "arguments": "1 +"}', "arguments of the tool call are not JSON"),
        ('{"name": "a", "arguments": "[]"}', "must be a mapping"),
    ],
)
def test_broken_json_calls_are_reported(block: str, reason: str):
    told = reason_of(f"<tool_call>{block}</tool_call>", "json")
    assert reason in told
    assert len(told) < 300


def test_good_and_broken_calls_keep_their_order():
    text = '<tool_call>{"name": </tool_call><tool_call>{"name": "clock"}</tool_call>'
    first, second = read_calls(text, "json", TOOLS)
    assert isinstance(first, BadCall)
    assert second == Call("clock")


@pytest.mark.parametrize(
    ("text", "tools", "call"),
    [
        ("[calculator: 12+30]", TOOLS, Call("calculator", {"expression": "12+30"})),
        ("[calculator:12+30 ]", (CALCULATOR,), Call("calculator", {"expression": "12+30"})),
        ("so [12+30]=", (CALCULATOR,), Call("calculator", {"expression": "12+30"})),
        ("[]", (CALCULATOR,), Call("calculator", {"expression": ""})),
        ("[search: red: cars]", TOOLS, Call("search", {"query": "red: cars"})),
        ("[clock]", TOOLS, Call("clock")),
        ("[clock: ]", TOOLS, Call("clock")),
        ("[calculator]", TOOLS, Call("calculator")),
    ],
)
def test_plain_calls(text: str, tools: tuple[Tool, ...], call: Call):
    assert read_calls(text, "plain", tools) == [call]


def test_broken_plain_calls_are_reported():
    assert "no tool is named 'abacus'" in reason_of("[abacus: 1]", "plain")
    assert "calculator, clock, search" in reason_of("[12+30]", "plain")
    assert reason_of("[clock: now]", "plain") == "clock takes no text."
    assert "the tools are none" in reason_of("[x]", "plain", ())


def test_plain_calls_are_written_as_short_as_they_read_back():
    assert write_call(Call("calculator", {"expression": "1+2"}), "plain", (CALCULATOR,)) == "[1+2]"
    assert write_call(Call("calculator", {"expression": "1+2"}), "plain", TOOLS) == "[calculator: 1+2]"
    assert write_call(Call("clock"), "plain", TOOLS) == "[clock]"
    own_name = Call("calculator", {"expression": "calculator: 1"})
    assert write_call(own_name, "plain", (CALCULATOR,)) == "[calculator: calculator: 1]"
    with pytest.raises(ToolError, match="can't be written in plain style"):
        write_call(Call("search", {"query": "x", "limit": 3}), "plain", TOOLS)

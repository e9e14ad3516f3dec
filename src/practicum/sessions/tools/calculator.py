"""The calculator: Python's arithmetic on numbers, with bounds that no expression can pass.

Integers stay integers and exact: 6 / 3 is 2, 7 / 2 is 3.5.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

from practicum.sessions.tools.tool import Parameter, Tool, ToolError
from practicum.user_code import shorten

_MAX_CHARS = 500
_MAX_BITS = 1024
"""Maximum integer, the range of floats, so that mixed arithmetic stays within bounds."""
# Only these characters are parsed: no names, no strings, nothing that Python's parser warns about.
_READABLE = re.compile(r"[0-9eE.+\-*/%() \t]+")
Number = int | float


def calculate(expression: str) -> Number:
    """Return the value of an expression of numbers, + - * / // % ** and parentheses, or raise ToolError."""
    if len(expression) > _MAX_CHARS:
        raise ToolError(f"the expression has {len(expression)} characters; at most {_MAX_CHARS} can be read.")
    text = expression.strip()
    try:
        if not _READABLE.fullmatch(text):
            raise ValueError(text)
        return _value(ast.parse(text, mode="eval").body)
    except ZeroDivisionError:
        raise ToolError("division by zero.") from None
    except OverflowError:
        raise ToolError("the result is too large.") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        found = shorten(repr(expression), 60)
        raise ToolError(f"can't read {found}: use numbers, + - * / // % ** and parentheses.") from None


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value):
            return _bounded(value)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            value = _value(operand)
            return -value if isinstance(node.op, ast.USub) else value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left), _value(right)))
    raise ValueError(node)


def _bounded(value: Any) -> Number:
    if isinstance(value, complex):
        raise ToolError("the result is not a real number.")
    if value.bit_length() > _MAX_BITS if isinstance(value, int) else not math.isfinite(value):
        raise OverflowError
    return value


def _divide(a: Number, b: Number) -> Number:
    return a // b if isinstance(a, int) and isinstance(b, int) and a % b == 0 else a / b


def _power(a: Number, b: Number) -> Any:
    """Return a ** b, or raise before computing a result that exceeds the bounds."""
    if isinstance(a, int) and isinstance(b, int) and abs(a) > 1 and (a.bit_length() - 1) * b > _MAX_BITS:
        raise OverflowError
    return a**b


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


async def _run(arguments: dict[str, Any]) -> str:
    return str(calculate(arguments["expression"]))


CALCULATOR = Tool(
    name="calculator",
    about="Computes an arithmetic expression, such as (12 + 30) * 2.",
    parameters=(Parameter("expression", about="Numbers, + - * / // % ** and parentheses."),),
    run=_run,
)

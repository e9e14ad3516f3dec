"""The calculator: Python's arithmetic on numbers, with bounds that nothing an expression says can pass.

Whole numbers stay whole and exact: 6 / 3 is 2, 7 / 2 is 3.5.
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
_MAX_DEPTH = 200
_MAX_BITS = 1024
"""Of a whole number: as large as floats go, so that mixing the two stays within bounds."""

# Nothing else is parsed: no names or strings, and no text that Python's parser would warn about.
_READABLE = re.compile(r"[0-9eE.+\-*/%() \t]+")

Number = int | float


def calculate(expression: str) -> Number:
    """The value of an expression of numbers, + - * / // % ** and parentheses; else a ToolError."""
    if len(expression) > _MAX_CHARS:
        raise ToolError(f"the expression has {len(expression)} characters; at most {_MAX_CHARS} can be read.")
    text = expression.strip()
    if not _READABLE.fullmatch(text):
        raise _unreadable(expression)
    try:
        return _value(ast.parse(text, mode="eval").body, expression, 0)
    except ZeroDivisionError:
        raise ToolError("division by zero.") from None
    except OverflowError:
        raise _too_large() from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _unreadable(expression) from None


def _unreadable(expression: str) -> ToolError:
    found = shorten(repr(expression), 60)
    return ToolError(f"can't read {found}: use numbers, + - * / // % ** and parentheses.")


def _too_large() -> ToolError:
    return ToolError("the result is too large.")


def _value(node: ast.expr, expression: str, depth: int) -> Number:
    if depth > _MAX_DEPTH:
        raise ToolError("the expression is nested too deeply.")
    match node:
        case ast.Constant(value=int() | float() as value):
            return _bounded(value)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            value = _value(operand, expression, depth + 1)
            return -value if isinstance(node.op, ast.USub) else value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a = _value(left, expression, depth + 1)
            b = _value(right, expression, depth + 1)
            return _bounded(_BINARY[type(op)](a, b))
        case _:
            raise _unreadable(expression)


def _bounded(value: Any) -> Number:
    if isinstance(value, complex):
        raise ToolError("the result is not a real number.")
    if isinstance(value, int):
        if value.bit_length() > _MAX_BITS:
            raise _too_large()
    elif not math.isfinite(value):
        raise _too_large()
    return value


def _divide(a: Number, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int) and a % b == 0:
        return a // b
    return a / b


def _power(a: Number, b: Number) -> Any:
    """a ** b, refused before it is computed if it can't be within bounds."""
    if isinstance(a, int) and isinstance(b, int) and abs(a) > 1 and (a.bit_length() - 1) * b > _MAX_BITS:
        raise _too_large()
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

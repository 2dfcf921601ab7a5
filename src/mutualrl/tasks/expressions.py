"""Arithmetic expressions over given numbers: a small grammar, exact rationals, a solver.

Python's `eval` is never used.

    expression = term {("+" | "-") term}
    term       = factor {("*" | "/") factor}
    factor     = digits | "(" expression ")"
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 200  # characters; a completion may contain anything
_TOKEN = re.compile(r"\s*([0-9]{1,6}|[-+*/()])")


class ExpressionError(ValueError):
    """Text is not an expression of the grammar, or divides by zero."""


@dataclass(frozen=True, slots=True)
class Expression:
    """Number, or operation on two expressions. `value` is exact."""

    value: Fraction
    operation: str = ""
    left: Expression | None = None
    right: Expression | None = None

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the numbers in it, from left to right."""
        if self.left is None or self.right is None:
            return (int(self.value),)
        return self.left.numbers + self.right.numbers

    def steps(self) -> Iterator[tuple[Expression, Expression, Expression]]:
        """Yield the operations in order of evaluation, each with its two operands."""
        if self.left is not None and self.right is not None:
            yield from self.left.steps()
            yield from self.right.steps()
            yield self, self.left, self.right

    def __str__(self) -> str:
        """Return the text with as few parentheses as possible."""
        if self.left is None or self.right is None:
            return str(self.value)
        left = _bracketed(self.left, self.left.operation in ("+", "-") and self.operation in ("*", "/"))
        same_level = "+-" if self.operation in ("+", "-") else "+-*/"
        associative = self.operation == "+" or (self.operation == "*" and self.right.operation == "*")
        right = _bracketed(
            self.right, bool(self.right.operation) and self.right.operation in same_level and not associative
        )
        return f"{left}{self.operation}{right}"


def _bracketed(expression: Expression, needed: bool) -> str:
    return f"({expression})" if needed else str(expression)


def number(value: int) -> Expression:
    """Return the expression of a number."""
    return Expression(Fraction(value))


def apply(operation: str, left: Expression, right: Expression) -> Expression:
    """Return the operation on two expressions. Raises ExpressionError for a division by zero."""
    if operation == "+":
        value = left.value + right.value
    elif operation == "-":
        value = left.value - right.value
    elif operation == "*":
        value = left.value * right.value
    elif right.value == 0:
        raise ExpressionError("division by zero")
    else:
        value = left.value / right.value
    return Expression(value, operation, left, right)


def parse(text: str) -> Expression:
    """Return the expression in a text. Raises ExpressionError for anything else."""
    if len(text) > LONGEST:
        raise ExpressionError(f"{len(text)} characters, at most {LONGEST}")
    tokens, place = [], 0
    stripped = text.strip()
    while place < len(stripped):
        match = _TOKEN.match(stripped, place)
        if match is None:
            raise ExpressionError(f"unexpected {stripped[place : place + 10]!r}")
        tokens.append(match.group(1))
        place = match.end()
    parser = _Parser(tokens)
    expression = parser.expression()
    if parser.rest:
        raise ExpressionError(f"unexpected {parser.rest[0]!r}")
    return expression


class _Parser:
    """Recursive-descent parser, no deeper than the number of parentheses in the longest text."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.rest = list(tokens)

    def expression(self) -> Expression:
        result = self._term()
        while self.rest and self.rest[0] in "+-":
            result = apply(self.rest.pop(0), result, self._term())
        return result

    def _term(self) -> Expression:
        result = self._factor()
        while self.rest and self.rest[0] in "*/":
            result = apply(self.rest.pop(0), result, self._factor())
        return result

    def _factor(self) -> Expression:
        if not self.rest:
            raise ExpressionError("unexpected end")
        token = self.rest.pop(0)
        if token.isdecimal():
            return number(int(token))
        if token != "(":
            raise ExpressionError(f"unexpected {token!r}")
        inner = self.expression()
        if not self.rest or self.rest.pop(0) != ")":
            raise ExpressionError("a parenthesis is not closed")
        return inner


def solve(numbers: Sequence[int], target: int) -> Expression | None:
    """Return an expression that uses each number once and has the target as its value: the first in a fixed order of
    pairs and operations; None if there is none. Exhaustive: up to six numbers."""
    seen: set[tuple[Fraction, ...]] = set()

    def search(parts: tuple[Expression, ...]) -> Expression | None:
        if len(parts) == 1:
            return parts[0] if parts[0].value == target else None
        state = tuple(sorted(part.value for part in parts))
        if state in seen:
            return None
        seen.add(state)
        for combined in _combined(parts):
            solution = search(combined)
            if solution is not None:
                return solution
        return None

    return search(tuple(number(value) for value in numbers))


def _combined(parts: tuple[Expression, ...]) -> Iterator[tuple[Expression, ...]]:
    """Yield the parts with two of them combined by an operation, in every way."""
    for i, left in enumerate(parts):
        for j, right in enumerate(parts):
            if i == j:
                continue
            others = tuple(part for k, part in enumerate(parts) if k not in (i, j))
            for operation in "+*-/":
                if operation in "+*" and i > j:  # commutative
                    continue
                if operation == "/" and right.value == 0:
                    continue
                yield (*others, apply(operation, left, right))

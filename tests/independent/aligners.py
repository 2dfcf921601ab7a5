"""Ways to carry a log-probability trace from one tokenization of a text to another."""

import math
import re
from bisect import bisect_right
from collections import Counter


def span_align(source_ends: list[int], target_ends: list[int], trace: list[float]) -> list[float | None]:
    """Divide the mass of each group, closed where both tokenizations end on one byte, over its target tokens."""
    if len(source_ends) != len(trace):
        raise ValueError("the trace needs one value a source token")
    aligned: list[float | None] = [None] * len(target_ends)
    source = target = 0
    while source < len(source_ends) and target < len(target_ends):
        first_source, first_target = source, target
        while source_ends[source] != target_ends[target]:
            if source_ends[source] < target_ends[target]:
                source += 1
            else:
                target += 1
            if source == len(source_ends) or target == len(target_ends):
                return aligned
        source += 1
        target += 1
        mass, count = math.fsum(trace[first_source:source]), target - first_target
        for position in range(first_target, target):
            aligned[position] = mass / count
    return aligned


def _unit_of_each_character(text: str, unit: str) -> list[int]:
    """Give each character its unit; whitespace goes with what follows it, and at the end with the last unit."""
    if unit not in ("word", "char"):
        raise ValueError(f"unit is word or char, not {unit!r}")
    pieces = re.findall(r"\s*\S+" if unit == "word" else r"\s*\S", text)
    units = [number for number, piece in enumerate(pieces) for _ in piece]
    return units + [max(0, len(pieces) - 1)] * (len(text) - len(units))


def _characters_by_token(text: str, ends: list[int], units: list[int]) -> list[Counter[int]]:
    """Count, for each token, its characters in each unit; a character is the token's that holds its last byte."""
    counts: list[Counter[int]] = [Counter() for _ in ends]
    end = 0
    for character, unit in zip(text, units, strict=True):
        end += len(character.encode("utf-8", "surrogatepass"))
        token = bisect_right(ends, end - 1)
        if token < len(ends):
            counts[token][unit] += 1
    return counts


def word_align(
    text: str, source_ends: list[int], target_ends: list[int], trace: list[float], unit: str
) -> list[float | None]:
    """Gather the mass of each word or character, and divide it evenly over the target tokens that touch it."""
    units = _unit_of_each_character(text, unit)
    parts: dict[int, list[float]] = {}
    for counts, value in zip(_characters_by_token(text, source_ends, units), trace, strict=True):
        total = sum(counts.values())
        for number, count in counts.items():
            parts.setdefault(number, []).append(value * (count / total))
    mass = {number: math.fsum(values) for number, values in parts.items()}
    touching = _characters_by_token(text, target_ends, units)
    tokens_of = Counter(number for counts in touching for number in counts)
    aligned: list[float | None] = []
    for counts in touching:
        shares = [mass[number] / tokens_of[number] for number in counts if number in mass]
        aligned.append(math.fsum(shares) if shares else None)
    return aligned


def position_copy(trace: list[float], targets: int) -> list[float | None]:
    """Copy the trace by position, with nothing beyond its end."""
    return [trace[index] if index < len(trace) else None for index in range(targets)]


def residual(trace: list[float], aligned: list[float | None]) -> float:
    """Subtract the aligned mass from the trace's."""
    return math.fsum(trace) - math.fsum(value for value in aligned if value is not None)

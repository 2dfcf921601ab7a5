"""Alignments of a log-prob trace from one tokenization of a text to another."""

import math
import re
from bisect import bisect_right
from collections import Counter


def span_align(source_ends: list[int], target_ends: list[int], trace: list[float]) -> list[float | None]:
    """Split each group's mass evenly over its target tokens; a group closes where both sides end on the same byte."""
    if len(source_ends) != len(trace):
        raise ValueError("the trace needs one value per source token")
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
    """Assign each character to a unit; whitespace belongs to the next unit, at the end to the last one."""
    if unit not in ("word", "char"):
        raise ValueError(f"unit: found {unit!r}, expected word or char")
    pieces = re.findall(r"\s*\S+" if unit == "word" else r"\s*\S", text)
    units = [number for number, piece in enumerate(pieces) for _ in piece]
    return units + [max(0, len(pieces) - 1)] * (len(text) - len(units))


def _characters_by_token(text: str, ends: list[int], units: list[int]) -> list[Counter[int]]:
    """Count each token's characters per unit; a character belongs to the token that contains its last byte."""
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
    """Sum the mass of each word or character and split it evenly over the target tokens that touch it."""
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
        masses = [mass[number] / tokens_of[number] for number in counts if number in mass]
        aligned.append(math.fsum(masses) if masses else None)
    return aligned


def position_copy(trace: list[float], targets: int) -> list[float | None]:
    """Copy the trace by position, with None beyond its end."""
    return [trace[index] if index < len(trace) else None for index in range(targets)]


def residual(trace: list[float], aligned: list[float | None]) -> float:
    """Subtract the aligned mass from the trace's."""
    return math.fsum(trace) - math.fsum(value for value in aligned if value is not None)

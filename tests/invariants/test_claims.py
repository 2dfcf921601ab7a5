"""Quoted figures match the result files, and wording about a comparison does not exceed its interval."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import REPOSITORY

LEDGER: list[dict[str, Any]] = yaml.safe_load((REPOSITORY / "docs" / "figures.yaml").read_text())
PAGES = sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / "design").glob("*.md")])
NUMBER = r"[+-]?\d[\d,]*(?:\.\d+)?"
#: measured figures: decimals below 1 of two digits or more, with or without a sign, and factors (`1.4x`)
FIGURE = re.compile(r"(?<![\w.,/])[+-]?0\.\d{2,}(?![\w.]|x\b)|(?<![\w.])\d+\.\d+x")


def relative(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def plain(text: str) -> str:
    """Return a text with whitespace collapsed to single spaces."""
    return " ".join(text.split())


def prose(page: str) -> list[str]:
    """Return the paragraphs and list items of a page, without code, tables and headings."""
    page = re.sub(r"```.*?```|<!--.*?-->", "", page, flags=re.DOTALL)
    blocks = []
    for block in page.split("\n\n"):
        items = re.split(r"\n(?=- )", block.strip())
        blocks += [item for item in items if item and not item.lstrip().startswith(("|", "#", "**", "<"))]
    return [plain(block) for block in blocks]


@cache
def result(name: str) -> Any:
    return json.loads((REPOSITORY / "benchmarks" / "results" / name).read_text())


def value_at(name: str, key: str) -> Any:
    """Return the value at a dotted key of a result file; parts of a key may contain dots."""
    value, rest = result(name), key
    while rest:
        if isinstance(value, list):
            head, _, rest = rest.partition(".")
            value = value[int(head)]
            continue
        head = max((k for k in value if rest == k or rest.startswith(f"{k}.")), key=len, default=None)
        assert head is not None, f"{name} has no key {key!r}: at {rest!r} the keys are {sorted(value)[:20]}"
        value, rest = value[head], rest[len(head) + 1 :]
    return value


def shown(value: float, like: str) -> str:
    """Format a number like the quoted one: digits, sign, thousands separator."""
    digits = len(like.rstrip("x").partition(".")[2])
    comma = "," if "," in like else ""
    return f"{value:{'+' if like[0] in '+-' else ''}{comma}.{digits}f}" + ("x" if like.endswith("x") else "")


def number_of(name: str, key: str) -> float:
    """Return the value of a key, `abs KEY` or `percent KEY`."""
    kind, _, rest = key.partition(" ")
    if kind == "abs":
        return abs(float(value_at(name, rest)))
    if kind == "percent":
        return 100 * float(value_at(name, rest))
    return float(value_at(name, key))


def intervals(entry: dict[str, Any]) -> list[str]:
    return [*entry.get("above", ()), *entry.get("below", ()), *entry.get("open", ())]


@pytest.mark.parametrize("entry", LEDGER, ids=lambda entry: plain(entry["quote"])[:50])
def test_every_quote_has_a_result_or_a_reason_for_none(entry: dict[str, Any]) -> None:
    assert plain(entry["quote"]) in plain((REPOSITORY / entry["page"]).read_text())
    assert ("result" in entry) != ("why" in entry)
    assert "why" in entry or "values" in entry or intervals(entry)


@pytest.mark.parametrize("entry", [e for e in LEDGER if "result" in e], ids=lambda entry: plain(entry["quote"])[:50])
def test_quote_is_in_its_page_with_the_figures_of_its_keys(entry: dict[str, Any]) -> None:
    quote, name = plain(entry["quote"]), entry["result"]
    assert quote in plain((REPOSITORY / entry["page"]).read_text())
    if "values" in entry:
        text = re.sub(r"`[^`]*`", "", quote)
        quoted = [token for token in re.findall(rf"(?<![\w.]){NUMBER}x?(?!\w)", text) if "." in token]
        values = [number_of(name, key) for key in entry["values"]]
        assert quoted == [shown(value, like) for value, like in zip(values, quoted, strict=True)]
        return
    known = []
    for key in intervals(entry):
        value = value_at(name, key)
        known.append(f"{value['mean']:+.3f} [{value['low']:+.3f}, {value['high']:+.3f}]")
    quoted = re.findall(r"[+-]0\.\d{3} \[[+-]\d\.\d{3}, [+-]\d\.\d{3}\]", quote)
    assert set(quoted) <= set(known), "the quote has an interval that is under none of the keys"
    # in the order of the keys, to detect swapped ones
    assert [known.index(interval) for interval in quoted] == sorted(known.index(interval) for interval in quoted)
    remaining = re.sub(r"[+-]0\.\d{3} \[[+-]\d\.\d{3}, [+-]\d\.\d{3}\]|`[^`]*`|weight [\d.]+", "", quote)
    assert not FIGURE.findall(remaining), remaining


@pytest.mark.parametrize("entry", [e for e in LEDGER if intervals(e)], ids=lambda entry: plain(entry["quote"])[:50])
def test_wording_of_a_quote_matches_its_intervals(entry: dict[str, Any]) -> None:
    name = entry["result"]
    for key in entry.get("above", ()):
        assert value_at(name, key)["low"] > 0, key
    for key in entry.get("below", ()):
        assert value_at(name, key)["high"] < 0, key
    for key in entry.get("open", ()):
        assert value_at(name, key)["low"] <= 0 <= value_at(name, key)["high"], key
    quote = plain(entry["quote"])
    if entry.get("open") and not entry.get("above"):
        assert re.search(r"not decided|undecided", quote), quote
    if "not decided" in quote:
        assert entry.get("open"), quote


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_every_quoted_figure_has_a_key(path: Path) -> None:
    page = relative(path)
    quotes = [plain(entry["quote"]) for entry in LEDGER if entry["page"] == page]
    measured = [plain(file.read_text()) for file in (REPOSITORY / "benchmarks" / "results").glob("*.md")]
    for block in prose(path.read_text()):
        if any(block in table for table in measured):  # output of a command, quoted in full
            continue
        rest = block
        for quote in quotes:
            rest = rest.replace(quote, "")
        rest = re.sub(r"`[^`]*`|\]\([^)]*\)", "", rest)
        unknown = FIGURE.findall(rest)
        assert not unknown, f"{page}: {unknown} have no entry in docs/figures.yaml: {block[:300]}"


def test_checks_detect_a_changed_figure_a_wrong_word_and_a_figure_without_a_key() -> None:
    entry = next(entry for entry in LEDGER if entry["quote"].startswith("XGRPO was below GRPO"))
    with pytest.raises(AssertionError):
        test_quote_is_in_its_page_with_the_figures_of_its_keys({**entry, "below": ["effects.tiny.sgt - grpo.kl"]})
    with pytest.raises(AssertionError):
        test_wording_of_a_quote_matches_its_intervals({**entry, "above": entry["below"], "below": []})
    assert shown(0.12345, "+0.123") == "+0.123"
    assert shown(1234.5, "1,234.5") == "1,234.5"
    assert shown(1.394, "1.39x") == "1.39x"
    assert FIGURE.findall("a gain of 0.086, +0.05 or 1.4x; version 1.16.0, 0.5 and 3") == ["0.086", "+0.05", "1.4x"]

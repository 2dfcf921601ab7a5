"""Parts of the THL check, computed by hand."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from mutualrl.console.markdown import percent, significant
from mutualrl.diagnostics.passages import Corpus, family, load_passages, pick
from mutualrl.diagnostics.vocabulary import check_vocabularies
from mutualrl.errors import DataError
from mutualrl.paper.thl.length import naive
from mutualrl.paper.thl.ratio import sequence_rows, token_rows
from mutualrl.paper.thl.traces import relative_error, unit_mass
from mutualrl.thl import word_spans
from thl_tokenizers import byte_bpe, synthetic


def test_token_across_two_words_is_split_by_characters() -> None:
    tokenizer = byte_bpe("b·Ġ", "bĠ·c")  # a | "b c" | d
    ids = tokenizer.encode("ab cd")
    assert unit_mass("ab cd", ids, np.array([-1.0, -3.0, -5.0]), tokenizer).tolist() == pytest.approx([-2.0, -7.0])
    assert unit_mass("ab cd", ids, np.array([-1.0, -3.0, -5.0]), tokenizer, "char").tolist() == pytest.approx(
        [-1.0, -1.0, -2.0, -5.0]
    )


def test_relative_error_is_over_all_texts_together() -> None:
    results, truth = [np.array([-1.0, -3.0]), np.array([-4.0])], [np.array([-2.0, -2.0]), np.array([-4.0])]
    assert relative_error(results, truth) == pytest.approx(2 / 8)
    assert relative_error([np.zeros(1)], [np.zeros(1)]) == 0.0


def test_copying_by_position_truncates_and_pads() -> None:
    assert naive(np.array([-1.0, -2.0, -3.0]), 2).tolist() == [-1.0, -2.0]
    assert naive(np.array([-1.0]), 3).tolist() == [-1.0, 0.0, 0.0]


def test_ratio_figures_by_hand() -> None:
    logs = {"aligned": [np.log([1.0, 1.1, 20.0]), np.log([0.5])]}
    (row,) = token_rows(logs)
    assert (row.responses, row.tokens) == (2, 4)
    assert row.spread.clip_rate == 0.5
    assert row.responses_over_10 == 0.5
    assert row.spread.p99 == pytest.approx(np.quantile([0.5, 1.0, 1.1, 20.0], 0.99))
    assert sum(row.spread.histogram) == 4
    (row,) = sequence_rows(logs)
    means = [np.exp(np.log([1.0, 1.1, 20.0]).mean()), 0.5]
    assert row.median == pytest.approx(np.median(means))
    assert row.spread.clip_rate == 1.0
    assert row.log_sum_median == pytest.approx((np.log(22.0) + np.log(0.5)) / 2)


def test_figures_of_two_tokenizers_by_hand() -> None:
    merged, plain = byte_bpe("a·b", ".·Ċ"), byte_bpe()
    result = check_vocabularies(["ab.\nc"], merged, plain, "span", lambda done: None)
    # ab | .\n | c | EOS vs. a b . \n c EOS
    assert result.safe
    figures = result.figures
    assert (figures.source.tokens, figures.target.tokens) == (4, 6)
    assert figures.one_to_one == 0.5
    assert figures.group_sizes == {"1:1": 2, "1:2": 2}
    assert figures.mean_group == {"source": 1.0, "target": 1.5}
    assert figures.largest_group == {"source": 1, "target": 2}
    assert figures.source.straddling == 0.25  # .\n ends one word and begins the next
    assert figures.target.straddling == 0.0
    # the paper: "ab." is ab . and "\nc" is \n c: words 0 0 1 for ab, .\n, c; each token touches its word
    assert figures.source.paper_drift == 0.0
    assert figures.target.paper_drift == 0.0


def test_drift_of_the_papers_map_by_hand() -> None:
    r"""The full text is `a .\n _b _c _d`; its words `a.`, `\n_b`, `_c`, `_d` have 2, 2, 1, 1 tokens, cut to five."""
    tokenizer = byte_bpe(".·Ċ", "Ġ·b", "Ġ·c", "Ġ·d")
    assert len(tokenizer.encode("a.\n b c d")) == 5
    result = check_vocabularies(["a.\n b c d"], tokenizer, byte_bpe(), "span", lambda done: None).figures
    # the map's words are 0 0 1 1 2, the touched ones 0, 0-1, 1, 2, 3: the last two are wrong
    assert result.source.paper_drift == pytest.approx(2 / 5)
    assert result.source.word_drift == 0.0


def test_families_of_scripts() -> None:
    assert family("Hello, wörld: привет") == "Western"
    assert family("mostly English with 日") == "CJK"
    assert family("نص عربي") == "other"
    assert family("123 + 4") == "other"


def test_stretches_are_whole_words_and_wrap_around() -> None:
    corpus = Corpus(["one two three", "four five\n"])
    assert corpus.text == "one two three\nfour five\n"
    rng = random.Random(0)
    for characters in (3, 10, 60):
        text = corpus.stretch(characters, rng)
        assert text.strip() == text and text
        assert {text[a:b] for a, b in word_spans(text)} <= {"one", "two", "three", "four", "five"}
    assert len(corpus.stretch(200, rng)) > 190
    assert len(corpus.words(3, rng).split()) == 3


def test_passages_are_picked_by_seed() -> None:
    passages = [str(i) for i in range(50)]
    assert pick(passages, 50, 0) == passages
    assert pick(passages, 5, 1) == pick(passages, 5, 1) != pick(passages, 5, 2)


def test_packaged_text_has_every_family_and_survives_the_tiny_pool() -> None:
    passages = load_passages(None)
    assert {family(text) for text in passages} == {"Western", "CJK", "other"}
    assert 3000 < sum(len(text.encode()) for text in passages) < 8000
    assert check_vocabularies(passages, synthetic("ada"), synthetic("bob"), "span", lambda done: None).safe


def test_missing_text_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="text file not found"):
        load_passages(tmp_path / "none.txt")


def test_percentages_have_the_digits_of_the_papers_tables() -> None:
    assert [percent(value) for value in (0.000109, 0.954193, 0.999876, 1.052713)] == [
        *("0.0109", "95.4193", "99.9876", "105.2713"),
    ]
    assert [percent(value) for value in (0.0, 1e-9, float("nan"))] == ["0", "1e-07", "NaN"]
    assert [significant(value) for value in (0.5, 123456.0, None, float("inf"))] == ["0.5", "1.235e+05", "NaN", "inf"]

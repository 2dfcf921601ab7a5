"""THL check as Markdown: a table for the tokenizers of each pair, and the paper's tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mutualrl.console.markdown import name as _name
from mutualrl.console.markdown import percent, significant
from mutualrl.console.markdown import table as _table
from mutualrl.diagnostics.results import Columns, PairCheck, SideFigures, ThlCheck, TokenizerFigures, columns_of


def markdown(result: ThlCheck) -> str:
    """Return the verdict of a check, then all its tables."""
    pairs = result["pairs"]
    parts = [verdict(pairs), _tokenizer_table(pairs)]
    requested = {key for pair in pairs for key in pair}
    parts += [make(pairs) for suite, make in _TABLES.items() if suite in requested]
    return "\n\n".join(parts)


def verdict(pairs: Sequence[PairCheck]) -> str:
    """Return the directions that are safe or unsafe, as a sentence."""
    unsafe = [_pair(pair) for pair in pairs if not pair["safe"]]
    if not unsafe:
        return "Safe: texts and traces can be exchanged in every direction that was checked."
    safe = [_pair(pair) for pair in pairs if pair["safe"]]
    others = f"; safe: {', '.join(safe)}" if safe else ""
    return f"**Unsafe: {', '.join(unsafe)}** (reasons at the end){others}."


def _pair(pair: PairCheck | Columns) -> str:
    return f"{_name(pair['source'])} → {_name(pair['target'])}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}"


def _tokenizer_table(pairs: Sequence[PairCheck]) -> str:
    head = [_pair(pair) for pair in pairs]
    rows = [["safe", *("yes" if pair["safe"] else "**no**" for pair in pairs)]]
    for label, read in _TOKENIZER_ROWS:
        rows.append([label, *(read(pair["tokenizers"]) if pair["tokenizers"] else "" for pair in pairs)])
    return _table("Tokenizers", ["", *head], rows)


def _both(read: Callable[[SideFigures], str]) -> Callable[[TokenizerFigures], str]:
    return lambda counts: f"{read(counts['source'])} / {read(counts['target'])}"


_TOKENIZER_ROWS: tuple[tuple[str, Callable[[TokenizerFigures], str]], ...] = (
    ("texts encoded unchanged, source / target (%)", _both(lambda side: _percent(side["round_trip"]))),
    ("tokens", _both(lambda side: str(side["tokens"]))),
    ("1:1 groups (%)", lambda figures: _percent(figures["one_to_one"])),
    ("mean group", lambda figures: "{source:.2f} : {target:.2f}".format(**figures["mean_group"])),
    ("largest group", lambda figures: "{source} : {target}".format(**figures["largest_group"])),
    ("tokens that span several words (%)", _both(lambda side: _percent(side["straddling"]))),
    ("unplaced tokens (%)", _both(lambda side: _percent(side["uncovered"]))),
    ("end of sequence", _both(lambda side: f"`{_name(str(side['eos']))}`")),
    ("ends of sequence aligned (%)", lambda figures: _percent(figures["end_to_end"])),
    ("spelled-out special tokens stay text", _both(lambda side: "yes" if side["specials_spelled_stay_text"] else "no")),
    (
        "the paper's map: tokens mapped to a non-overlapping word (%)",
        _both(lambda side: _percent(side["paper_drift"])),
    ),
    ("the paper's map: tokens mapped to no word (%)", _both(lambda side: _percent(side["paper_cut"]))),
    ("ours: tokens mapped to a non-overlapping word (%)", _both(lambda side: _percent(side["word_drift"]))),
)


def _rows(pairs: Sequence[PairCheck], suite: str) -> list[tuple[PairCheck, Columns]]:
    rows: list[tuple[PairCheck, Columns]] = []
    for pair in pairs:
        columns = columns_of(pair).get(suite)
        if columns is not None:
            rows += [(pair, row) for row in columns["rows"]]
    return rows


def _mass(pairs: Sequence[PairCheck]) -> str:
    keys = (
        "source_aligned_mae",
        "source_aligned_max",
        "aligned_target_mae",
        "aligned_target_max",
        "prefix_leak_max",
    )
    cells: dict[tuple[str, ...], list[str]] = {}
    for _, row in _rows(pairs, "mass"):
        row_key = (row["source"], row["target"], row["anchor"])
        cells.setdefault(
            row_key, [_pair(row), row["anchor"], str(row["words"]), *(significant(row[key]) for key in keys)]
        )
    spans = next(pair["mass"]["spans"] for pair in pairs if "mass" in pair)
    head = ["pair", "anchor", "words", "Src→Aligned MAE", "Max", "Aligned→Target MAE", "Max", "Prefix Leak Max"]
    return _table(f"mass: errors of word mass in nats, {spans} spans of 5 to 80 tokens", head, list(cells.values()))


def _length(pairs: Sequence[PairCheck]) -> str:
    rows = []
    for pair, row in _rows(pairs, "length"):
        errors = [percent(row[name]) for name in ("aligned", "paper", "naive", "reduction")]
        rows.append([_pair(pair), str(row["target_tokens"]), str(row["sequences"]), *errors])
    head = [
        "pair",
        "target tokens",
        "sequences",
        "aligned (%)",
        "the paper's map (%)",
        "copy by position (%)",
        "reduction (%)",
    ]
    table = _table("length: relative MAE of word mass", head, rows)
    repeated = {row["target_tokens"] for _, row in _rows(pairs, "length") if row["repeating"]}
    if not repeated:
        return table
    return f"{table}\n\nThe text is shorter than {min(repeated)} tokens: stretches of that length repeat it."


def _scripts(pairs: Sequence[PairCheck]) -> str:
    rows = []
    for pair, row in _rows(pairs, "scripts"):
        errors = [percent(row[rule]) for rule in ("word", "char", "auto", "span")]
        rows.append([_pair(pair), row["family"], str(row["texts"]), *errors])
    head = ["pair", "text", "texts", "word (%)", "char (%)", "auto (%)", "span (%)"]
    return _table("scripts: relative MAE by rule, per word, or per character in CJK", head, rows)


def _ratio(pairs: Sequence[PairCheck]) -> str:
    rows = [
        [
            _pair(pair),
            row["denominator"],
            str(row["responses"]),
            str(row["tokens"]),
            significant(row["p99"]),
            f"{row['clip_rate']:.4f}",
            f"{row['responses_over_10']:.4f}",
        ]
        for pair, row in _rows(pairs, "ratio")
    ]
    head = ["pair", "denominator", "responses", "tokens", "token ratio p99", "clip rate", "responses with a ratio > 10"]
    return "\n\n".join([_table("ratio: token-level importance ratios", head, rows), _residual(pairs)])


def _residual(pairs: Sequence[PairCheck]) -> str:
    """Return the losses of aligning the sampled responses, one row per pair."""
    rows = []
    for pair in pairs:
        if "ratio" in pair:
            losses = pair["ratio"]["residual"]
            nats = [significant(losses[key]) for key in ("delta_thl", "delta_thl_p99", "delta_thl_max")]
            others = [significant(losses["mismatched"]), significant(losses["clipped_mass"])]
            others.append(percent(losses["uncovered"]))
            rows.append([_pair(pair), *nats, *others])
    head = ["pair", "delta_THL (nats)", "p99", "max", "C_mis (tokens)", "clipped mass (nats)", "uncovered tokens (%)"]
    return _table("residual: mass of a response's trace that no token received", head, rows)


def _sequence(pairs: Sequence[PairCheck]) -> str:
    rows = [
        [
            _pair(pair),
            row["denominator"],
            str(row["responses"]),
            f"{row['median']:.4f}",
            f"{row['p99']:.4f}",
            f"{row['clip_rate']:.4f}",
            f"{row['log_sum_median']:.2f}",
            f"{row['log_sum_p99']:.2f}",
        ]
        for pair, row in _rows(pairs, "sequence")
    ]
    head = ["pair", "denominator", "responses", "median", "p99", "clip rate", "log of exp(sum): median", "p99"]
    return _table("sequence: exp(mean log-ratio) of a response", head, rows)


def _example(pairs: Sequence[PairCheck]) -> str:
    tables = []
    for pair in pairs:
        if "example" not in pair:
            continue
        rows = []
        for word in pair["example"]["rows"]:
            source = " ".join(f"`{_name(text)}` {value:.3f}" for text, value in word["source"])
            target = " ".join(f"`{_name(text)}` {value:.3f}" for text, value in word["target"])
            rows.append([_name(word["word"]), source, f"{word['source_mass']:.4f}", target])
            rows[-1].append(f"{word['target_mass']:.4f}")
        head = ["word", "source tokens, log-prob", "sum Z_w", "target tokens, aligned value", "sum"]
        tables.append(_table(f"example: {_pair(pair)}, nats", head, rows))
    return "\n\n".join(tables)


_TABLES: dict[str, Callable[[Sequence[PairCheck]], str]] = {
    "mass": _mass,
    "length": _length,
    "scripts": _scripts,
    "ratio": _ratio,
    "sequence": _sequence,
    "example": _example,
}

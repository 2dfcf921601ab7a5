"""THL on two pretrained models and on real tokenizers: the paper's five tables, drift of its map, word against span.

    python benchmarks/thl.py --data DIR      # about ten minutes; DIR as below

1. `mutualrl thl-check` on the two models of DIR/models, in both directions: all suites on WikiText-2, and the suite
   `scripts` on parallel sentences in several scripts (DIR/text).
2. `mutualrl thl-check --suite tokenizers` on MATH solutions (DIR/math) for pairs of real tokenizers (DIR/tokenizers):
   how many tokens the paper's map assigns to a word that they do not overlap.
3. Known truth: one model, its own text under two tokenizations. The aligned value of a target token is compared with
   the same model's value for that token.

Writes benchmarks/results/thl.{json,md}.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import harness
from mutualrl.cli.output import prose
from mutualrl.paper.thl.request import ThlRequest
from mutualrl.paper.thl.thl_check import PairCheck, ThlReport
from mutualrl.paper.thl.thl_check import check as thl_check

COMMAND = "python benchmarks/thl.py"
MODELS = ("stories260K", "babyllama-tok361")
TOKENIZER_PAIRS = (
    ("qwen2.5", "qwen3"),
    ("qwen3", "llama3"),
    ("llama3", "mistral-tekken-240911"),
    ("qwen3", "phi4-mini-style"),
    ("mistral-tekken-240911", "gpt2"),
)
SCRIPTS = ("pud.en", "pud.ru", "pud.zh", "pud.ar", "ko_gsd", "zh_gsdsimp")
ROWS_A_SCRIPT = 100
RESPLIT = (0.0, 0.05, 0.3)  # probability that a token is split in two
ANCHORS = ("span", "word", "char", "paper")


def check(source: Path, target: Path, text: Path, suite: str, limit: int | None = None) -> ThlReport:
    """Return the result of one `mutualrl thl-check`."""
    request = ThlRequest(source=str(source), target=str(target), text=text, suite=suite, limit=limit)
    return thl_check(request, prose())


def together(checks: list[ThlReport]) -> ThlReport:
    """Return several checks as one, for its tables."""
    pairs: list[PairCheck] = [pair for each in checks for pair in each.pairs]
    return ThlReport(checks[0].plan, tuple(pairs))


def write_rows(path: Path, texts: list[str]) -> Path:
    """Write texts as JSON Lines."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def fields(path: Path, field: str) -> list[str]:
    """Return one text field of every row of a JSON Lines file."""
    return [json.loads(line)[field] for line in path.read_text("utf-8").splitlines()]


def resplit(ids: list[int], tokenizer: Any, chance: float, rng: random.Random) -> list[int]:
    """Return the same text with some tokens split in two, as a sampler sometimes emits them."""
    vocabulary = tokenizer.get_vocab()
    result: list[int] = []
    for token in ids:
        piece = tokenizer.convert_ids_to_tokens([token])[0]
        halves = [(piece[:k], piece[k:]) for k in range(1, len(piece)) if {piece[:k], piece[k:]} <= vocabulary.keys()]
        if halves and rng.random() < chance:
            result += [vocabulary[half] for half in rng.choice(halves)]
        else:
            result.append(token)
    return result


def known_truth(model: Path, prompts: list[str], seed: int) -> list[dict[str, Any]]:
    """Return one model's responses, as sampled and re-split, aligned to the canonical tokens; the truth is its own
    log-probs.

    `changed`: fraction of the target tokens that are not 1:1. `mae`: error per token in nats, over all and over those.
    """
    from mutualrl.engines import Sampling
    from mutualrl.engines.scoring import completion_logprobs
    from mutualrl.engines.transformers_engine import TransformersEngine
    from mutualrl.tasks.prompting import prompt_ids
    from mutualrl.thl import align_logprobs, decode_completion, retokenize

    engine = TransformersEngine.load(str(model))
    tokenizer = engine.tokenizer
    starts = prompt_ids(prompts, tokenizer)
    sampled = engine.generate(prompts, Sampling(64, temperature=1.0, samples=2, seed=seed))
    rows: list[dict[str, Any]] = []
    for chance in RESPLIT:
        rng = random.Random(seed)
        cases = []
        for start, group in zip(starts, sampled, strict=True):
            for completion in group:
                ids = resplit(list(completion.token_ids), tokenizer, chance, rng)
                text = decode_completion(ids, tokenizer)
                target = retokenize(text, tokenizer, ended=completion.ended)
                if text and target.exact:
                    cases.append((start, ids, text, list(target.ids)))
        if rows and sum(len(c[1]) for c in cases) == rows[-1]["source_tokens"]:
            continue  # this vocabulary has no halves of tokens
        traces = completion_logprobs(engine.model, [c[0] for c in cases], [c[1] for c in cases])
        truth = completion_logprobs(engine.model, [c[0] for c in cases], [c[3] for c in cases])
        tokens = sum(len(c[1]) for c in cases)
        row: dict[str, Any] = {"model": model.name, "resplit": chance, "responses": len(cases), "source_tokens": tokens}
        for anchor in ANCHORS:
            errors, changed_masks, ratios = [], [], []
            for (_, ids, text, target_ids), trace, true_logprobs in zip(cases, traces, truth, strict=True):
                aligned = align_logprobs(
                    text,
                    ids,
                    trace,
                    tokenizer,
                    tokenizer,
                    target_ids=target_ids,
                    anchor=anchor,  # type: ignore[arg-type]
                    source_eos_ids=engine.eos_token_ids,
                )
                span = align_logprobs(text, ids, trace, tokenizer, tokenizer, target_ids=target_ids)
                single = np.zeros(len(target_ids), dtype=bool)
                for group_ in span.groups:
                    single[list(group_.target)] = len(group_.source) == len(group_.target) == 1
                gap = (true_logprobs - aligned.logprobs)[aligned.covered]
                ratios.append(np.exp(gap))
                errors.append(np.abs(gap))
                changed_masks.append(~single[aligned.covered])
            error, changed, ratio = np.concatenate(errors), np.concatenate(changed_masks), np.concatenate(ratios)
            row["changed"] = float(changed.mean()) if anchor == "span" else row["changed"]
            row[anchor] = {
                "mae": float(error.mean()),
                "mae_changed": float(error[changed].mean()) if changed.any() else 0.0,
                "outside_band": float(np.mean((ratio < 0.8) | (ratio > 1.2))),
                "p99": float(np.quantile(ratio, 0.99)),
            }
        rows.append(row)
    return rows


def truth_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of word against span with known truth."""
    names = " | ".join(f"{anchor}: MAE, nats | outside [0.8, 1.2] (%)" for anchor in ANCHORS)
    lines = [
        "**Where the truth is known: a model's responses re-split, aligned to its canonical tokens**",
        "",
        f"| model | tokens re-split (%) | responses | target tokens not 1:1 (%) | {names} |",
        "|" + "---|" * (4 + 2 * len(ANCHORS)),
    ]
    for row in rows:
        cells = [f"{row[a]['mae']:.3f} | {100 * row[a]['outside_band']:.2f}" for a in ANCHORS]
        lines.append(
            f"| {row['model']} | {100 * row['resplit']:.0f} | {row['responses']} | {100 * row['changed']:.2f} | "
            + " | ".join(cells)
            + " |"
        )
    return "\n".join(lines)


def drift_table(results: list[dict[str, Any]]) -> str:
    """Return the table of the drift of the paper's map on MATH solutions."""
    lines = [
        "**MATH solutions: tokens mapped to a word that they do not overlap, source / target (%)**",
        "",
        "| pair | the paper's map | cut off by it | ours |",
        "|---|---|---|---|",
    ]
    for result in results:
        for pair in result["pairs"]:
            value = pair["tokenizers"]
            cells = [
                " / ".join(f"{100 * value[side][name]:.2f}" for side in ("source", "target"))
                for name in ("paper_drift", "paper_cut", "word_drift")
            ]
            lines.append(f"| {pair['source']} → {pair['target']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, write, print."""
    parser = harness.options(__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "data")
    parser.add_argument("--limit", type=int, default=None, help="thl-check's --limit, for a quick look")
    args = harness.parse(parser)
    data, args.limit = args.data, 2 if args.smoke else args.limit
    models = (MODELS,) if args.smoke else (MODELS, MODELS[::-1])
    tokenizer_pairs = TOKENIZER_PAIRS[:1] if args.smoke else TOKENIZER_PAIRS
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        mixed = [t for s in SCRIPTS for t in fields(data / "text" / f"{s}.jsonl", "text")[:ROWS_A_SCRIPT]]
        scripts_file = write_rows(work / "scripts.jsonl", mixed)
        math = fields(data / "math" / "math500.jsonl", "solution")[: args.limit or 300]
        math_file = write_rows(work / "math.jsonl", math)
        wiki = data / "text" / "wikitext-2-raw.validation.jsonl"
        tables, scripts = [], []
        for a, b in models:
            pair = (data / "models" / a, data / "models" / b)
            tables.append(check(*pair, wiki, "all", args.limit))
            scripts.append(check(*pair, scripts_file, "scripts", args.limit))
        tokenizers = data / "tokenizers"
        drift = [check(tokenizers / a, tokenizers / b, math_file, "tokenizers") for a, b in tokenizer_pairs]
    openings = [" ".join(text.split()[:8]) for text in fields(wiki, "text") if len(text.split()) > 30]
    prompts = random.Random(0).sample(openings, args.limit or 128)
    truth = [row for model in models[0] for row in known_truth(data / "models" / model, prompts, 0)]
    _, _, script_tables = together(scripts).markdown().partition("\n\n**scripts")
    checks = {"wikitext": tables, "scripts": scripts, "math": drift}
    plain = {name: [each.plain() for each in results] for name, results in checks.items()}
    parts = [
        f"On WikiText-2:\n\n{together(tables).markdown()}",
        f"On sentences in several scripts:\n\n**scripts{script_tables}",
        drift_table(plain["math"]),
        truth_table(truth),
    ]
    text = "\n\n".join(parts)
    for each in plain["wikitext"]:
        for pair_values in each["pairs"]:
            for suite in ("ratio", "sequence"):
                for row in pair_values.get(suite, {}).get("rows", []):
                    row.pop("histogram")
    result = {"command": COMMAND, **plain, "truth": truth}
    harness.write(args.out, "thl", json.loads(json.dumps(result).replace(str(data), "DIR")), text)


if __name__ == "__main__":
    main()

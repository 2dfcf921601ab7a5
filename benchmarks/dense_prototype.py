"""Dense teaching at the gate, by plain loops: does a frozen teacher's judgement of the learner's own tokens help?

    python benchmarks/dense_prototype.py --credit           # estimators of a byte group's credit on a toy, enumerated
    python benchmarks/dense_prototype.py --search           # coefficient, clip, gate and KL term, one seed each
    python benchmarks/dense_prototype.py --confirm          # the settings that the search left, three seeds each
    python benchmarks/dense_prototype.py --table            # the tables of what has been run

On a prompt that all of the learner's rollouts fail and the teacher solves, the advantage of a token becomes

    A_t = coef * clip(mean over its byte group of (log T - log S), -clip, clip)    [nats per token]

for the learner S's own sampled tokens under the teacher T, aligned by bytes (`thl.align_logprobs`, anchor `span`); all
else is GRPO. Rollouts that do not end are left out. The teacher is a frozen model in the same process, and has solved a
prompt if one of eight samples has, drawn once before training. Seeds are from 100 on: no claim of the project uses
them. A piece is one training, a minute or two on a core; pieces that are there are not run again.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import harness

Floats = npt.NDArray[np.float64]

COMMAND = "python benchmarks/dense_prototype.py"
PIECES = harness.HERE / "sweeps" / "dense"
STEPS, SAMPLES, PROMPTS = 96, 8, 256
#: learner and teacher of each pool: one each way
PAIRS = (
    ("tiny", "bob", "ada"),
    ("tiny", "ada", "bob"),
    ("tiny-countdown", "fay", "gus"),
    ("tiny-countdown", "gus", "fay"),
)


@dataclass(frozen=True)
class Arm:
    """Settings of a training. `coef` 0 is GRPO; `gate`: `dead`, prompts that all own rollouts fail and the teacher
    solves, or `solved`, failed rollouts of every prompt that the teacher solves; `beta`: of the KL term; `centred`: the
    mean of the round's judged tokens is subtracted; `to_end`: a token has the sum of all later ones, too."""

    coef: float = 0.0
    clip: float = 5.0
    gate: str = "dead"
    beta: float = 1e-3
    centred: bool = False
    to_end: bool = False

    @property
    def name(self) -> str:
        """Return the arm's name."""
        more = [f"KL {self.beta:g}"] if self.beta != Arm.beta else []
        if not self.coef:
            return ", ".join(["grpo", *more])
        more += ["centred"] if self.centred else []
        more += ["to the end"] if self.to_end else []
        return ", ".join([f"dense {self.coef:g}", f"clip {self.clip:g}", self.gate, *more])


SEARCH = (
    Arm(),
    *(Arm(coef) for coef in (0.03, 0.1, 0.3, 1.0)),
    *(Arm(coef, centred=True) for coef in (0.1, 0.3, 1.0)),
    Arm(0.1, to_end=True, centred=True),
    Arm(0.3, clip=1.0),
    Arm(0.3, beta=0.04),
    Arm(0.3, beta=0.04, centred=True),
    Arm(0.3, gate="solved"),
    Arm(beta=0.04),
)
SEARCH_SEED = 100
SEEDS = (101, 102, 103)


#: arms of `--confirm`, chosen by the search's seed alone
CONFIRM: tuple[Arm, ...] = (
    Arm(),
    Arm(0.1, centred=True),
    Arm(0.3, clip=1.0),
    Arm(0.1, to_end=True, centred=True),
)
#: the t of two degrees of freedom at 97.5 %
T_OF_TWO = 4.302653


# ---- credit of a byte group, enumerated on a toy


def credit(pairs: int, seed: int = 0) -> dict[str, dict[str, float]]:
    """Return how far estimators are from the exact gradient of KL(S || T), by the teacher's vocabulary.

    The learner S writes four tokens of {a, b, ab}, one softmax per prefix: 81 paths. The teacher T reads the text with
    its own vocabulary, the longest token first, one softmax per prefix. Exact gradient: sum over paths of
    S(y) grad log S(y) (log S(y) - log T(y)). An estimator gives each token an advantage; its gradient is
    - sum over paths of S(y) sum over t of grad log S(y_t) A_t. Returned are the mean over random pairs of the relative
    error |g - g*| / |g*|, and of the cosine.
    """
    random = np.random.default_rng(seed)
    words, length = ("a", "b", "ab"), 4
    prefixes = [path for size in range(length) for path in itertools.product(range(3), repeat=size)]
    row_of = {prefix: row for row, prefix in enumerate(prefixes)}
    results: dict[str, dict[str, float]] = {}
    for vocabulary in (("a", "b"), ("a", "b", "ba"), ("a", "b", "ba", "abb")):
        sums: dict[str, list[tuple[float, float]]] = {}
        for _ in range(pairs):
            logits = random.normal(size=(len(prefixes), 3))
            logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            teacher: dict[tuple[str, ...], Floats] = {}
            exact = np.zeros_like(logs)
            found = {name: np.zeros_like(logs) for name in ESTIMATORS}
            for path in itertools.product(range(3), repeat=length):
                rows = [row_of[path[:place]] for place in range(length)]
                own = np.array([logs[row, token] for row, token in zip(rows, path, strict=True)])
                text = "".join(words[token] for token in path)
                read = _longest_first(text, vocabulary)
                other = []
                for place, word in enumerate(read):
                    before = tuple(read[:place])
                    if before not in teacher:
                        raw = random.normal(size=len(vocabulary))
                        teacher[before] = raw - np.log(np.exp(raw).sum())
                    other.append(teacher[before][vocabulary.index(word)])
                groups = _groups([words[token] for token in path], read)
                scores = []  # gradient of log S(y_t) by the logits of its row
                for row, token in zip(rows, path, strict=True):
                    score = -np.exp(logs[row])
                    score[token] += 1
                    scores.append((row, score))
                weight = float(np.exp(own.sum()))
                whole = own.sum() - sum(other)
                for row, score in scores:
                    exact[row] += weight * whole * score
                for name, estimator in ESTIMATORS.items():
                    for (row, score), advantage in zip(scores, estimator(own, np.array(other), groups), strict=True):
                        found[name][row] -= weight * advantage * score
            for name, gradient in found.items():
                error = float(np.linalg.norm(gradient - exact) / np.linalg.norm(exact))
                cosine = float((gradient * exact).sum() / np.linalg.norm(gradient) / np.linalg.norm(exact))
                sums.setdefault(name, []).append((error, cosine))
        over = f"teacher over {{{', '.join(vocabulary)}}}"
        for name, values in sums.items():
            error, cosine = np.mean(values, axis=0)
            found_here = {f"error, {over}": round(float(error), 3), f"cosine, {over}": round(float(cosine), 3)}
            results.setdefault(name, {}).update(found_here)
    return results


def credit_table(estimators: dict[str, dict[str, float]]) -> str:
    """Return the estimators as a table: cosine with the exact gradient, by the teacher's vocabulary."""
    columns = [name for name in next(iter(estimators.values())) if name.startswith("cosine")]
    lines = ["| credit | " + " | ".join(columns) + " |", "|" + " --- |" * (len(columns) + 1)]
    for name, values in estimators.items():
        lines.append("| " + " | ".join((name, *(f"{values[column]:.3f}" for column in columns))) + " |")
    return "\n".join(lines)


def _longest_first(text: str, vocabulary: Sequence[str]) -> list[str]:
    tokens, place = [], 0
    while place < len(text):
        tokens.append(max((word for word in vocabulary if text.startswith(word, place)), key=len))
        place += len(tokens[-1])
    return tokens


def _groups(own: Sequence[str], other: Sequence[str]) -> list[tuple[range, range]]:
    """Return the token ranges, of each side, between bytes at which a token of both ends."""
    ends, others = np.cumsum([len(word) for word in own]).tolist(), np.cumsum([len(word) for word in other]).tolist()
    groups, first, first_other = [], 0, 0
    for end in sorted(set(ends) & set(others)):
        stop, stop_other = ends.index(end) + 1, others.index(end) + 1
        groups.append((range(first, stop), range(first_other, stop_other)))
        first, first_other = stop, stop_other
    return groups


def _to_the_end(rewards: Floats) -> Floats:
    """Return the sum of each token's reward and all later ones."""
    return np.cumsum(rewards[::-1])[::-1]


def _even(own: Floats, other: Floats, groups: Sequence[tuple[range, range]]) -> Floats:
    """The teacher's log-prob of a group minus the learner's, spread evenly over its tokens."""
    values = np.zeros(len(own))
    for mine, theirs in groups:
        values[list(mine)] = (other[list(theirs)].sum() - own[list(mine)].sum()) / len(mine)
    return values


def _whole(own: Floats, other: Floats, groups: Sequence[tuple[range, range]]) -> Floats:
    """The whole difference of a group on each of its tokens."""
    values = np.zeros(len(own))
    for mine, theirs in groups:
        values[list(mine)] = other[list(theirs)].sum() - own[list(mine)].sum()
    return values


def _placed(own: Floats, other: Floats, groups: Sequence[tuple[range, range]], after: int) -> Floats:
    """Minus the learner's log-prob on each token; the teacher's of a group `after` tokens after its last one."""
    values = -own
    for mine, theirs in groups:
        values[min(mine[-1] + after, len(own) - 1)] += other[list(theirs)].sum()
    return values


def _proportional(own: Floats, other: Floats, groups: Sequence[tuple[range, range]]) -> Floats:
    """DPCA (2606.09456): (L_T / L_S - 1) log p of each token, L the log-prob of its group."""
    values = np.zeros(len(own))
    for mine, theirs in groups:
        values[list(mine)] = (other[list(theirs)].sum() / own[list(mine)].sum() - 1) * own[list(mine)]
    return values


ESTIMATORS = {
    "teacher one token after the group, to the end": lambda s, t, g: _to_the_end(_placed(s, t, g, 1)),
    "teacher two tokens after the group, to the end": lambda s, t, g: _to_the_end(_placed(s, t, g, 2)),
    "teacher on the group's last token, to the end": lambda s, t, g: _to_the_end(_placed(s, t, g, 0)),
    "even over the group, to the end": lambda s, t, g: _to_the_end(_even(s, t, g)),
    "DPCA, to the end": lambda s, t, g: _to_the_end(_proportional(s, t, g)),
    "even over the group": _even,
    "DPCA": _proportional,
    "whole difference on each token": _whole,
}


# ---- training


class Pair:
    """A learner and a frozen teacher of a pool: its task, their tokenizers, and what the teacher solves."""

    def __init__(self, pool: str, learner: str, teacher: str, seed: int, steps: int, beta: float, prompts: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from mutualrl.engines.transformers_engine import load_tokenizer
        from mutualrl.recipes import Request, resolve
        from mutualrl.recipes.agreement import all_prompts
        from mutualrl.tiny import resolve_path

        settings = (f"run.steps={steps}", f"run.seed={seed}", f"trainer.beta={beta}")
        self.recipe = resolve(Request(pool=pool, regime="grpo", assignments=settings))
        self.training = all_prompts(self.recipe, "train")
        self.validation = all_prompts(self.recipe, "validation")[:prompts]
        self.learner, self.teacher = learner, teacher
        self.models = {name: resolve_path(self.recipe.policy(name).model) for name in (learner, teacher)}
        self.tokenizers = {name: load_tokenizer(path) for name, path in self.models.items()}
        self.judge = AutoModelForCausalLM.from_pretrained(self.models[teacher], dtype=torch.float32).eval()
        solved = self.solve_rates(self.judge, teacher, self.training, SAMPLES, seed) > 0
        self.taught = {prompt.text for prompt, is_solved in zip(self.training, solved, strict=True) if is_solved}

    def solve_rates(self, model: Any, name: str, asked: Sequence[Any], samples: int, seed: int) -> Floats:
        """Return the fraction of samples that solve each prompt; one sample is greedy."""
        import torch

        from mutualrl.engines.choice import engine_from_model
        from mutualrl.engines.sampling import Sampling
        from mutualrl.tasks.prompting import prompt_ids
        from mutualrl.tasks.rewarding import rewards_of

        tokenizer, was_training = self.tokenizers[name], model.training
        limit = int(self.recipe.trainer_settings(self.learner)["max_completion_length"])
        model.eval()
        sampling = Sampling(limit, temperature=1.0 if samples > 1 else 0.0, samples=samples, seed=seed)
        ids = prompt_ids([prompt.content for prompt in asked], tokenizer, {})
        with torch.no_grad():
            groups = engine_from_model(model, tokenizer, 64).generate_ids(ids, sampling)
        model.train(was_training)
        answered = [(prompt, each) for prompt, group in zip(asked, groups, strict=True) for each in group]
        rewards = rewards_of(self.recipe.task.reward, None, answered, tokenizer, self.recipe.run.step_timeout)
        rates: Floats = np.array(rewards, dtype=np.float64).reshape(len(asked), samples).mean(axis=1)
        return rates


def dense_trainer(pair: Pair, arm: Arm, counts: dict[str, int], ratios: list[float]) -> type[Any]:
    """Return GRPO's trainer whose failed rollouts at the gate have advantages per token. `counts`, `ratios`: what it
    finds is added there."""
    import torch

    from mutualrl.adapter.trl_compat import tokenizer_of, total_rewards
    from mutualrl.engines.scoring import completion_logprobs
    from mutualrl.tasks.prompting import prompt_ids
    from mutualrl.thl import align_logprobs, decode_completion, retokenize
    from mutualrl.training import MutualGRPOTrainer

    class Trainer(MutualGRPOTrainer):
        """GRPO, and the teacher's judgement."""

        def at_the_gate(self, generation: Any) -> list[int]:
            """Return the rows to be judged: failed, at the gate, and ended."""
            rewards, size = total_rewards(self, generation.rewards).tolist(), self.num_generations
            chosen = []
            for row, data in enumerate(generation.inputs):
                group = rewards[row // size * size : row // size * size + size]
                is_dead = max(group) <= 0
                counts["dead"] += is_dead and row % size == 0
                if data["prompt"] in pair.taught and rewards[row] <= 0 and (is_dead or arm.gate == "solved"):
                    chosen.append(row)
            kept = [row for row in chosen if generation.completion_ids[row][-1] in self.eos_token_ids]
            counts["rounds"] += 1
            counts["scored"] += len(kept)
            counts["left_out"] += len(chosen) - len(kept)
            return kept

        def on_generated(self, batch: Any, generation: Any) -> None:
            """Add the teacher's judgement to TRL's advantages."""
            super().on_generated(batch, generation)
            kept = self.at_the_gate(generation) if self.model.training and arm.coef else []
            if not kept:
                return
            own_tokenizer, its_tokenizer = tokenizer_of(self), pair.tokenizers[pair.teacher]
            own_ids = [list(generation.completion_ids[row]) for row in kept]
            texts = [decode_completion(ids, own_tokenizer) for ids in own_ids]
            asked = [generation.inputs[row]["prompt"] for row in kept]
            self.model.eval()
            with torch.no_grad():
                own = completion_logprobs(self.model, prompt_ids(asked, own_tokenizer, {}), own_ids)
                read = [list(retokenize(text, its_tokenizer, ended=True).ids) for text in texts]
                theirs = completion_logprobs(pair.judge, prompt_ids(asked, its_tokenizer, {}), read)
            self.model.train()
            dense = np.zeros(tuple(batch["completion_ids"].shape))
            judged = np.zeros(dense.shape, dtype=np.bool_)
            for number, row in enumerate(kept):
                scored = (texts[number], read[number], theirs[number])
                aligned = align_logprobs(*scored, its_tokenizer, own_tokenizer, target_ids=own_ids[number])
                for group in aligned.groups:
                    tokens = list(group.target)
                    if not tokens or not len(group.source):
                        continue
                    difference = theirs[number][list(group.source)].sum() - own[number][tokens].sum()
                    ratio = float(difference / len(tokens))
                    counts["tokens"] += len(tokens)
                    counts["clipped"] += len(tokens) * (abs(ratio) > arm.clip)
                    ratios.append(ratio)
                    dense[row, tokens], judged[row, tokens] = np.clip(ratio, -arm.clip, arm.clip), True
            dense[judged] -= dense[judged].mean() if arm.centred else 0.0
            if arm.to_end:
                dense[judged] = np.cumsum(dense[:, ::-1], axis=1)[:, ::-1][judged]
            advantages = batch["advantages"][:, None]
            batch["advantages"] = advantages + arm.coef * torch.tensor(dense, dtype=advantages.dtype)

    return Trainer


def piece(pool: str, learner: str, teacher: str, arm: Arm, seed: int, steps: int, prompts: int) -> dict[str, Any]:
    """Train a learner under an arm; return what it solves before and after, by whether it was dead before."""
    import torch
    from transformers import PrinterCallback

    from mutualrl.adapter.data import as_dataset
    from mutualrl.machine.devices import Machine
    from mutualrl.mwra.placement import place
    from mutualrl.tasks.rewards import load_rewards
    from mutualrl.training.config import grpo_config

    pair = Pair(pool, learner, teacher, seed, steps, arm.beta, prompts)
    counts, ratios = dict.fromkeys(("rounds", "dead", "scored", "left_out", "tokens", "clipped"), 0), list[float]()
    placed = place(pair.recipe, Machine((), 2)).allocations
    allocation = next(each for each in placed if each.policy == learner)
    with tempfile.TemporaryDirectory() as scratch:
        args = grpo_config(pair.recipe, replace(allocation, processes=1), Path(scratch), cpu=True)
        args.save_strategy = "no"
        trainer = dense_trainer(pair, arm, counts, ratios)(
            model=pair.models[learner],
            reward_funcs=load_rewards(pair.recipe.task.reward),
            args=args,
            train_dataset=as_dataset(pair.training, pair.tokenizers[learner]),
            processing_class=pair.tokenizers[learner],
        )
        trainer.remove_callback(PrinterCallback)
        before = pair.solve_rates(trainer.model, learner, pair.validation, SAMPLES, seed)
        greedy_before = float(pair.solve_rates(trainer.model, learner, pair.validation, 1, seed).mean())
        torch.manual_seed(seed)
        trainer.train()
        after = pair.solve_rates(trainer.model, learner, pair.validation, SAMPLES, seed + 1)
        greedy = float(pair.solve_rates(trainer.model, learner, pair.validation, 1, seed).mean())
    dead = before == 0
    return {
        **{"pool": pool, "learner": learner, "teacher": teacher, "arm": arm.name, "settings": asdict(arm)},
        **{"seed": seed, "steps": steps, "prompts": len(pair.validation), "dead_before": int(dead.sum())},
        **{"greedy_before": greedy_before, "greedy": greedy, "sampled": float(after.mean())},
        "sampled_before": float(before.mean()),
        "dead": float(after[dead].mean()) if dead.any() else None,
        "alive": float(after[~dead].mean()) if not dead.all() else None,
        "alive_before": float(before[~dead].mean()) if not dead.all() else None,
        "teacher_solves": len(pair.taught) / len(pair.training),
        "counts": {name: int(value) for name, value in counts.items()},
        "mean_ratio": float(np.mean(ratios)) if ratios else None,
    }


def run(arms: Sequence[Arm], seeds: Sequence[int], steps: int, prompts: int, directory: Path, part: str) -> None:
    """Run the pieces that are not there. `part`: `N/M`, every M-th piece from the N-th on, for a process per core."""
    import torch

    torch.set_num_threads(1)
    number, of = map(int, part.split("/"))
    directory.mkdir(parents=True, exist_ok=True)
    wanted = list(itertools.product(PAIRS, arms, seeds))
    for (pool, learner, teacher), arm, seed in wanted[number - 1 :: of]:
        path = directory / f"{pool}-{learner}-{arm.name.replace(', ', '_').replace(' ', '-')}-{seed}.json"
        if path.is_file():
            continue
        result = piece(pool, learner, teacher, arm, seed, steps, prompts)
        path.write_text(json.dumps(result) + "\n", encoding="utf-8")
        print(
            f"{path.stem}: greedy {result['greedy_before']:.3f} -> {result['greedy']:.3f}, dead {result['dead']}",
            flush=True,
        )


def table(pieces: Sequence[dict[str, Any]]) -> str:
    """Return the pieces as a table, means over seeds."""
    head = (
        "learner from teacher",
        "arm",
        "seeds",
        "greedy before",
        "greedy",
        "dead prompts",
        "sampled there",
        "elsewhere",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    keyed: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for each in pieces:
        keyed.setdefault((each["pool"], each["learner"], each["teacher"], each["arm"]), []).append(each)
    for (pool, learner, teacher, arm), group in keyed.items():
        means = [
            float(np.mean([each[key] for each in group if each[key] is not None] or [np.nan]))
            for key in ("greedy_before", "greedy", "dead_before", "dead", "alive")
        ]
        shown = [f"{means[0]:.3f}", f"{means[1]:.3f}", f"{means[2]:.0f}", f"{means[3]:.3f}", f"{means[4]:.3f}"]
        lines.append("| " + " | ".join((f"{pool}: {learner} from {teacher}", arm, str(len(group)), *shown)) + " |")
    return "\n".join(lines)


def differences(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return each arm minus GRPO at the same seed, by pair: mean and 95 % t-interval over the seeds of `--confirm`, of
    greedy accuracy, and of the fraction of samples that solve what was dead before, and what was not."""
    known = {(each["pool"], each["learner"], each["arm"], each["seed"]): each for each in pieces}
    found: dict[str, Any] = {}
    for pool, learner, teacher in PAIRS:
        for arm in CONFIRM[1:]:
            keys = [(pool, learner, name, seed) for seed in SEEDS for name in (arm.name, CONFIRM[0].name)]
            if any(key not in known for key in keys):
                continue
            row = {}
            for measure in ("greedy", "dead", "alive"):
                values = [
                    known[pool, learner, arm.name, seed][measure] - known[pool, learner, CONFIRM[0].name, seed][measure]
                    for seed in SEEDS
                ]
                half = T_OF_TWO * float(np.std(values, ddof=1)) / len(values) ** 0.5
                mean = float(np.mean(values))
                row[measure] = {"mean": mean, "low": mean - half, "high": mean + half}
            found.setdefault(f"{pool}: {learner} from {teacher}", {})[arm.name] = row
    return found


def difference_table(found: dict[str, Any]) -> str:
    """Return the differences as a table."""
    head = ("learner from teacher", "arm", "greedy", "dead before", "alive before")
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for pair, arms in found.items():
        for arm, row in arms.items():
            cells = [
                f"{row[m]['mean']:+.3f} [{row[m]['low']:+.3f}, {row[m]['high']:+.3f}]"
                for m in ("greedy", "dead", "alive")
            ]
            lines.append("| " + " | ".join((pair, arm, *cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run what the command line names."""
    parser = harness.options(__doc__)
    for name in ("credit", "search", "confirm", "table"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--part", default="1/1", help="every M-th piece from the N-th on, as N/M")
    args = harness.parse(parser)
    if args.smoke:
        pieces = [piece(*PAIRS[0], Arm(0.3), SEARCH_SEED, 2, 8)]
        smoke = {"command": f"{COMMAND} --smoke", "pieces": pieces, "estimators": credit(1)}
        harness.write(args.out, "dense_prototype", smoke, table(pieces))
        return
    if args.credit:
        found = credit(20)
        content: dict[str, Any] = {"command": f"{COMMAND} --credit", "pairs": 20, "estimators": found}
        harness.write(args.out, "dense_prototype_credit", content, credit_table(found))
    if args.search:
        run(SEARCH, (SEARCH_SEED,), STEPS, PROMPTS, PIECES, args.part)
    if args.confirm:
        run(CONFIRM, SEEDS, STEPS, PROMPTS, PIECES, args.part)
    if args.table:
        pieces = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(PIECES.glob("*.json"))]
        if pieces:
            compared = differences(pieces)
            shown = {"command": f"{COMMAND} --table", "differences": compared}
            harness.write(args.out, "dense_prototype", shown, difference_table(compared))
            every = {"command": f"{COMMAND} --table", "pieces": pieces}
            harness.write(args.out, "dense_prototype_search", every, table(pieces))


if __name__ == "__main__":
    main()

"""Preparation of a run's sources before training: read, match, verify, and encode for each learner.

The reward of a recorded text is that of the run's own reward functions. What a file claims of a text is never believed.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from mutualrl.console.display import clean
from mutualrl.console.lines import notify
from mutualrl.errors import DataError, FileDamagedError, RewardError, UsageError
from mutualrl.records import Completion, Prompt, Rollout, columns_of
from mutualrl.rollouts import SCHEMA, Rollouts
from mutualrl.sources.layouts import RecordedText
from mutualrl.sources.recorded import MatchedTexts, read_recorded
from mutualrl.sources.section import RecordedSource
from mutualrl.sources.source import StoredSource
from mutualrl.storage.files import JsonObject
from mutualrl.storage.parquet import require_bounded
from mutualrl.tasks.boxed import boxed_score
from mutualrl.tasks.messages import continued, ends_in_reasoning
from mutualrl.tasks.prompting import Template, prompt_ids
from mutualrl.tasks.rewarding import BOXED, rewards_of
from mutualrl.tasks.rewards import Reward, load_rewards, original, require_columns
from mutualrl.thl import retokenize
from mutualrl.thl.rows import encode_exactly
from mutualrl.thl.text import encode_in_context
from mutualrl.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH = 512  # texts that are encoded at once
JUDGED = 64  # texts per call of a reward function of the user's
#: prompt id, what was written, whether it is complete
Response = tuple[str, Trajectory, bool]


@dataclass(frozen=True, slots=True)
class Learner:
    """What verification and encoding need of a policy. `max_completion_length`: in its own tokens, with the one that
    ends a response. `template`: arguments of its chat template. `success_above`: the reward above which a text is a
    success for it. `context`: the positions of its model; None: not known."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    max_completion_length: int | None
    reward_weights: tuple[float, ...] | None
    template: Template
    success_above: float = 0.0
    context: int | None = None


@dataclass(frozen=True, slots=True)
class Learnable:
    """What one policy can learn of a source's confirmed texts: its tokens spell them, and with the one that ends a
    response they are within its limit. `counts`: of texts, `encodable`, `too_long` or `changed`, and of `runs`;
    `prompts`: those with an encodable text; `lengths`: of the others with one that is too long, the tokens of the
    shortest; `context`: as of `Learner`."""

    counts: Mapping[str, int]
    prompts: frozenset[str]
    lengths: Mapping[str, int]
    context: int | None = None

    @property
    def needed_length(self) -> int | None:
        """Return the limit under which it could learn a text on each of `lengths`; None if there is none."""
        return max(self.lengths.values(), default=None)

    def to_json(self) -> JsonObject:
        """Return the counts and, where a text is too long, the length that would do, with the model's context where
        that is less."""
        needed = {} if self.needed_length is None else {"needed_length": self.needed_length}
        beyond = self.context is not None and (self.needed_length or 0) > self.context
        return {**self.counts, **needed, **({"context": self.context} if beyond else {})}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A source that is ready for training: its rollouts, what is said of them before the start, and what each policy
    can learn of them."""

    source: StoredSource
    summary: JsonObject
    note: str
    learnable: Mapping[str, Learnable] = field(default_factory=dict)

    @property
    def data(self) -> bytes:
        """Return its rollouts as a Parquet file, always the same bytes for the same rollouts."""
        return encoded(self.source.table)

    @property
    def digest(self) -> str:
        """Return the sha256 of its rollouts, independent of their file's encoding."""
        return digest_of(self.source.table)


@dataclass(frozen=True, slots=True)
class Criterion:
    """What the texts of a run's sources are matched with and judged by: the task's prompts, the import paths of its
    reward functions, the limit of one call in seconds, and the policies. A text is confirmed by a reward above the
    learners' `success_above`, or above this one without learners. `turns`: the task has tools, so that runs of agents
    are texts, too. Without `rewards` the task's environment judges a policy's own runs only, and a file's have the
    reward that the file gives them, 1 if it gives none."""

    prompts: Sequence[Prompt]
    rewards: Sequence[str]
    learners: Sequence[Learner]
    timeout: float
    validation: Sequence[Prompt] = ()
    success_above: float = 0.0
    turns: bool = False

    def of(self, source: RecordedSource) -> Criterion:
        """Return the criterion of the policies that read a source."""
        readers = [each for each in self.learners if not source.learners or each.name in source.learners]
        threshold = min((each.success_above for each in readers), default=self.success_above)
        return replace(self, learners=readers, success_above=threshold)


class Judged(NamedTuple):
    """Texts (prompt id, response) of a source with their rewards; None where the learners must compute them.
    `claimed`: they are the file's own."""

    pairs: Sequence[tuple[str, RecordedText]]
    scores: Sequence[float] | None
    above: float
    claimed: bool = False

    @property
    def rewards(self) -> Sequence[float]:
        """Return the rewards, NaN where there is none. Runs that the learners would have to judge have the file's."""
        if self.scores is not None:
            return self.scores
        claimed = zip(self.pairs, claimed_rewards(self.pairs), strict=True)
        return [math.nan if each.trajectory.is_text else reward for (_, each), reward in claimed]

    @property
    def confirmed(self) -> list[tuple[str, RecordedText]]:
        """Return the texts with a reward above the threshold."""
        return [pair for pair, score in zip(self.pairs, self.rewards, strict=True) if score > self.above]


def prepare_sources(sources: Sequence[RecordedSource], criterion: Criterion) -> dict[str, Prepared]:
    """Return the sources of a run by name.

    Raises DataError for a file that cannot be read, whose prompts are not the task's or are the validation set, or none
    of whose texts earns a reward; RewardError for a reward function that fails. Both name the source.
    """
    require_columns(load_rewards(criterion.rewards), columns_of(criterion.prompts))
    rendered = [_rendered(learner, criterion.prompts) for learner in criterion.learners]
    prepared = {}
    for source in sources:
        notify(f"reading source {source.name}: {source.recorded}")
        try:
            prepared[source.name] = _prepared(source, criterion.of(source), rendered)
        except (DataError, RewardError) as error:
            text = str(error).replace("sources.NAME.", f"sources.{source.name}.")
            raise type(error)(f"source {source.name!r}: {text}") from error
    return prepared


def _prepared(source: RecordedSource, criterion: Criterion, rendered: Sequence[Sequence[str]]) -> Prepared:
    """Return a source, ready for training. `rendered`: the prompts as each policy of the run is shown them."""
    prompts, learners = criterion.prompts, criterion.learners
    matched = read_recorded(
        source.recorded,
        source.columns,
        source.reasoning,
        prompts,
        criterion.validation,
        rendered,
        turns=criterion.turns,
    )
    _require_training_prompts(source, matched)
    pairs = list(matched.responses(source.max_texts))
    if criterion.rewards:
        verifier = Verifier({prompt.id: prompt for prompt in prompts}, criterion.rewards, learners, criterion.timeout)
        scores = verifier.rewards([(prompt_id, each.trajectory, True) for prompt_id, each in pairs])
        judged = Judged(pairs, scores, criterion.success_above)
    else:
        judged = Judged(pairs, claimed_rewards(pairs), criterion.success_above, claimed=True)
    verified = judged.scores is not None
    if verified and not judged.confirmed:
        raise DataError(_none_confirmed(pairs, criterion))
    stored = StoredSource(
        source.name,
        rollouts_table(source.name, pairs, judged.rewards),
        verified and not judged.claimed,
        source.learners or None,
    )
    possible = judged.confirmed if verified else pairs
    learnable = {learner.name: _learnable(possible, learner) for learner in learners}
    summary = {**_summary(matched, judged, len(prompts), learnable), "turns": criterion.turns}
    return Prepared(stored, summary, note_of(source.name, summary), learnable)


def claimed_rewards(pairs: Sequence[tuple[str, RecordedText]]) -> list[float]:
    """Return the rewards that a file gives its runs, 1 where it has none at all: it is a file of solutions."""
    return [1.0 if each.reward is None else each.reward for _, each in pairs]


class TrainerState:
    """Stand-in for TRL's `trainer_state` outside a training: `asked` becomes true if a reward function looks at it."""

    def __init__(self) -> None:
        self.asked = False

    def __getattr__(self, name: str) -> NoReturn:
        object.__setattr__(self, "asked", True)
        raise AttributeError(f"there is no trainer_state outside a training (asked for {name!r})")


def has_one_verdict(rewards: Sequence[str], learners: Sequence[Learner]) -> bool:
    """Return whether a text may have one reward for all learners and throughout training: not if a function takes the
    trainer's state, or policies have other weights of the functions, or some have a chat template and some none."""
    if tuple(rewards) == BOXED:
        return True
    functions = load_rewards(rewards)
    if not learners and any(_takes("completion_ids", function) for function in functions):
        raise UsageError(
            f"{', '.join(rewards)}: takes completion_ids, and files of rollouts name no tokenizer; sample the model in "
            "their place (--model MODEL, without --rollouts), or name a reward that does not take them"
        )
    forms = {(learner.reward_weights, bool(learner.tokenizer.chat_template)) for learner in learners}
    return len(forms) < 2 and not any(_takes("trainer_state", function) for function in functions)


def _takes(argument: str, function: Reward) -> bool:
    try:
        return argument in inspect.signature(original(function)).parameters
    except (TypeError, ValueError):  # no signature, as of a builtin
        return False


def _rendered(learner: Learner, prompts: Sequence[Prompt]) -> list[str]:
    """Return the prompts as TRL logs them: rendered, without special tokens."""
    rows = prompt_ids([prompt.content for prompt in prompts], learner.tokenizer, learner.template)
    texts: list[str] = learner.tokenizer.batch_decode(rows, skip_special_tokens=True)
    return texts


@dataclass
class Verifier:
    """The run's reward functions as the judge of a source's texts. `timeout`: limit of one call, in seconds. `shared`:
    a text has one reward for all learners; without, each learner computes its own. Without learners, as for files of
    rollouts, the functions are given no ids, and prompts as the rows have them."""

    prompts: Mapping[str, Prompt]
    functions: Sequence[str]
    learners: Sequence[Learner]
    timeout: float
    shared: bool = field(init=False)

    def __post_init__(self) -> None:
        self.shared = has_one_verdict(self.functions, self.learners)

    def rewards(self, responses: Sequence[Response], progress: Callable[[], None] = lambda: None) -> list[float] | None:
        """Return the reward of every text, NaN where it cannot be scored; None where the learners must compute it.
        `progress` is called after each call of the reward functions."""
        if not self.shared:
            return None
        if tuple(self.functions) == BOXED:
            return [boxed_score(each.text, self.prompts[prompt_id].answer) for prompt_id, each, _ in responses]
        learner, state = next(iter(self.learners), None), TrainerState()
        weights, tokenizer = (None, None) if learner is None else (learner.reward_weights, learner.tokenizer)
        scores: list[float] = []
        for start in range(0, len(responses), JUDGED):
            answered = []
            for prompt_id, each, ended in responses[start : start + JUDGED]:
                ids = () if tokenizer is None else tuple(encode_in_context(each.text, tokenizer)[0])
                answered.append((self.prompts[prompt_id], Completion(ids, each, ended)))
            try:
                scores += rewards_of(self.functions, weights, answered, tokenizer, self.timeout, state)
            except RewardError:
                if not state.asked:
                    raise
            if state.asked:
                self.shared = False
                return None
            progress()
            if start % (16 * JUDGED) == 0 and start:
                notify(f"{len(scores):,} of {len(responses):,} texts have a reward")
        return scores


def rollouts_table(name: str, pairs: Sequence[tuple[str, RecordedText]], scores: Sequence[float]) -> pa.Table:
    """Return the texts as rollouts of the source."""
    rollouts, index, before = [], 0, ""
    for (prompt_id, each), score in zip(pairs, scores, strict=True):
        index = index + 1 if prompt_id == before else 0
        before = prompt_id
        rollouts.append(Rollout(prompt_id, index, float(score), True, trajectory=each.trajectory))
    return Rollouts.of(rollouts, name).table()


def encoded(table: pa.Table) -> bytes:
    """Return a table as the bytes of a Parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def digest_of(table: pa.Table) -> str:
    """Return the sha256 of a source's rollouts: their prompts, texts (of runs the messages, too) and rewards, in
    order."""
    digest = hashlib.sha256()
    for row in table.select(["prompt_id", "rollout", "y_text", "reward", "messages"]).to_pylist():
        values = [value for key, value in row.items() if key != "messages" or value is not None]
        digest.update(repr(tuple(values)).encode("utf-8", "backslashreplace"))
    return digest.hexdigest()


def read_stored(
    data: bytes, name: str, digest: str, *, verified: bool, learners: Sequence[str] | None, where: str
) -> StoredSource:
    """Return a source from its file in a run. Raises FileDamagedError if that was changed."""
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        require_bounded(file, where)
        table = file.read().cast(SCHEMA)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FileDamagedError(f"{where}: not readable as rollouts of a source ({error})") from None
    if digest_of(table) != digest:
        raise FileDamagedError(f"{where}: changed since the run wrote it; restore it, or start the run again (--clean)")
    return StoredSource(name, table, verified, None if learners is None else tuple(learners))


# ---- what is said before the start


def _require_training_prompts(spec: RecordedSource, found: MatchedTexts) -> None:
    """Raise DataError for a file of the validation set: more of its prompts have a text than of the training set."""
    held, matched = len(found.validation), len(found.texts)
    if held > matched and not spec.allow_validation:
        raise DataError(
            f"{spec.recorded} has texts for {held} validation prompts and {matched} training prompts: it seems to be "
            "the validation set. Texts of validation prompts are never used; to train with the others: --set "
            f"sources.{spec.name}.allow_validation=true"
        )
    if not found.texts:
        counts = [f"{key} {number}" for key, number in sorted(found.counts.items())]
        counts += [malformed_note(found.malformed)] if found.malformed else []
        raise DataError(f"{spec.recorded} has no usable text for any training prompt ({', '.join(counts)})")


def _none_confirmed(pairs: Sequence[tuple[str, RecordedText]], criterion: Criterion) -> str:
    if not criterion.rewards:
        return f"none of its {len(pairs)} runs has a reward above {criterion.success_above:g} in the file"
    prompt_id, text = pairs[0][0], pairs[0][1].trajectory.text
    answer = next(prompt.answer for prompt in criterion.prompts if prompt.id == prompt_id)
    return (
        f"none of its {len(pairs)} texts earns a reward above {criterion.success_above:g} from "
        f"{', '.join(criterion.rewards)}. One of them ends with {clean(text[-120:])!r}; its answer is "
        f"{clean(answer)[:80]!r}"
    )


def _summary(found: MatchedTexts, judged: Judged, prompts: int, learnable: Mapping[str, Learnable]) -> JsonObject:
    """Return the counts that are said before training, by name. `prompts`: of the task."""
    return {
        "layout": found.layout,
        "rows": found.counts["rows"],
        "matched_rows": found.counts["matched"],
        "prompts": len(found.texts),
        "of_prompts": prompts,
        "validation_prompts": len(found.validation),
        "texts": len(judged.pairs),
        **{key: found.counts[key] for key in LEFT_OUT},
        "malformed": dict(found.malformed.most_common()),
        "skipped_files": found.skipped,
        "verified": judged.scores is not None and not judged.claimed,
        "claimed": judged.claimed,
        "runs": sum(not each.trajectory.is_text for _, each in judged.pairs),
        "confirmed": len(judged.confirmed),
        "confirmed_prompts": len({prompt_id for prompt_id, _ in judged.confirmed}),
        "unscorable": sum(map(math.isnan, judged.scores or ())),
        "learners": {name: each.to_json() for name, each in learnable.items()},
    }


def _end_of_prompt(learner: Learner) -> str:
    """Return how a policy's prompts end."""
    (ids,) = prompt_ids(["?"], learner.tokenizer, learner.template)
    text: str = learner.tokenizer.decode(ids)
    return text.rpartition("?")[2]


def _learnable(responses: Sequence[tuple[str, RecordedText]], learner: Learner) -> Learnable:
    """Return what a policy can learn of these responses (with their prompts' ids). Runs count as learnable: whether its
    chat template keeps them is not asked here."""
    counts = dict.fromkeys(("encodable", "too_long", "changed"), 0)
    if runs := sum(not each.trajectory.is_text for _, each in responses):
        counts["runs"] = runs
    prompts = {prompt_id for prompt_id, each in responses if not each.trajectory.is_text}
    lengths: dict[str, int] = {}
    pairs = [(prompt_id, each.trajectory.text) for prompt_id, each in responses if each.trajectory.is_text]
    if ends_in_reasoning(_end_of_prompt(learner)):
        spoken = [(prompt_id, continued(text)) for prompt_id, text in pairs]
        counts["reasoning"] = sum(text is None for _, text in spoken)
        pairs = [(prompt_id, text) for prompt_id, text in spoken if text is not None]
    limit = learner.max_completion_length
    for start in range(0, len(pairs), BATCH):
        batch = pairs[start : start + BATCH]
        encoded_rows = encode_exactly([text for _, text in batch], learner.tokenizer)
        for (prompt_id, text), ids in zip(batch, encoded_rows, strict=True):
            if ids is not None:
                exact, length = True, len(ids) + 1
            else:
                result = retokenize(text, learner.tokenizer, ended=True)
                exact, length = result.exact, len(result.ids)
            if not exact:
                counts["changed"] += 1
            elif limit is not None and length > limit:
                counts["too_long"] += 1
                lengths[prompt_id] = min(length, lengths.get(prompt_id, length))
            else:
                counts["encodable"] += 1
                prompts.add(prompt_id)
    others = {key: each for key, each in lengths.items() if key not in prompts}
    return Learnable(counts, frozenset(prompts), others, learner.context)


LEFT_OUT = {
    "duplicates": "equal to another",
    "cut_off": "cut off",
    "rejected": "rejected by their verdict column",
    "too_long": "over 1,000,000 characters",
    "several_turns": "of several turns",
    "calls": "with calls of tools",
    "parts": "with parts that are no text",
    "empty": "empty",
    "branches": "of branches beside the last",
    "over_limit": "over max_texts per prompt",
}


def malformed_note(problems: Mapping[str, int]) -> str:
    """Return how many conversations are no run, with their problems, the most common first."""
    reasons = ", ".join(f"{number:,} with {problem}" for problem, number in problems.items())
    return f"{sum(problems.values()):,} that are no run ({reasons})"


def learnable_note(learner: str, counts: Mapping[str, int]) -> str:
    """Return what a policy can learn of a source's confirmed texts, and what keeps it from the others."""
    refused = []
    if counts["too_long"]:
        needed = ""
        if "context" in counts:
            needed = f"{counts['needed_length']:,} tokens for one on each prompt, and its model {counts['context']:,}"
            needed = f": it takes {needed} positions"
        elif "needed_length" in counts:
            needed = f": max_completion_length {counts['needed_length']:,} would do for one on each prompt"
        refused.append(f"{counts['too_long']:,} too long{needed}")
    if counts["changed"]:
        refused.append(f"{counts['changed']:,} changed by its tokenizer")
    if counts.get("reasoning"):
        refused.append(f"{counts['reasoning']:,} without reasoning, which its prompts open with <think>")
    usable = counts["encodable"] + counts.get("runs", 0)
    number = f"{usable:,} of them" if usable or not refused else "none of them"
    return f"{learner} can learn {number}" + (f" ({', '.join(refused)})" if refused else "")


def note_of(name: str, summary: JsonObject) -> str:
    """Return what is said of a source before training."""
    left_out = [f"{summary[key]:,} {words}" for key, words in LEFT_OUT.items() if summary[key]]
    left_out += [malformed_note(summary["malformed"])] if summary["malformed"] else []
    parts = [
        f"source {name}: {summary['rows']:,} rows ({summary['layout']})",
        f"{summary['prompts']:,} of {summary['of_prompts']:,} training prompts (rows) have a text",
        f"{summary['texts']:,} texts, distinct in each" + (f" (left out: {', '.join(left_out)})" if left_out else ""),
    ]
    if summary["verified"]:
        unscorable = f", {summary['unscorable']:,} unscorable" if summary["unscorable"] else ""
        parts.append(
            f"{summary['confirmed']:,} confirmed by the reward, on {summary['confirmed_prompts']:,} prompts{unscorable}"
        )
    elif summary["claimed"]:
        parts.append(
            f"{summary['confirmed']:,} successes by the file, on {summary['confirmed_prompts']:,} prompts: the "
            "environment judges what is acted in it only"
        )
    else:
        parts.append("their rewards depend on the learner or on training: each learner computes them in the round")
    if summary["turns"] and not summary["runs"]:
        parts.append("none of them is a run with tools: there is no plan in them (regime.hint: plan)")
    if summary["runs"]:
        parts.append(f"{summary['runs']:,} are runs with tools")
    for learner, counts in summary["learners"].items() if summary["runs"] < summary["texts"] else ():
        parts.append(learnable_note(learner, counts))
    if summary["skipped_files"]:
        parts.append(f"files without recorded texts: {clean(', '.join(summary['skipped_files'][:5]))}")
    if summary["validation_prompts"]:
        parts.append(f"texts of {summary['validation_prompts']:,} validation prompts are left out")
    return "; ".join(parts)

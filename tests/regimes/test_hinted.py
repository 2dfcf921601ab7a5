"""Hinted: the gate, the hint, the filters, and the rows, with numbers worked by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mutualrl.records import PublishSchema, Rollout
from mutualrl.regimes import PPO, Results, RoundView, Sample, Sampled, UpperBound, get_regime, whitened_plan
from mutualrl.regimes.answers import is_bare, longest_common_substring
from mutualrl.regimes.hinted import Hinted
from mutualrl.regimes.hints import FOR_AGENTS, FOR_CHATS, FOR_TEXTS, shown_hint, with_hint
from mutualrl.regimes.run_problems import RunFacts, setting_problems
from mutualrl.regimes.transfer import EncodedRun
from mutualrl.rollouts import Rollouts
from mutualrl.tasks.boxed import final_answer
from mutualrl.trajectory import Message, ToolCall, Trajectory
from regime_views import Peer, view

SOLUTION = "4+3=7 \\boxed{7}"
OWN = "3+4 is 7, so \\boxed{7}"
#: the learner fails on a and b and succeeds once on c; bob solves a, c and d
ROWS = [("a", 0.0), ("a", 0.0), ("b", 0.0), ("b", 0.0), ("c", 0.0), ("c", 1.0), ("d", 0.0), ("d", 0.0)]
BOB = Peer([("a", 1.0, SOLUTION), ("b", 0.0, None), ("c", 1.0, "c \\boxed{1}"), ("d", 1.0, "6-1=5 \\boxed{5}")])

Write = Callable[[Sample], tuple[str, float]]


def sampled(sample: Sample, text: str, reward: float, *, trace: float = -0.5) -> Sampled:
    ids = (*text.encode(), 0)  # 0: the end token
    logprobs = np.full(len(ids), trace, dtype=np.float32) if sample.logprobs else None
    return Sampled(EncodedRun(ids), Trajectory.of_text(text), True, reward, logprobs, tuple(sample.hint.encode()))


def with_samples(round_view: RoundView, regime: Hinted, write: Write) -> RoundView:
    """Return the round with the results of the regime's requests: `write` gives text and reward of each sample."""
    made = regime.requests(round_view)
    samples = {sample: sampled(sample, *write(sample)) for sample in made.samples}
    return replace(round_view, results=Results(nll=dict.fromkeys(made.nll, 2.5), samples=samples))


def test_only_prompts_whose_gate_opened_are_sampled_with_their_success_as_the_hint() -> None:
    made = Hinted(samples=3).requests(view(ROWS, {"bob": BOB})).samples
    assert [(s.prompt_id, s.number) for s in made] == [(p, n) for p in ("a", "d") for n in range(3)]
    assert {s.prompt_id: s.hint for s in made} == {"a": SOLUTION, "d": "6-1=5 \\boxed{5}"}
    assert {(s.template, s.max_hint_tokens, s.logprobs) for s in made} == {(None, None, False)}


def test_confirmed_answers_in_own_words_are_learnt_with_sgts_weight_and_mean() -> None:
    texts = {0: (OWN, 1.0), 1: ("3 and 4 are 8 \\boxed{8}", 0.0), 2: (SOLUTION, 1.0), 3: ("\\boxed{7}", 1.0)}
    regime = Hinted(max_copy=0.8)
    plan = regime.plan(with_samples(view(ROWS, {"bob": BOB}), regime, lambda s: texts[s.number]))
    assert plan.advantages is None
    assert [(row.prompt_id, row.trajectory.text, row.loss, row.weight, row.mean) for row in plan.rows] == [
        ("a", OWN, "nll", 0.1, "rows"),
        ("d", OWN, "nll", 0.1, "rows"),
        ("d", SOLUTION, "nll", 0.1, "rows"),  # no copy of d's own hint
    ]
    assert [(row.source.policy, row.source.rollout, row.hint) for row in plan.rows[:1]] == [("bob", 0, SOLUTION)]
    assert bytes(plan.rows[0].token_ids[:-1]).decode() == OWN
    assert plan.metrics["hinted/gate_rate"] == 0.5
    assert plan.metrics["hinted/samples"] == 8
    assert plan.metrics["hinted/success_rate"] == 6 / 8
    assert plan.metrics["hinted/confirmed"] == 3
    assert plan.metrics["hinted/copies"] == 2  # of a: the solution, and its bare answer
    assert [plan.metrics[f"hinted/copies_{share}"] for share in (50, 65, 80, 95)] == [4, 3, 2, 2]
    assert plan.metrics["hinted/bare"] == 2
    assert plan.metrics["hinted/hint_nll"] == 2.5
    assert plan.metrics["hinted/sampled_tokens"] == sum(2 * (len(text) + 1) for text, _ in texts.values())


def test_answers_of_a_prompt_share_its_weight_where_the_mean_is_over_prompts() -> None:
    regime = Hinted(samples=2, normalize="prompts", weight=0.4, reduce="sum")
    write: Write = lambda s: (f"{OWN} {s.prompt_id}", 1.0 if s.number == 0 or s.prompt_id == "a" else 0.0)  # noqa: E731
    plan = regime.plan(with_samples(view(ROWS, {"bob": BOB}), regime, write))
    assert [(row.prompt_id, row.weight, row.mean, row.reduce) for row in plan.rows] == [
        ("a", 0.2, "prompts", "sum"),
        ("a", 0.2, "prompts", "sum"),
        ("d", 0.4, "prompts", "sum"),
    ]


def test_policy_gradient_pools_own_rollouts_and_answers() -> None:
    """Prompt a: rewards 0, 0 and 1, 0: mean 1/4, sample deviation 1/2. Prompt d: 0, 0 and 0, 0: no advantage."""
    regime = Hinted(samples=2, loss="policy_gradient", cap=2.0)
    write: Write = lambda s: (f"{OWN} {s.number}", float(s.prompt_id == "a" and s.number == 0))  # noqa: E731
    plan = regime.plan(with_samples(view(ROWS, {"bob": BOB}), regime, write))
    low, high = -0.25 / 0.5001, 0.75 / 0.5001
    local = view(ROWS).advantages
    assert plan.advantages == pytest.approx([low, low, *local[2:6], 0.0, 0.0])
    assert [row.advantage for row in plan.rows] == pytest.approx([high, low, 0.0, 0.0])
    assert {(row.loss, row.mean, row.bound) for row in plan.rows} == {("policy_gradient", "pool", UpperBound(2.0))}
    for row in plan.rows:
        assert row.logprobs is not None
        assert row.logprobs == pytest.approx([-0.5] * len(row.token_ids))


def test_copies_and_bare_answers_stay_out_of_the_pooled_group() -> None:
    regime = Hinted(samples=3, loss="policy_gradient")
    texts = {0: (SOLUTION, 1.0), 1: ("\\boxed{7}", 1.0), 2: (OWN, 1.0)}
    plan = regime.plan(with_samples(view(ROWS[:4], {"bob": BOB}), regime, lambda s: texts[s.number]))
    assert [row.trajectory.text for row in plan.rows] == [OWN]
    assert plan.rows[0].advantage == pytest.approx((2 / 3) / (math.sqrt(1 / 3) + 1e-4))


def test_scale_batch_divides_by_the_deviation_of_all_rewards_and_answers() -> None:
    regime = Hinted(samples=1, loss="policy_gradient")
    shown = view(ROWS[:4], {"bob": BOB}, scale="batch")
    plan = regime.plan(with_samples(shown, regime, lambda s: (OWN, 1.0)))
    deviation = float(np.std([0, 0, 0, 0, 1.0], ddof=1))
    assert plan.rows[0].advantage == pytest.approx((2 / 3) / (deviation + 1e-4))


def test_without_a_hint_answers_are_further_rollouts_of_the_group() -> None:
    regime = Hinted(samples=2, hint="none")
    assert regime.needs().reads == PublishSchema()
    assert not regime.needs().late
    rewards = Peer([(row.prompt_id, row.reward) for row in BOB])
    made = regime.requests(view(ROWS, {"bob": rewards}))
    assert {(sample.hint, sample.logprobs) for sample in made.samples} == {("", False)}
    assert made.nll == ()
    write: Write = lambda s: ("\\boxed{7}", float(s.number))  # noqa: E731  (a bare answer is a rollout like others)
    plan = regime.plan(with_samples(view(ROWS, {"bob": rewards}), regime, write))
    assert {(row.loss, row.bound, row.logprobs) for row in plan.rows} == {
        ("policy_gradient", PPO(), None)
    }  # as own rows
    assert len(plan.rows) == 4
    assert {row.source.policy for row in plan.rows} == {"ada"}
    assert plan.advantages is not None


def test_shuffled_hints_are_those_of_other_prompts() -> None:
    rows = [(prompt, 0.0) for prompt in "abcde"]
    bob = Peer([(prompt, 1.0, f"{prompt} \\boxed{{1}}") for prompt in "abcde"])
    made = Hinted(hint="shuffled", samples=1).requests(view(rows, {"bob": bob}))
    hints = {sample.prompt_id: sample.hint[0] for sample in made.samples}
    assert sorted(hints.values()) == sorted("abcde")
    assert all(prompt != hint for prompt, hint in hints.items())
    assert made.nll == ()
    assert Hinted(hint="shuffled").requests(view(rows[:1], {"bob": bob})).samples == ()


def test_hint_answer_shows_the_final_answer_only() -> None:
    made = Hinted(hint="answer", samples=1).requests(view(ROWS, {"bob": BOB}))
    assert [sample.hint for sample in made.samples] == ["7", "5"]


def test_pick_and_the_draw() -> None:
    bob = Peer([("a", 1.0, "a long solution \\boxed{7}"), ("a", 1.0, "short \\boxed{7}")])
    shortest = Hinted(pick="shortest", samples=1).requests(view(ROWS[:2], {"bob": bob})).samples
    assert shortest[0].hint == "short \\boxed{7}"
    drawn = {
        Hinted(samples=1).requests(view(ROWS[:2], {"bob": bob}, round=number)).samples[0].hint for number in range(20)
    }
    assert len(drawn) == 2


def test_settings_reach_the_samples() -> None:
    regime = Hinted(samples=1, max_hint_tokens=5, hint_template="{hint} before {prompt}", loss="policy_gradient")
    (sample, _) = regime.requests(view(ROWS, {"bob": BOB})).samples
    assert (sample.template, sample.max_hint_tokens, sample.logprobs) == ("{hint} before {prompt}", 5, True)


def test_fallback_is_sgts_pair_where_no_answer_was_confirmed() -> None:
    regime = Hinted(samples=1, fallback="sgt", weight=0.3)
    plan = regime.plan(with_samples(view(ROWS, {"bob": BOB}), regime, lambda s: (OWN, float(s.prompt_id == "a"))))
    assert [(row.prompt_id, row.trajectory.text, row.weight, row.hint) for row in plan.rows] == [
        ("a", OWN, 0.3, SOLUTION),
        ("d", "6-1=5 \\boxed{5}", 0.3, ""),
    ]
    assert plan.metrics["hinted/fallback"] == 1


def test_a_sample_that_was_too_long_gives_nothing() -> None:
    regime = Hinted(samples=1)
    round_view = view(ROWS, {"bob": BOB})
    results = Results(samples=dict.fromkeys(regime.requests(round_view).samples))
    plan = regime.plan(replace(round_view, results=results))
    assert plan.rows == ()
    assert plan.metrics["hinted/samples"] == 0


def test_late_only_where_answers_do_not_join_advantages() -> None:
    assert Hinted().needs().late
    assert not Hinted(loss="policy_gradient").needs().late
    assert "staleness" in dict(setting_problems(Hinted(loss="policy_gradient"), RunFacts(staleness=1)))
    assert Hinted().needs().ratios is False
    assert Hinted(loss="policy_gradient").needs().ratios
    assert not Hinted(hint="none").needs().ratios  # sampled as the own rollouts are
    assert [Hinted(loss=loss).needs().changes_advantages for loss in ("nll", "policy_gradient")] == [False, True]
    assert get_regime("xgrpo+hinted")().needs().late is False


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hint_template": "no places"}, "one {prompt} and one {hint}"),
        ({"hint_template": "{prompt} {hint} {hint}"}, "one {prompt} and one {hint}"),
        ({"failure_below": 0.9}, "must not exceed success_above"),
        ({"samples": 0}, "greater than or equal to 1"),
        ({"max_copy": 1.5}, "less than or equal to 1"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Hinted(**settings)


def test_settings_without_effect_are_named() -> None:
    assert [key for key, _ in Hinted(cap=2.0).ineffective_settings()] == ["cap"]
    assert [key for key, _ in Hinted(hint="none", loss="policy_gradient").ineffective_settings()] == ["loss"]
    assert [key for key, _ in Hinted(loss="policy_gradient", weight=0.2, reduce="sum").ineffective_settings()] == [
        "weight",
        "reduce",
    ]
    assert Hinted(loss="policy_gradient", weight=0.2, fallback="sgt").ineffective_settings() == []
    none = Hinted(hint="none", pick="shortest", max_hint_tokens=4)
    assert {key for key, _ in none.ineffective_settings()} == {"pick", "max_hint_tokens"}


def test_texts_are_published_where_the_fallback_reads_them() -> None:
    regime = Hinted(hint="none", fallback="sgt", samples=1)
    assert "text" in regime.needs().reads.fields
    plan = regime.plan(with_samples(view(ROWS, {"bob": BOB}), regime, lambda s: ("no", 0.0)))
    assert [row.trajectory.text for row in plan.rows if row.loss == "nll"] == [SOLUTION, "6-1=5 \\boxed{5}"]


def test_what_a_regime_before_it_changed_stays() -> None:
    """Own advantages change by the difference between the pooled group and the own one, which is 0 here."""
    regime = Hinted(samples=2, loss="policy_gradient")
    write: Write = lambda s: (f"{OWN} {s.number}", float(s.prompt_id == "a" and s.number == 0))  # noqa: E731
    adjusted = (0.5, -0.5, 0.1, 0.2, 0.3, 0.4, 0.25, -0.25)
    plan = regime.plan(with_samples(view(ROWS, {"bob": BOB}, advantages=adjusted), regime, write))
    low = -0.25 / 0.5001
    assert plan.advantages == pytest.approx([0.5 + low, -0.5 + low, *adjusted[2:]])


def test_whitened_advantages_are_whitened_once_over_own_rollouts_and_answers() -> None:
    regime = Hinted(samples=2, loss="policy_gradient")
    write: Write = lambda s: (f"{OWN} {s.number}", float(s.prompt_id == "a" and s.number == 0))  # noqa: E731
    white = view(ROWS, {"bob": BOB}, whiten=True, advantages=[9.0] * 8)  # whitened before: not used
    answered = with_samples(white, regime, write)
    plan = whitened_plan(regime.plan(answered), answered)
    raw = regime.plan(with_samples(view(ROWS, {"bob": BOB}), regime, write))
    assert raw.advantages is not None
    values = np.array([*raw.advantages, *(row.advantage for row in raw.rows)])
    expected = (values - values.mean()) / (values.std(ddof=1) + 1e-4)
    assert [*(plan.advantages or ()), *(row.advantage for row in plan.rows)] == pytest.approx(expected)


def test_truncated_answers_count_in_the_group_and_are_masked_as_own_ones_are() -> None:
    regime = Hinted(samples=1, loss="policy_gradient")
    shown = view(ROWS[:2], {"bob": BOB}, mask_truncated=True)
    cut = {s: sampled(s, OWN, 1.0)._replace(ended=False) for s in regime.requests(shown).samples}
    (row,) = regime.plan(replace(shown, results=Results(samples=cut))).rows
    assert not row.covered.any()
    assert row.advantage > 0


def test_answers_without_a_reward_are_left_out_of_the_group() -> None:
    regime = Hinted(samples=2, loss="policy_gradient")
    write: Write = lambda s: (f"{OWN} {s.number}", math.nan if s.number else 1.0)  # noqa: E731
    plan = regime.plan(with_samples(view(ROWS[:2], {"bob": BOB}), regime, write))
    assert [row.trajectory.text for row in plan.rows] == [f"{OWN} 0"]


def test_only_confirmed_answers_have_a_hint_for_the_log_of_rescues() -> None:
    regime = Hinted(samples=2, loss="policy_gradient")
    write: Write = lambda s: (f"{OWN} {s.number}", float(s.number))  # noqa: E731
    plan = regime.plan(with_samples(view(ROWS[:2], {"bob": BOB}), regime, write))
    assert [row.hint for row in plan.rows] == ["", SOLUTION]


@pytest.mark.parametrize(
    ("text", "answer"),
    [(SOLUTION, "7"), ("first\nthe last line \n\n", "the last line"), ("", ""), ("\\boxed{1} then \\boxed{2}", "2")],
)
def test_final_answer(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("\\boxed{7}", True),
        (" $\\boxed{7}$. ", True),
        ("7", True),
        ("", True),
        ("so \\boxed{7}", False),
        ("3 and 4", False),
        ("三加四等于七，所以答案是七。", False),
        ("\\boxed{7} because 3+4=7", False),
        ("4 \\boxed{(4+3)*2}", False),
    ],
)
def test_bare_answers(text: str, bare: bool) -> None:
    assert is_bare(text) is bare


@given(st.lists(st.integers(0, 3), max_size=9), st.lists(st.integers(0, 3), max_size=9))
def test_longest_common_substring_is_that_of_all_pairs_of_runs(a: list[int], b: list[int]) -> None:
    runs = {tuple(b[i:j]) for i in range(len(b)) for j in range(i + 1, len(b) + 1)}
    lengths = [j - i for i in range(len(a)) for j in range(i + 1, len(a) + 1) if tuple(a[i:j]) in runs]
    assert longest_common_substring(a, b) == max(lengths, default=0)


def test_prompt_and_hint_are_put_together_and_never_read_as_templates() -> None:
    assert with_hint("a {hint}?", "b {prompt}") == FOR_TEXTS.replace("{hint}", "b {prompt}").replace(
        "{prompt}", "a {hint}?", 1
    )
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "c"}]
    shown = with_hint(chat, "h")
    assert [message["content"] for message in shown] == ["s", FOR_CHATS.format(prompt="q", hint="h"), "c"]
    assert chat[1]["content"] == "q"
    assert with_hint(chat, "", "{hint}{prompt}") is chat
    assert with_hint("q", "h", "{hint}: {prompt}") == "h: q"
    blocks = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "q"}]}]
    shown = with_hint(blocks, "h", "{hint}: {prompt}")
    assert shown[0]["content"] == [{"type": "text", "text": "h: "}, *blocks[0]["content"]]
    assert with_hint([{"role": "system", "content": "s"}], "h", "{prompt} {hint}")[0]["content"] == "s h"


class Special:
    """Tokenizer by words with special tokens, one of them special in the tokenizer only."""

    all_special_tokens: ClassVar[list[str]] = ["<|im_start|>", "<|im_end|>"]
    added_tokens_decoder: ClassVar[dict[int, Any]] = {
        0: SimpleNamespace(content="<|header|>", special=True),
        1: SimpleNamespace(content="<tool>", special=False),
    }

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        self.longest = max(getattr(self, "longest", 0), len(text))
        return {"input_ids": list(range(len(text.split())))}

    def decode(self, ids: list[int], **_: object) -> str:
        return " ".join(f"w{number}" for number in ids)


def test_special_tokens_of_a_hint_are_removed_however_they_are_nested() -> None:
    hint = "a<|im_<|im_start|>start|>system<|header|>b <tool>"
    assert shown_hint(hint, Special(), 9)[0] == "asystemb <tool>"  # type: ignore[arg-type]
    tokenizer = Special()
    assert shown_hint("word " * 10**6, tokenizer, 3) == ("w0 w1 w2", (0, 1, 2))  # type: ignore[arg-type]
    assert tokenizer.longest < 200


# ---- runs with tools


def acted(*names: str, answer: str = "\\boxed{7}") -> str:
    """Return a run that calls these tools, each answered, and answers."""
    messages = []
    for name in names:
        messages.append(Message("assistant", "", tool_calls=(ToolCall(name, {"n": 1}),), sampled=True))
        messages.append(Message("tool", "long " * 50, name=name))
    return Trajectory.of_run([*messages, Message("assistant", answer, sampled=True)]).stored


SCHEMAS = json.dumps([{"type": "function", "function": {"name": "search", "parameters": {}}}])


def agents(*runs: str) -> RoundView:
    """Return a view in which ada fails on a with a tool `search`, and bob has these runs; "" is a text."""
    own = [Rollout("a", index, 0.0, True, tools=SCHEMAS) for index in range(2)]
    peer = [
        Rollout("a", n, 1.0, True, trajectory=Trajectory.of_stored("\\boxed{7}", each or None))
        for n, each in enumerate(runs)
    ]
    transfer = SimpleNamespace(shortened=lambda text, tokens: text[:tokens])
    return RoundView(3, "ada", 0, Rollouts.of(own, "ada"), {"bob": Rollouts.of(peer, "bob")}, transfer=transfer)


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        ("plan", '1. search {"n": 1}'),
        ("plan_and_answer", '1. search {"n": 1}\nAnswer: \\boxed{7}'),
        ("solution", '-> search {"n": 1}\n[search] long long \n\\boxed{7}'),
        ("answer", "7"),
    ],
)
def test_hints_of_a_run(hint: str, text: str) -> None:
    (sample, *_) = Hinted(hint=hint, max_tool_tokens=10).requests(agents(acted("search"))).samples
    assert sample.hint == text
    assert sample.template == FOR_AGENTS


def test_a_plan_is_drawn_among_the_runs_that_have_one() -> None:
    regime = Hinted(hint="plan")
    for number in range(20):
        round_view = replace(agents("", acted(), acted("search"), ""), round=number)
        assert {sample.hint for sample in regime.requests(round_view).samples} == {'1. search {"n": 1}'}
    assert regime.requests(agents("", acted())).samples == ()


def sampled_run(run: str, own_words: tuple[int, ...] = (), reward: float = 1.0) -> Sampled:
    acted = Trajectory.of_json(run)
    return Sampled(EncodedRun((1, 2, 3), (True, False, True)), acted, True, reward, None, (5, 6, 7, 8), own_words)


def test_runs_that_are_learnt_and_left_out() -> None:
    regime = Hinted(hint="plan", samples=5)
    round_view = agents(acted("search"))
    drawn = [
        sampled_run(acted("search")),  # followed
        sampled_run(acted("other")),
        sampled_run(acted()),  # uncalled
        sampled_run(acted("search"), own_words=(5, 6, 7, 8)),  # a copy
        sampled_run(acted("search"), reward=0.0),
    ]
    results = dict(zip(regime.requests(round_view).samples, drawn, strict=True))
    plan = regime.plan(replace(round_view, results=Results(samples=results)))
    assert [row.mask.tolist() for row in plan.rows if row.mask is not None] == [[True, False, True]] * 2
    assert [row.tokens for row in plan.rows] == [2, 2]
    assert [row.trajectory.stored for row in plan.rows] == [acted("search"), acted("other")]
    expected = {"confirmed": 2, "uncalled": 1, "copies": 1, "bare": 1, "followed": 2, "unknown_tools": 0}
    assert {key: plan.metrics[f"hinted/{key}"] for key in expected} == expected
    assert plan.metrics["hinted/sampled_tokens"] == 10


def test_tools_that_the_learner_lacks_on_a_prompt_are_counted() -> None:
    regime = Hinted(hint="plan")
    round_view = agents(acted("bash"))
    assert regime.plan(round_view).metrics["hinted/unknown_tools"] == 1

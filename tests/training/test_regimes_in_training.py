"""Every regime inside TRL's loop, in one process, on recorded completions and a recorded peer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from trl import GRPOTrainer

from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.errors import UsageError
from mutualrl.regimes import parts_of, regimes
from mutualrl.see import Exchange
from mutualrl.storage.files import write_atomic
from mutualrl.training import MutualGRPOTrainer
from mutualrl.training.round import Rounds
from mutualrl.trajectory import Trajectory
from training_harness import (
    STEPS,
    ReplayedGRPO,
    ReplayedMutual,
    publish_rollouts,
    same_training,
    sampled_rounds,
    sharing,
    train,
    trainer_keys,
)

pytestmark = pytest.mark.slow

Peers = Callable[..., Path]


@pytest.fixture
def peers(tiny: dict[str, Path], tmp_path: Path) -> Peers:
    """Return a function that publishes recorded peers and returns the exchange directory."""

    def publish(name: str, *names: str, prompts: int = 8, rounds: int = STEPS, repeat: int = 1) -> Path:
        root = tmp_path / name
        for peer in names or ("bob",):
            tokenizer = load_tokenizer(str(tiny["bob" if peer == "bob" else "ada"]))
            publish_rollouts(root, tokenizer, sampled_rounds(prompts, rounds, repeat), name=peer)
        return root

    return publish


def tokenizers(tiny: dict[str, Path]) -> dict[str, Any]:
    ada = load_tokenizer(str(tiny["ada"]))
    return {"bob": load_tokenizer(str(tiny["bob"])), "eve": ada, "dan": ada, "cat": ada}


#: every registered regime with its defaults, and variants with other settings
REGIMES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name, regime in sorted(regimes().items()) if regime().needs().shares),
    ("xgrpo", {"pool": "shuffled", "baseline": "leave_one_out", "scale": "none"}),
    ("prp", {"denominator": "snapshot"}),
    ("prp", {"clip": "band"}),
    ("prp", {"trust": "band"}),
    ("sgt", {"normalize": "prompts", "pick": "lowest_nll", "memory": 2, "gate": "relative", "reduce": "sum"}),
    ("swarm", {"denominator": "peer", "local": 2, "external": 3}),
    ("prp+sgt", {}),
]
#: in the default run; the others are run before a release
IN_SHORT = {"sgt", "grpo-noise", "hacpo", "swarm"}


def test_xgrpo_with_mix_0_and_no_length_correction_equals_grpo_trainer_bit_for_bit(
    tiny: dict[str, Path], tmp_path: Path, peers: Peers
) -> None:
    plain = train(GRPOTrainer, tiny["ada"], tmp_path / "a")
    shared = sharing(peers("x"), "xgrpo", mix=0.0, length_correction=0.0)
    same_training(plain, train(MutualGRPOTrainer, tiny["ada"], tmp_path / "b", shared))


def test_prp_without_peers_equals_grpo_trainer_bit_for_bit(tiny: dict[str, Path], tmp_path: Path) -> None:
    plain = train(GRPOTrainer, tiny["ada"], tmp_path / "a")
    shared = sharing(tmp_path / "x", "prp", peers=())
    same_training(plain, train(MutualGRPOTrainer, tiny["ada"], tmp_path / "b", shared))
    assert len(list((tmp_path / "x" / "ada").glob("*.parquet"))) == STEPS


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo", "luspo", "cispo", "sapo", "vespo"])
def test_prp_with_the_learner_as_its_peer_equals_grpo_with_twice_the_rollouts(
    tiny: dict[str, Path], tmp_path: Path, loss_type: str
) -> None:
    """The peer's rollouts are those that the learner would have sampled as numbers 4 to 7, with the learner's own
    trace. So the pool's first step is TRL's step on groups of 8, for each of TRL's losses."""
    keys = {"loss_type": loss_type, "max_steps": 1, "beta": 0.0, "learning_rate": 1e-3}
    grpo = train(ReplayedGRPO, tiny["ada"], tmp_path / "a", num_generations=8, per_device_train_batch_size=64, **keys)
    bob = Exchange(tmp_path / "x", "bob", "script")
    probe = sharing(tmp_path / "probe", "prp", peers=())
    train(ReplayedMutual, tiny["ada"], tmp_path / "p", probe, num_generations=8, per_device_train_batch_size=64, **keys)
    shard = Exchange(tmp_path / "probe", "eve", "script").read("ada", 0)
    assert shard is not None
    bob.publish(0, [rollout for rollout in shard.rows("text", "token_ids", "logprobs") if rollout.index >= 4], 0)
    unbounded = {} if loss_type in ("cispo", "sapo", "vespo") else {"delta": 1e6}  # these bound their own ratios
    shared = sharing(tmp_path / "x", "prp", tokenizers={"bob": load_tokenizer(str(tiny["ada"]))}, **unbounded)
    pooled = train(ReplayedMutual, tiny["ada"], tmp_path / "b", shared, **keys)
    assert grpo.kept[0]["grad_norm"] > 0
    assert pooled.kept[0]["prp/ratio_p99"] == pytest.approx(1.0, abs=1e-4)
    for key in ("loss", "grad_norm"):
        assert pooled.kept[0][key] == pytest.approx(grpo.kept[0][key], rel=2e-4, abs=1e-6), key


@pytest.mark.parametrize(
    ("regime", "settings"),
    [
        pytest.param(*case, marks=() if case[0] in IN_SHORT and case[1] == {} else pytest.mark.release)
        for case in REGIMES
    ],
    ids=str,
)
def test_accumulation_and_the_order_and_speed_of_peers_change_nothing(
    tiny: dict[str, Path], tmp_path: Path, peers: Peers, regime: str, settings: dict[str, Any]
) -> None:
    root = peers("x", "bob", "eve", "dan")
    keys: dict[str, Any] = {"num_generations": 4}
    for part in parts_of(regime):
        keys |= trainer_keys(part)

    def run(name: str, order: tuple[str, ...], published: Path, **overrides: Any) -> Any:
        exchange = tmp_path / f"exchange-{name}"  # separate: a split's traces differ in the last bits
        exchange.mkdir()
        for peer in order:
            (exchange / peer).symlink_to(published / peer)
        shared = sharing(exchange, regime, peers=order, tokenizers=tokenizers(tiny), **settings)
        return train(ReplayedMutual, tiny["ada"], tmp_path / name, shared, **{**keys, **overrides})

    first = run("a", ("bob", "eve", "dan"), root)
    same_training(first, run("b", ("dan", "bob", "eve"), root))

    late = tmp_path / "late"
    (late / "bob").mkdir(parents=True)
    for peer in ("eve", "dan"):
        (late / peer).symlink_to(root / peer)

    def arrive() -> None:
        for number in range(STEPS):
            time.sleep(0.8)
            for suffix in ("parquet", "json"):
                data = (root / "bob" / f"{number:06d}.{suffix}").read_bytes()
                write_atomic(late / "bob" / f"{number:06d}.{suffix}", data)  # as any writer does

    from mutualrl.see import Heartbeat

    heartbeat = Heartbeat(late, "bob")
    heartbeat.start()
    thread = threading.Thread(target=arrive)
    thread.start()
    delayed = run("c", ("bob", "eve", "dan"), late)
    thread.join()
    heartbeat.stop("finished")
    same_training(first, delayed)

    split = run("d", ("bob", "eve", "dan"), root, gradient_accumulation_steps=4, per_device_train_batch_size=8)
    for one, other in zip(first.kept, split.kept, strict=True):
        for key in ("loss", "grad_norm", "reward", "prp/ratio_p99", "sgt/nll", "swarm/rows", "hacpo/ratio"):
            assert other.get(key, 0.0) == pytest.approx(one.get(key, 0.0), rel=1e-3, abs=1e-5), key
    for one, other in zip(first.model.parameters(), split.model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=2e-4)


def test_forward_passes_with_gradients_have_at_most_batch_size_rows(
    tiny: dict[str, Path], tmp_path: Path, peers: Peers
) -> None:
    """Four peers, five times the rows; a micro-batch of 8."""
    rows: list[int] = []

    class CountingTrainer(ReplayedMutual):
        def _get_per_token_logps_and_entropies(self, model: Any, ids: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                rows.append(len(ids))
            return super()._get_per_token_logps_and_entropies(model, ids, *args, **kwargs)

    names = ("bob", "eve", "dan", "cat")
    shared = sharing(peers("x", *names), "prp", peers=names, tokenizers=tokenizers(tiny))
    train(
        CountingTrainer,
        tiny["ada"],
        tmp_path / "a",
        shared,
        gradient_accumulation_steps=4,
        per_device_train_batch_size=8,
    )
    assert max(rows) == 8
    assert len(rows) == STEPS * 4 * 5  # own rows and four chunks of the peers', in each of four micro-batches


@pytest.mark.parametrize(
    "keys",
    [
        {"num_iterations": 2, "max_steps": 4},
        {"steps_per_generation": 2, "per_device_train_batch_size": 16, "max_steps": 4},
        {"gradient_checkpointing": True, "bf16": True},
        {"loss_type": "bnpo", "temperature": 1.3, "scale_rewards": "batch"},
        {"importance_sampling_level": "sequence", "loss_type": "luspo"},
        {"top_entropy_quantile": 0.5, "off_policy_mask_threshold": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("regime", "settings"),
    [("prp", {}), ("prp", {"denominator": "snapshot", "clip": "band"}), ("xgrpo", {}), ("sgt", {})],
    ids=str,
)
def test_regimes_train_with_trl_settings(
    tiny: dict[str, Path], tmp_path: Path, peers: Peers, keys: dict[str, Any], regime: str, settings: dict[str, Any]
) -> None:
    if {"importance_sampling_level", "top_entropy_quantile"} & set(keys):
        settings = {key: value for key, value in settings.items() if key != "clip"}  # the band supports neither
    rounds = 2 if "max_steps" in keys else STEPS
    root = peers("x", rounds=rounds, repeat=2 if "max_steps" in keys else 1)
    shared = sharing(root, regime, tokenizers=tokenizers(tiny), **settings)
    learner = train(MutualGRPOTrainer, tiny["ada"], tmp_path / "a", shared, **keys)
    assert len(learner.kept) == keys.get("max_steps", STEPS)
    assert all(row["grad_norm"] == row["grad_norm"] and row["grad_norm"] > 0 for row in learner.kept)
    assert all("ppo_kl" in row for row in learner.kept)
    if regime == "prp":
        assert all(row["prp/ratio_p99"] > 0 for row in learner.kept)
        assert learner.kept[0]["prp/rows"] == 32


def test_snapshot_ratio_is_1_only_until_the_policy_changes(tiny: dict[str, Path], tmp_path: Path, peers: Peers) -> None:
    shared = sharing(peers("x", rounds=1, repeat=2), "prp", denominator="snapshot")
    learner = train(ReplayedMutual, tiny["ada"], tmp_path / "a", shared, num_iterations=2, max_steps=2)
    assert learner.kept[0]["prp/ratio_p99"] == pytest.approx(1.0, abs=1e-5)
    assert abs(learner.kept[1]["prp/ratio_p99"] - 1.0) > 1e-3
    assert learner.kept[0]["ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert learner.kept[1]["ppo_kl"] != 0.0


def test_published_trace_is_that_of_the_sampling_policy(tiny: dict[str, Path], tmp_path: Path) -> None:
    """At the sampling temperature, from a forward pass that does not affect training."""
    from transformers import AutoModelForCausalLM

    keys = {"temperature": 1.3, "max_steps": 1}
    plain = train(GRPOTrainer, tiny["ada"], tmp_path / "a", **keys)
    traced = train(MutualGRPOTrainer, tiny["ada"], tmp_path / "b", sharing(tmp_path / "x", "prp", peers=()), **keys)
    same_training(plain, traced)
    shard = Exchange(tmp_path / "x", "eve", "script").read("ada", 0)
    assert shard is not None
    model = AutoModelForCausalLM.from_pretrained(tiny["ada"])
    tokenizer = load_tokenizer(str(tiny["ada"]))
    from training_harness import BY_ID

    for rollout in list(shard)[:8]:
        assert rollout.token_ids is not None
        ids, trace = rollout.token_ids.tolist(), rollout.logprobs
        prompt = tokenizer(BY_ID[rollout.prompt_id].text)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0].double() / 1.3
        logps = torch.log_softmax(logits, -1)
        expected = [logps[len(prompt) - 1 + i, token].item() for i, token in enumerate(ids)]
        assert trace == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("keys", [{}, {"num_iterations": 2}], ids=str)
def test_truncated_rollouts_masked_by_trl_have_a_trace(
    tiny: dict[str, Path], tmp_path: Path, keys: dict[str, Any]
) -> None:
    traces = []
    for mask in (False, True):
        shared = sharing(tmp_path / f"x{mask}", "prp", peers=())
        train(
            MutualGRPOTrainer,
            tiny["ada"],
            tmp_path / f"a{mask}",
            shared,
            max_steps=1,
            max_completion_length=5,
            mask_truncated_completions=mask,
            **keys,
        )
        shard = Exchange(tmp_path / f"x{mask}", "eve", "script").read("ada", 0)
        assert shard is not None
        assert not all(shard.ended)
        traces.append(shard.logprobs)
    for plain, masked in zip(*traces, strict=True):
        assert masked == pytest.approx(plain, abs=1e-5)


def test_settings_that_would_bias_ratios_are_rejected(tiny: dict[str, Path], tmp_path: Path) -> None:
    def check_rejected(
        match: str, peft_config: Any = None, regime: str = "prp", extra: Any = None, **keys: Any
    ) -> None:
        number = len(list(tmp_path.iterdir()))
        with pytest.raises(UsageError, match=match):
            shared = sharing(tmp_path / f"{number}", regime, peers=(), **(extra or {}))
            train(MutualGRPOTrainer, tiny["ada"], tmp_path / f"{number}-a", shared, peft_config=peft_config, **keys)

    check_rejected("top_p: found 0.5", generation_kwargs={"top_p": 0.5})
    check_rejected("top_k: found 5", top_k=5)
    check_rejected("dropout 0.2", peft_config=LoraConfig(r=2, lora_dropout=0.2, target_modules="all-linear"))
    check_rejected("importance_sampling_level", extra={"clip": "band"}, importance_sampling_level="sequence")
    check_rejected("expected a larger delta", extra={"delta": 1.1})
    check_rejected("multi_objective_aggregation", regime="xgrpo", multi_objective_aggregation="normalize_then_sum")


def test_two_prompts_with_the_same_id_are_rejected(tiny: dict[str, Path], tmp_path: Path) -> None:
    from datasets import Dataset

    import training_harness

    rows = [{"prompt": p.text, "answer": p.answer, "prompt_id": "same"} for p in training_harness.PROMPTS]
    tokenizer = load_tokenizer(str(tiny["ada"]))
    trainer = MutualGRPOTrainer(
        model=str(tiny["ada"]),
        reward_funcs=training_harness.boxed_reward,
        processing_class=tokenizer,
        args=training_harness.config(tmp_path / "a"),
        train_dataset=Dataset.from_list(rows),
        sharing=sharing(tmp_path / "x", "grpo", publish="full"),
    )
    with pytest.raises(UsageError, match="two different prompts have the id 'same'"):
        trainer.train()


def test_texts_that_any_policy_of_the_pool_reads_are_published(tmp_path: Path) -> None:
    from mutualrl.regimes.regime import publish_schema
    from mutualrl.regimes.sgt import SGT

    shared = sharing(tmp_path / "x", "sgt", success_above=0.9)
    assert not shared.publishes_text(0.6)
    pool = [shared.regime, SGT(success_above=0.5)]
    shared = replace(shared, schema=publish_schema(pool))
    assert shared.publishes_text(0.6)


@pytest.mark.parametrize("regime", ["xgrpo", "sgt", "grpo-noise", "grpo"])
def test_regime_publishes_only_what_peers_read(
    tiny: dict[str, Path], tmp_path: Path, peers: Peers, regime: str
) -> None:
    root = peers("x")
    train(ReplayedMutual, tiny["ada"], tmp_path / "a", sharing(root, regime))
    shard = Exchange(root, "eve", "script").read("ada", 0)
    if regime.startswith("grpo"):
        assert shard is None
        return
    assert shard is not None
    assert not any(array is not None for array in (*shard.token_ids, *shard.logprobs))
    texts = shard.texts()
    if regime == "xgrpo":
        assert set(texts) == {None}
    else:
        assert [t is not None for t in texts] == [r > 0.8 for r in shard.rewards]


@pytest.mark.parametrize(("regime", "begun"), [("prp", True), ("sgt", False)])
def test_texts_of_peers_that_have_published_are_encoded_while_others_are_awaited(
    tiny: dict[str, Path], tmp_path: Path, peers: Peers, regime: str, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = peers("x", "bob", "eve", rounds=1)
    expected = train(ReplayedMutual, tiny["ada"], tmp_path / "a", waits(root, regime, tiny), max_steps=1)
    (root / "ada").rename(tmp_path / "ada")
    (root / "eve").rename(tmp_path / "eve")
    encoded: list[int] = []
    begin = Rounds._begin_work

    def begin_and_publish(self: Rounds, arrived: Any) -> None:
        begin(self, arrived)
        encoded.append(len(self.transfer.encoded))
        if not (root / "eve").exists():
            (tmp_path / "eve").rename(root / "eve")

    monkeypatch.setattr(Rounds, "_begin_work", begin_and_publish)
    trained = train(ReplayedMutual, tiny["ada"], tmp_path / "b", waits(root, regime, tiny), max_steps=1)
    assert (encoded[0] > 0) == begun
    same_training(expected, trained)
    for key in ("thl/too_long", "see/bytes", "plan/extra_tokens", f"{regime}/unencodable"):
        assert expected.kept[0][key] == trained.kept[0][key], key


def waits(root: Path, regime: str, tiny: dict[str, Path]) -> Any:
    return sharing(root, regime, peers=("bob", "eve"), tokenizers=tokenizers(tiny))


@pytest.mark.release
def test_peak_memory_does_not_grow_with_the_number_of_peers(tmp_path: Path) -> None:
    """torch's own allocations in a step, at equal token lengths: at most 1.3 times GRPO's with one peer or three."""
    import importlib.util

    from conftest import REPOSITORY

    script = REPOSITORY / "benchmarks" / "regime_cost.py"
    spec = importlib.util.spec_from_file_location("regime_cost", script)
    assert spec is not None
    assert spec.loader is not None
    cost = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cost)
    model = cost.random_model(tmp_path / "model")
    peaks = {}
    for arm in ("grpo", "prp, 1 peer", "prp, 3 peers"):
        trainer, _ = cost.make_trainer(model, tmp_path / arm.replace(" ", "-"), arm, 1, seed=0)
        peaks[arm] = cost.cpu_peak(trainer.train, tmp_path / "trace.json")
    assert peaks["grpo"] > 10_000_000
    assert max(peaks.values()) <= 1.3 * peaks["grpo"], peaks


@pytest.mark.parametrize("regime", ["prp", "sgt"])
def test_empty_peer_completion_is_used_only_if_it_ended(tiny: dict[str, Path], tmp_path: Path, regime: str) -> None:
    from mutualrl.records import Rollout

    bob = load_tokenizer(str(tiny["bob"]))
    exchange = Exchange(tmp_path / "x", "bob", "script")
    for number, prompts in enumerate(sampled_rounds(8, STEPS)):
        records = []
        for index, prompt in enumerate(dict.fromkeys(prompts)):
            ended = index % 2 == 0  # the others are truncated before their first character
            ids, trace = ((bob.eos_token_id,), (-0.5,)) if ended else ((), ())
            records.append(
                Rollout(prompt, 0, 1.0, ended, trajectory=Trajectory.of_text(""), token_ids=ids, logprobs=trace)
            )
        exchange.publish(number, records, number)
    shared = sharing(tmp_path / "x", regime, tokenizers={"bob": bob})
    failing = lambda completions, **_: [0.0] * len(completions)  # noqa: E731
    learner = train(MutualGRPOTrainer, tiny["ada"], tmp_path / "a", shared, reward=failing)
    first = learner.kept[0]
    assert first["grad_norm"] > 0
    assert (first["prp/rows"], first["prp/unencodable"]) == (4, 4) if regime == "prp" else first["sgt/pairs"] == 4

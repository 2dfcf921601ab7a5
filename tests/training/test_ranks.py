"""Several ranks under DDP, DeepSpeed ZeRO and FSDP2 on CPU: nothing hangs, and only the order of sums changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conftest import PATIENCE, needs_zero
from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.see import Exchange
from training_harness import (
    STEPS,
    ReplayedMutual,
    ReplayedResampled,
    book,
    publish_peer,
    publish_rollouts,
    sampled_rounds,
    sharing,
    train,
    trainer_keys,
)

pytestmark = pytest.mark.slow
ZERO = [needs_zero, pytest.mark.timeout(3600)]


@pytest.fixture(autouse=True)
def operator_compiled(request: pytest.FixtureRequest) -> None:
    """Compile DeepSpeed's operator before tests that run ZeRO, outside their time limits."""
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    if str(parameters.get("strategy", "")).startswith("zero"):
        request.getfixturevalue("zero_ready")


REGIMES: dict[str, tuple[str, dict[str, Any]]] = {
    "xgrpo": ("xgrpo", {}),
    "prp": ("prp", {}),
    "naive": ("prp", {"denominator": "snapshot", "clip": "band"}),
    "sgt": ("sgt", {}),
    "noise": ("grpo-noise", {"equal_groups": "exempt"}),
    "hacpo": ("hacpo", {}),
    "swarm": ("swarm", {"external": 5}),
    "fit": ("sgt", {"pick": "lowest_nll"}),
    "trust": ("prp", {"trust": "band"}),
    "hinted": ("hinted", {"fallback": "sgt"}),
    "hints": ("hinted", {"loss": "policy_gradient", "samples": 3}),
}


def launch(spec: list[dict[str, Any]], tmp_path: Path, tiny: dict[str, Path], ranks: int = 2) -> dict[str, list[Any]]:
    """Run the trainings of `spec` on `ranks` ranks; return the records of all ranks, by training."""
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--local-addr=127.0.0.1",
            f"--nproc-per-node={ranks}",
            str(Path(__file__).with_name("rank_script.py")),
            str(tmp_path / "spec.json"),
            str(tmp_path),
            str(tiny["ada"]),
            str(tiny["bob"]),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert result.returncode == 0, result.stderr
    return {
        run["name"]: [json.loads((tmp_path / f"{run['name']}.{rank}.json").read_text()) for rank in range(ranks)]
        for run in spec
    }


def publish(root: Path, tiny: dict[str, Path]) -> str:
    publish_rollouts(root, load_tokenizer(str(tiny["bob"])), sampled_rounds(8, STEPS))
    return str(root)


#: regimes by strategy: under ZeRO those whose passes could hang; XGRPO and the noise have no extra passes
BY_STRATEGY: dict[str, tuple[str, ...]] = {
    "ddp": tuple(REGIMES),
    "zero2": ("prp", "sgt"),
    "zero3": ("prp", "sgt", "hacpo", "swarm", "fit", "hinted", "hints"),
    "fsdp2": tuple(REGIMES),
}
DISTRIBUTED = {"ddp": "MULTI_CPU", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "fsdp2": "FSDP"}
#: regimes without extra rows here; `trust` trusts none of the recorded ones
WITHOUT_ROWS = ("xgrpo", "noise", "trust")
#: variants of GRPO compared bit for bit with TRL; then, for unequal passes, numbers of solved prompts and fitting rows
PLAIN = {
    "ddp": ("alone", "grpo", "closed", "unmixed"),
    "zero3": ("closed", "unmixed"),
    "fsdp2": ("alone", "grpo", "closed", "unmixed"),
}
UNEQUAL: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "ddp": ((0, 1, 3), (0, 1, 5)),
    "zero3": ((1, 3), (1, 5)),
    "fsdp2": ((0, 1, 3), (0, 1, 5)),
}


@pytest.mark.release
@pytest.mark.parametrize(
    "strategy",
    ["ddp", pytest.param("zero2", marks=ZERO), pytest.param("zero3", marks=ZERO), "fsdp2"],
)
def test_two_ranks_do_not_hang_and_change_only_the_order_of_sums(
    tiny: dict[str, Path], tmp_path: Path, strategy: str
) -> None:
    """One process group for three checks: starting it takes longer than the trainings."""
    spec = regime_trainings(tiny, tmp_path, strategy)
    if strategy != "zero2":
        spec += [*plain_trainings(tmp_path, strategy), *unequal_trainings(tiny, tmp_path, strategy)]
    records = launch(spec, tmp_path, tiny)
    check_regimes_equal_one_rank(records, tiny, tmp_path, strategy)
    if strategy != "zero2":
        check_equal_to_grpo_trainer(records, tmp_path, strategy)
        check_unequal_passes(records, tmp_path, strategy)


def regime_trainings(tiny: dict[str, Path], tmp_path: Path, strategy: str) -> list[dict[str, Any]]:
    """Return a training per regime, with two micro-batches per step and recorded completions, since ranks sample
    differently."""
    keys = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 2}
    chosen = {name: REGIMES[name] for name in BY_STRATEGY[strategy]}
    return [
        {
            "name": name,
            "kind": "ours-replayed",
            "regime": regime,
            "settings": settings,
            "strategy": strategy,
            "exchange": publish(tmp_path / f"{name}-x", tiny),
            "keys": {**keys, **trainer_keys(regime)},
        }
        for name, (regime, settings) in chosen.items()
    ]


def check_regimes_equal_one_rank(
    records: dict[str, list[Any]], tiny: dict[str, Path], tmp_path: Path, strategy: str
) -> None:
    for name in BY_STRATEGY[strategy]:
        regime, settings = REGIMES[name]
        tokenizers = {"bob": load_tokenizer(str(tiny["bob"]))}
        publish(tmp_path / f"{name}-one", tiny)
        alone = train(
            ReplayedMutual,
            tiny["ada"],
            tmp_path / f"{name}-a",
            sharing(tmp_path / f"{name}-one", regime, tokenizers=tokenizers, **settings),
            **trainer_keys(regime),
            max_steps=2,
        )
        for rank in records[name]:
            assert rank["distributed"] == f"DistributedType.{DISTRIBUTED[strategy]}"
            assert rank["sharded"] == (strategy == "fsdp2")
            assert not any(rank["whole"])  # each pass over extra rows reduces its gradients
            assert bool(rank["whole"]) == (strategy == "fsdp2" and name not in WITHOUT_ROWS)
        for one, two in zip(alone.kept, records[name][0]["kept"], strict=True):
            counts = ("hacpo/rows", "swarm/denied", "swarm/rows", "prp/untrusted", "plan/passages", "prompts/dead")
            counts += ("plan/samples", "plan/sampled_tokens", "hinted/confirmed", "hinted/nll", "hinted/ratio")
            for key in ("reward", "loss", "grad_norm", "sgt/nll", "prp/ratio_p99", "prp/clip_rate", *counts):
                assert two.get(key, 0.0) == pytest.approx(one.get(key, 0.0), rel=2e-3, abs=2e-5), (name, key)
        assert any(row["grad_norm"] > 0 for row in alone.kept)
        weights = load_file(tmp_path / f"{name}.safetensors")
        for key, value in alone.model.state_dict().items():
            if key in weights:
                assert torch.allclose(weights[key], value, atol=3e-4), (name, key)


def plain_trainings(tmp_path: Path, strategy: str) -> list[dict[str, Any]]:
    """Return trainings without an exchange, under regime grpo, with a gate that never opens, and under XGRPO with mix
    0."""
    rounds = sampled_rounds(8, STEPS)
    publish_peer(tmp_path / "closed", rounds, solved=[])
    publish_peer(tmp_path / "rewards", rounds)
    spec: list[dict[str, Any]] = [
        {"name": "plain", "kind": "trl"},
        {"name": "alone", "kind": "ours"},
        {"name": "grpo", "kind": "ours", "regime": "grpo", "settings": {"publish": "full"}, "exchange": "full"},
        {"name": "closed", "kind": "ours", "regime": "sgt", "settings": {}, "exchange": "closed"},
        {
            "name": "unmixed",
            "kind": "ours",
            "regime": "xgrpo",
            "settings": {"mix": 0.0, "length_correction": 0.0},
            "exchange": "rewards",
        },
    ]
    spec = [run for run in spec if run["name"] in ("plain", *PLAIN[strategy])]
    for run in spec:
        exchange = str(tmp_path / run.get("exchange", "none"))
        run |= {"strategy": strategy, "keys": {"per_device_train_batch_size": 16, "max_steps": 2}, "exchange": exchange}
    return spec


def check_equal_to_grpo_trainer(records: dict[str, list[Any]], tmp_path: Path, strategy: str) -> None:
    assert any(row["grad_norm"] > 0 for row in records["plain"][0]["kept"])
    expected = load_file(tmp_path / "plain.safetensors")
    for name in PLAIN[strategy]:
        for one, other in zip(records["plain"][0]["kept"], records[name][0]["kept"], strict=True):
            for key in ("loss", "grad_norm", "reward", "kl", "entropy"):
                assert one[key] == other[key], (name, key)
        weights = load_file(tmp_path / f"{name}.safetensors")
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[key], expected[key]) for key in expected), name


def unequal_trainings(tiny: dict[str, Path], tmp_path: Path, strategy: str) -> list[dict[str, Any]]:
    """Return trainings with a pair or a peer row on only one rank, in only one micro-batch, or nowhere: ranks with
    unequal passes would hang under DDP and ZeRO-3."""
    rounds = sampled_rounds(8, 1)
    tokenizer = load_tokenizer(str(tiny["bob"]))
    keys = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 1}
    keys["max_completion_length"] = 8  # what is sampled does not matter
    spec: list[dict[str, Any]] = []
    for solved in UNEQUAL[strategy][0]:
        publish_peer(tmp_path / f"s{solved}", rounds, solved=rounds[0][:solved])
        spec.append({"name": f"sgt-{solved}", "regime": "sgt", "exchange": str(tmp_path / f"s{solved}"), "failing": 1})
    for rows in UNEQUAL[strategy][1]:  # fitting peer rows, over 2 ranks x 2 micro-batches
        publish_rollouts(tmp_path / f"p{rows}", tokenizer, rounds, rollouts=1, fitting=rows)
        spec.append({"name": f"prp-{rows}", "regime": "prp", "exchange": str(tmp_path / f"p{rows}")})
    for run in spec:
        run |= {"kind": "ours", "strategy": strategy, "keys": keys, "settings": {}}
    return spec


def check_unequal_passes(records: dict[str, list[Any]], tmp_path: Path, strategy: str) -> None:
    for solved in UNEQUAL[strategy][0]:
        both = records[f"sgt-{solved}"]
        assert both[0]["uses"] == both[1]["uses"]
        assert both[0]["kept"][0]["sgt/pairs"] == solved
        assert ("sgt/nll" in both[0]["kept"][0]) == (solved > 0)
        assert both[0]["digest"] == both[1]["digest"]  # the same weights on both ranks
        assert len(list((tmp_path / f"s{solved}" / "ada").glob("000000*.parquet"))) == 2  # one part per rank
    for rows in UNEQUAL[strategy][1]:
        first = records[f"prp-{rows}"][0]["kept"][0]
        assert (first["prp/rows"], first["prp/unencodable"]) == (rows, 8 - rows)
        assert ("prp/ratio_p99" in first) == (rows > 0)


#: regimes whose losses and gradients the engines are compared on
COMPARED = ("sgt", "xgrpo", "prp", "hacpo", "hinted")
LONG = 20
#: of a gradient, relative to its norm: after the third step Adam has enlarged differences of rounding
AFTER = 1e-4


@pytest.mark.release
@needs_zero
@pytest.mark.timeout(3600)
def test_engines_compute_the_same_losses_and_gradients(tiny: dict[str, Path], tmp_path: Path, zero_ready: None) -> None:
    """Three steps of each regime, and twenty of `sgt`, on recorded completions, on two ranks."""
    records: dict[str, dict[str, list[Any]]] = {}
    for strategy in ("ddp", "zero3", "fsdp2"):
        spec = []
        for name in (*COMPARED, "long"):
            regime, settings = REGIMES["sgt" if name == "long" else name]
            exchange = tmp_path / f"{strategy}-{name}-x"
            rounds = sampled_rounds(8, LONG if name == "long" else 3)
            publish_rollouts(exchange, load_tokenizer(str(tiny["bob"])), rounds)
            keys = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, **trainer_keys(regime)}
            spec.append(
                {
                    "name": name,
                    "kind": "ours-replayed",
                    "regime": regime,
                    "settings": settings,
                    "strategy": strategy,
                    "exchange": str(exchange),
                    "gradients": True,
                    "keys": {**keys, "max_steps": len(rounds)},
                }
            )
        (tmp_path / strategy).mkdir()
        records[strategy] = launch(spec, tmp_path / strategy, tiny)
    for strategy in ("zero3", "fsdp2"):
        for name in (*COMPARED, "long"):
            rows, expected = records[strategy][name][0]["kept"], records["ddp"][name][0]["kept"]
            assert len(rows) == (LONG if name == "long" else 3)
            for step, (one, other) in enumerate(zip(rows, expected, strict=True)):
                assert one["loss"] == pytest.approx(other["loss"], abs=1e-5), (strategy, name, step)
                file = f"{name}.{step}.gradient.safetensors"
                gradient, reference = (load_file(tmp_path / each / file) for each in (strategy, "ddp"))
                assert gradient.keys() == reference.keys()
                size = torch.cat([each.flatten() for each in reference.values()]).norm()
                for key, value in reference.items():
                    tolerance = 1e-5 if step < 3 else AFTER
                    assert (gradient[key] - value).norm() <= tolerance * size, (strategy, name, step, key)


def test_ranks_whose_rollouts_end_at_different_lengths_sample_under_fsdp2(
    tiny: dict[str, Path], tmp_path: Path
) -> None:
    """A rank that sampled with parts of the weights would wait forever for one that has finished, also in validation."""
    keys = {"per_device_train_batch_size": 4, "max_steps": 6, "max_completion_length": 60}
    spec = [{"name": "uneven", "kind": "ours", "strategy": "fsdp2", "validated": True, "keys": keys}]
    one, other = launch(spec, tmp_path, tiny)["uneven"]
    assert one["sharded"]
    assert one["longest"] != other["longest"]
    assert one["accuracy"] == other["accuracy"]
    assert one["digest"] == other["digest"]


@pytest.mark.extended
def test_sources_give_two_ranks_what_they_give_one(tiny: dict[str, Path], tmp_path: Path) -> None:
    """Also where each learner computes the rewards of the texts, in passes of all ranks."""
    keys = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 2}
    spec = [
        {
            "name": name,
            "kind": "ours-replayed",
            "regime": "sgt",
            "settings": {},
            "exchange": str(tmp_path / f"{name}-x"),
            "verified": name == "verified",
            "keys": keys,
        }
        for name in ("verified", "unverified")
    ]
    records = launch(spec, tmp_path, tiny)
    shared = sharing(tmp_path / "one", "sgt", peers=(), sources=[book(tmp_path, verified=True)])
    alone = train(ReplayedMutual, tiny["ada"], tmp_path / "a", shared, max_steps=2)
    for name in ("verified", "unverified"):
        for one, two in zip(alone.kept, records[name][0]["kept"], strict=True):
            for key in ("reward", "loss", "grad_norm", "sgt/pairs", "sgt/nll", "source/book/confirmed"):
                assert two[key] == pytest.approx(one[key], rel=2e-3, abs=2e-5), (name, key)
        assert len({rank["digest"] for rank in records[name]}) == 1
    assert records["verified"][0]["digest"] == records["unverified"][0]["digest"]
    assert alone.kept[0]["sgt/pairs"] > 0


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp", marks=pytest.mark.extended),
        pytest.param("zero3", marks=[pytest.mark.release, *ZERO]),
        pytest.param("fsdp2", marks=pytest.mark.extended),
    ],
)
def test_dynamic_sampling_gives_two_ranks_what_it_gives_one(
    tiny: dict[str, Path], tmp_path: Path, strategy: str
) -> None:
    """Seven groups of four rows on two ranks of fourteen: the fourth has rows on both, and groups move between ranks."""
    spec = [
        {
            "name": name,
            "kind": "resampled",
            "strategy": strategy,
            "keys": {"per_device_train_batch_size": 14, "max_steps": 2, **keys},
            **shared,
        }
        for name, keys, shared in (
            ("alone", {}, {}),
            ("batch", {"scale_rewards": "batch"}, {}),
            (
                "published",
                {},
                {"regime": "grpo", "settings": {"publish": "full"}, "exchange": str(tmp_path / "two")},
            ),
        )
    ]
    records = launch(spec, tmp_path, tiny)
    for name, keys in (("alone", {}), ("batch", {"scale_rewards": "batch"}), ("published", {})):
        shared = sharing(tmp_path / "one", "grpo", publish="full") if name == "published" else None
        one = train(
            ReplayedResampled,
            tiny["ada"],
            tmp_path / f"{name}-a",
            shared,
            per_device_train_batch_size=28,
            max_steps=2,
            **keys,
        )
        assert sum(row["resample/dropped"] for row in one.kept) > 0
        for single, two in zip(one.kept, records[name][0]["kept"], strict=True):
            for key in ("reward", "loss", "grad_norm", "kl", "frac_reward_zero_std", "completions/mean_length"):
                assert two[key] == pytest.approx(single[key], rel=2e-3, abs=2e-5), (name, key)
            for key in ("resample/attempts", "resample/dropped", "resample/missing", "resample/tokens"):
                assert two[key] == single[key], (name, key)
            assert two.get("prompts/dead") == single.get("prompts/dead")
        assert len({rank["digest"] for rank in records[name]}) == 1
        weights = load_file(tmp_path / f"{name}.safetensors")
        for key, value in one.model.state_dict().items():
            if key in weights:
                assert torch.allclose(weights[key], value, atol=3e-4), (name, key)
    for number in range(2):
        one_rank, two_ranks = (
            Exchange(tmp_path / each, "eve", "script").read("ada", number) for each in ("one", "two")
        )
        assert one_rank is not None
        assert two_ranks is not None
        rows = [
            sorted((r.prompt_id, r.index, r.reward, round(r.advantage or 0.0, 4)) for r in shard)
            for shard in (one_rank, two_ranks)
        ]
        assert rows[0] == rows[1]

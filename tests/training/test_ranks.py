"""Several ranks: DDP and DeepSpeed ZeRO on CPU. Nothing hangs, and nothing but the order of sums changes."""

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
from training_harness import (
    STEPS,
    ReplayedMutual,
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
    """Compile, where a test runs ZeRO, DeepSpeed's operator first, outside the test's own limits."""
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
    "fit": ("sgt", {"pick": "fit"}),
    "trust": ("prp", {"trust": "band"}),
}


def launch(spec: list[dict[str, Any]], tmp_path: Path, tiny: dict[str, Path], ranks: int = 2) -> dict[str, list[Any]]:
    """Run the trainings of `spec` on `ranks` ranks; what every rank said, by training."""
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    done = subprocess.run(
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
    assert done.returncode == 0, done.stderr[-4000:]
    return {
        run["name"]: [json.loads((tmp_path / f"{run['name']}.{rank}.json").read_text()) for rank in range(ranks)]
        for run in spec
    }


def publish(root: Path, tiny: dict[str, Path]) -> str:
    publish_rollouts(root, load_tokenizer(str(tiny["bob"])), sampled_rounds(8, STEPS))
    return str(root)


#: under ZeRO those whose passes could hang; XGRPO and the noise have none of their own
UNDER: dict[str, tuple[str, ...]] = {
    "ddp": tuple(REGIMES),
    "zero2": ("prp", "sgt"),
    "zero3": ("prp", "sgt", "hacpo", "swarm", "fit"),
}
#: variants of GRPO that are compared bit for bit with TRL; solved prompts, and peer rows that fit, of unequal passes
PLAIN = {"ddp": ("alone", "grpo", "closed", "unmixed"), "zero3": ("closed", "unmixed")}
UNEQUAL: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {"ddp": ((0, 1, 3), (0, 1, 5)), "zero3": ((1, 3), (1, 5))}


@pytest.mark.extended
@pytest.mark.parametrize(
    "strategy",
    ["ddp", pytest.param("zero2", marks=ZERO), pytest.param("zero3", marks=ZERO)],
)
def test_on_two_ranks_nothing_hangs_and_nothing_but_the_order_of_sums_changes(
    tiny: dict[str, Path], tmp_path: Path, strategy: str
) -> None:
    """One process group for three questions: its start takes longer than its trainings."""
    spec = of_every_regime(tiny, tmp_path, strategy)
    if strategy != "zero2":
        spec += [*beside_plain_grpo(tmp_path, strategy), *with_unequal_passes(tiny, tmp_path, strategy)]
    result = launch(spec, tmp_path, tiny)
    check_every_regime_is_as_on_one_rank(result, tiny, tmp_path, strategy)
    if strategy != "zero2":
        check_it_is_grpo_trainer_bit_for_bit(result, tmp_path, strategy)
        check_unequal_passes_neither_hung_nor_drifted(result, tmp_path, strategy)


def of_every_regime(tiny: dict[str, Path], tmp_path: Path, strategy: str) -> list[dict[str, Any]]:
    """Return a training per regime, with two micro-batches per step; sampling is per rank, so the completions are
    recorded ones."""
    keys = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    chosen = {name: REGIMES[name] for name in UNDER[strategy]}
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


def check_every_regime_is_as_on_one_rank(
    result: dict[str, list[Any]], tiny: dict[str, Path], tmp_path: Path, strategy: str
) -> None:
    for name in UNDER[strategy]:
        regime, settings = REGIMES[name]
        tokenizers = {"bob": load_tokenizer(str(tiny["bob"]))}
        publish(tmp_path / f"{name}-one", tiny)
        alone = train(
            ReplayedMutual,
            tiny["ada"],
            tmp_path / f"{name}-a",
            sharing(tmp_path / f"{name}-one", regime, tokenizers=tokenizers, **settings),
            **trainer_keys(regime),
        )
        assert {rank["distributed"] for rank in result[name]} == {
            "DistributedType.MULTI_CPU" if strategy == "ddp" else "DistributedType.DEEPSPEED"
        }
        for one, two in zip(alone.kept, result[name][0]["kept"], strict=True):
            counts = ("hacpo/rows", "swarm/denied", "swarm/rows", "prp/untrusted", "plan/passages", "prompts/dead")
            for key in ("reward", "loss", "grad_norm", "sgt/nll", "prp/ratio_p99", "prp/clip_rate", *counts):
                assert two.get(key, 0.0) == pytest.approx(one.get(key, 0.0), rel=2e-3, abs=2e-5), (name, key)
        assert any(row["grad_norm"] > 0 for row in alone.kept)
        weights = load_file(tmp_path / f"{name}.safetensors")
        for key, value in alone.model.state_dict().items():
            if key in weights:
                assert torch.allclose(weights[key], value, atol=3e-4), (name, key)


def beside_plain_grpo(tmp_path: Path, strategy: str) -> list[dict[str, Any]]:
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
        run |= {"strategy": strategy, "keys": {"per_device_train_batch_size": 16}, "exchange": exchange}
    return spec


def check_it_is_grpo_trainer_bit_for_bit(result: dict[str, list[Any]], tmp_path: Path, strategy: str) -> None:
    assert any(row["grad_norm"] > 0 for row in result["plain"][0]["kept"])
    expected = load_file(tmp_path / "plain.safetensors")
    for name in PLAIN[strategy]:
        for one, other in zip(result["plain"][0]["kept"], result[name][0]["kept"], strict=True):
            for key in ("loss", "grad_norm", "reward", "kl", "entropy"):
                assert one[key] == other[key], (name, key)
        weights = load_file(tmp_path / f"{name}.safetensors")
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[key], expected[key]) for key in expected), name


def with_unequal_passes(tiny: dict[str, Path], tmp_path: Path, strategy: str) -> list[dict[str, Any]]:
    """Return trainings with a pair, or a peer row, on one rank alone, in one micro-batch alone, or nowhere: ranks that
    run unequal passes would wait for ever under DDP and ZeRO-3."""
    rounds = sampled_rounds(8, 2)
    tokenizer = load_tokenizer(str(tiny["bob"]))
    keys = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 2}
    spec: list[dict[str, Any]] = []
    for solved in UNEQUAL[strategy][0]:
        publish_peer(tmp_path / f"s{solved}", rounds, solved=rounds[0][:solved])
        spec.append({"name": f"sgt-{solved}", "regime": "sgt", "exchange": str(tmp_path / f"s{solved}"), "failing": 1})
    for rows in UNEQUAL[strategy][1]:  # of the peer's that fit, over 2 ranks x 2 micro-batches
        publish_rollouts(tmp_path / f"p{rows}", tokenizer, rounds, rollouts=1, fitting=rows)
        spec.append({"name": f"prp-{rows}", "regime": "prp", "exchange": str(tmp_path / f"p{rows}")})
    for run in spec:
        run |= {"kind": "ours", "strategy": strategy, "keys": keys, "settings": {}}
    return spec


def check_unequal_passes_neither_hung_nor_drifted(result: dict[str, list[Any]], tmp_path: Path, strategy: str) -> None:
    for solved in UNEQUAL[strategy][0]:
        both = result[f"sgt-{solved}"]
        assert both[0]["uses"] == both[1]["uses"]
        assert both[0]["kept"][0]["sgt/pairs"] == solved
        assert ("sgt/nll" in both[0]["kept"][0]) == (solved > 0)
        assert both[0]["digest"] == both[1]["digest"]  # the same weights on both ranks
        assert len(list((tmp_path / f"s{solved}" / "ada").glob("000000*.parquet"))) == 2  # each rank wrote its own
    for rows in UNEQUAL[strategy][1]:
        first = result[f"prp-{rows}"][0]["kept"][0]
        assert (first["prp/rows"], first["prp/unfit"]) == (rows, 8 - rows)
        assert ("prp/ratio_p99" in first) == (rows > 0)

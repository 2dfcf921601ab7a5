"""Samples that a regime requests, and the rule `hinted`, inside TRL's loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback

from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.errors import RegimeError, UsageError
from mutualrl.records import Rollout
from mutualrl.regimes import ExtraRow, Needs, Plan, Regime, Requests, RoundView, RowSource, Sample, Sampled
from mutualrl.regimes.hints import FOR_CHATS, with_hint
from mutualrl.see import Exchange
from mutualrl.thl import retokenize
from mutualrl.training import MutualGRPOTrainer
from mutualrl.training.extra_rows import ExtraRows
from mutualrl.training.samples import longest_sequence, samples_of, sampling_problems
from mutualrl.trajectory import Trajectory
from training_harness import (
    BY_ID,
    PROMPTS,
    ReplayedMutual,
    boxed_reward,
    config,
    hinted_text,
    publish_peer,
    rollout_text,
    same_training,
    sampled_rounds,
    sharing,
    train,
)

pytestmark = pytest.mark.slow


class Gradients(TrainerCallback):
    """Callback that keeps the gradients of the first optimizer step."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.kept:
            self.kept = [p.grad.detach().clone() for p in model.parameters()]


class Watched(ReplayedMutual):
    """Trainer on recorded completions that keeps the first step's gradients, its extra rows, and their prompts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gradients = Gradients()
        self.add_callback(self.gradients)
        self.trained: list[tuple[str, list[int], list[int]]] = []
        load = self.extra_rows.load

        def watched(rows: Any, prompts: Any, batch: Any) -> None:
            self.trained += [(r.prompt_id, list(prompts[r.prompt_id]), list(r.token_ids)) for r in rows]
            load(rows, prompts, batch)

        self.extra_rows.load = watched  # type: ignore[method-assign]


def solution(prompt_id: str) -> str:
    return f" 2+2=4 \\boxed{{{BY_ID[prompt_id].answer}}}"


def publish_solutions(root: Path, rounds: list[list[str]]) -> None:
    """Publish rounds of bob, who solves every prompt, with a step before the answer."""
    exchange = Exchange(root, "bob", "script")
    for number, prompts in enumerate(rounds):
        records = [
            Rollout(key, 0, 1.0, True, trajectory=Trajectory.of_text(solution(key))) for key in dict.fromkeys(prompts)
        ]
        exchange.publish(number, records, number)


def own_rewards(prompt_id: str) -> list[float]:
    texts = [rollout_text(BY_ID[prompt_id], number, "own") for number in range(4)]
    return [float(r) for r in boxed_reward(texts, answer=[BY_ID[prompt_id].answer] * 4)]


def gated_and_right(prompts: list[str]) -> tuple[list[str], list[str]]:
    """Return the prompts on which every own rollout fails, and those of them with a correct answer to the hint."""
    gated = [key for key in prompts if max(own_rewards(key)) == 0]
    right = [key for key in gated if boxed_reward([hinted_text(BY_ID[key])], answer=[BY_ID[key].answer])[0]]
    assert 0 < len(right) < len(gated) < len(prompts)
    return gated, right


class Expected:
    """Terms of a step's loss for two answers per gated prompt, with their graphs, from the definitions: TRL's formula
    for the own rollouts (whose ratio is 1), and either loss of the answers."""

    def __init__(self, model_path: Path, prompts: list[str], loss: str, cap: float) -> None:
        self.tokenizer = load_tokenizer(str(model_path))
        self.model = AutoModelForCausalLM.from_pretrained(model_path)
        self.gated, self.right = gated_and_right(prompts)
        self.own: list[torch.Tensor] = []
        self.extra: list[torch.Tensor] = []
        self.ratios: list[float] = []
        for key in prompts:
            rewards = own_rewards(key)
            pooled = loss == "policy_gradient" and key in self.gated
            group = rewards + [float(key in self.right)] * 2 * pooled
            mean = sum(group) / len(group)
            deviation = (sum((r - mean) ** 2 for r in group) / (len(group) - 1)) ** 0.5 + 1e-4
            for number, reward in enumerate(rewards):
                text = rollout_text(BY_ID[key], number, "own")
                self.own.append(-(reward - mean) / deviation * self.logps(BY_ID[key].text, text).mean())
            for _ in range(2):
                if pooled:
                    self.extra.append(self._bounded(key, (float(key in self.right) - mean) / deviation, cap))
                elif loss == "nll" and key in self.right:
                    self.extra.append(-self.logps(BY_ID[key].text, hinted_text(BY_ID[key])).mean())

    def logps(self, prompt: str, text: str) -> torch.Tensor:
        """Return the log-prob of each token of a completion."""
        first = list(self.tokenizer(prompt)["input_ids"])
        ids = list(retokenize(text, self.tokenizer, ended=True).ids)
        logits = self.model(torch.tensor([first + ids])).logits[0, len(first) - 1 : -1]
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]

    def _bounded(self, key: str, advantage: float, cap: float) -> torch.Tensor:
        answer = hinted_text(BY_ID[key])
        with torch.no_grad():
            behaviour = self.logps(with_hint(BY_ID[key].text, solution(key)), answer)
        new = self.logps(BY_ID[key].text, answer)
        ratio = (new.detach() - behaviour).exp()
        self.ratios += ratio.tolist()
        return -advantage * (ratio.clamp(max=cap) * new).mean()


@pytest.mark.parametrize("loss", ["nll", "policy_gradient"])
def test_loss_and_gradient_of_a_step_match_the_formulas(tiny: dict[str, Path], tmp_path: Path, loss: str) -> None:
    prompts = list(dict.fromkeys(sampled_rounds(8, 1)[0]))
    publish_solutions(tmp_path / "x", [prompts])
    settings: dict[str, Any] = {"cap": 0.9} if loss == "policy_gradient" else {"weight": 0.3}
    shared = sharing(tmp_path / "x", "hinted", loss=loss, samples=2, **settings)
    keys = {"max_steps": 1, "beta": 0.0, "max_grad_norm": 1e9}
    learner = train(Watched, tiny["ada"], tmp_path / "a", shared, **keys)

    expected = Expected(tiny["ada"], prompts, loss, 0.9)
    own, extra = torch.stack(expected.own), torch.stack(expected.extra)
    total = own.mean() + 0.3 * extra.mean() if loss == "nll" else torch.cat([own, extra]).mean()
    total.backward()
    gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in expected.model.parameters()]
    assert max(float(g.abs().max()) for g in gradient) > 1e-3
    for one, other in zip(learner.gradients.kept, gradient, strict=True):
        assert torch.allclose(one, other, atol=1e-6), float((one - other).abs().max())
    row = learner.kept[0]
    assert row["hinted/confirmed"] == 2 * len(expected.right)
    if loss == "policy_gradient":
        assert min(expected.ratios) < 0.9 < max(expected.ratios)  # some tokens are at the cap
        assert row["hinted/ratio"] == pytest.approx(sum(expected.ratios) / len(expected.ratios), abs=1e-4)
        assert row["hinted/capped"] == pytest.approx(sum(r > 0.9 for r in expected.ratios) / len(expected.ratios))
        return
    nll = extra.mean().item()
    assert row["hinted/nll"] == pytest.approx(nll, abs=1e-4)
    assert row["loss"] == pytest.approx(0.3 * nll, abs=1e-4)  # TRL's value of the own rows' loss is 0 at ratio 1
    with torch.no_grad():
        hints = [-expected.logps(BY_ID[key].text, solution(key)).mean().item() for key in expected.right]
    assert row["hinted/hint_nll"] == pytest.approx(sum(hints) / len(hints), abs=1e-3)


@pytest.mark.parametrize("loss", ["nll", "policy_gradient"])
def test_the_hint_never_enters_the_prompt_that_is_trained_on(
    tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    """Read from the tensors of the extra rows' forward passes."""
    seen: list[list[int]] = []
    batch_of = ExtraRows._batch

    def watched(self: ExtraRows, chunk: Any, inputs: Any) -> Any:
        batch = batch_of(self, chunk, inputs)
        for place in range(len(chunk.rows)):
            seen.append(batch["prompt_ids"][place][batch["prompt_mask"][place] != 0].tolist())
        return batch

    monkeypatch.setattr(ExtraRows, "_batch", watched)
    publish_solutions(tmp_path / "x", sampled_rounds(8, 3))
    train(Watched, tiny["ada"], tmp_path / "a", sharing(tmp_path / "x", "hinted", loss=loss))
    tokenizer = load_tokenizer(str(tiny["ada"]))
    plain = {tuple(tokenizer(prompt.text)["input_ids"]) for prompt in PROMPTS}
    assert len(seen) >= 8
    assert {tuple(ids) for ids in seen} <= plain


def test_rewards_judge_answers_on_the_prompt_without_the_hint(tiny: dict[str, Path], tmp_path: Path) -> None:
    """With all columns of the data row, once per answer; nothing of it is logged as a rollout of training."""
    calls: list[tuple[list[str], list[str], list[str]]] = []

    def watched(prompts: list[str], completions: list[str], answer: list[str], **_: object) -> list[float]:
        calls.append((prompts, completions, answer))
        return boxed_reward(completions, answer=answer)

    publish_solutions(tmp_path / "x", sampled_rounds(8, 1))
    shared = sharing(tmp_path / "x", "hinted", samples=3)
    learner = train(ReplayedMutual, tiny["ada"], tmp_path / "a", shared, reward=watched, max_steps=1)
    (training, own), *others = [(prompts, completions) for prompts, completions, _ in calls]
    assert len(training) == len(own) == 32
    ((prompts, completions),) = others
    assert len(prompts) == learner.kept[0]["hinted/samples"] == 3 * len(set(prompts))
    assert set(prompts) <= {prompt.text for prompt in PROMPTS}
    by_text = {prompt.text: prompt for prompt in PROMPTS}
    assert completions == [hinted_text(by_text[text]) for text in prompts]
    assert calls[1][2] == [by_text[text].answer for text in prompts]
    assert learner.kept[0]["reward"] == pytest.approx(
        sum(sum(own_rewards(p)) for p in set(sampled_rounds(8, 1)[0])) / 32
    )


class FreshSamples(Regime):
    """Regime that asks for samples on every prompt, with and without a hint, and keeps what it gets."""

    name = "fresh-samples"
    summary = "asks for samples"

    def needs(self) -> Needs:
        return Needs(peers=False, samples=True)

    kept: ClassVar[list[dict[Sample, Sampled | None]]] = []

    def requests(self, view: RoundView) -> Requests:
        made = []
        for prompt_id in sorted(set(view.prompt_ids)):
            made += [Sample(prompt_id, number, logprobs=number == 0) for number in range(3)]
            made.append(Sample(prompt_id, 0, " 1+1=2 <eos> \\boxed{2}", max_hint_tokens=4, logprobs=True))
        return Requests(samples=tuple(made))

    def plan(self, view: RoundView) -> Plan:
        FreshSamples.kept.append(dict(view.results.samples))
        best = [(s.prompt_id, d) for s, d in view.results.samples.items() if d is not None and d.reward > 0]
        source = RowSource(view.learner, 0, view.round)
        return Plan(rows=tuple(ExtraRow(prompt_id, source, d.ids, loss="nll") for prompt_id, d in best))


def test_samples_are_drawn_at_the_runs_settings_with_their_log_probs(
    tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FreshSamples, "kept", [])
    from mutualrl.training.peers import PeerLink
    from mutualrl.training.sharing import Sharing

    def fresh(name: str) -> Sharing:
        return Sharing(PeerLink(Exchange(tmp_path / name, "ada", "script"), ()), FreshSamples(), None)

    keys = {"max_steps": 1, "temperature": 1.3}
    first = train(MutualGRPOTrainer, tiny["ada"], tmp_path / "a", fresh("x"), **keys)
    same_training(first, train(MutualGRPOTrainer, tiny["ada"], tmp_path / "b", fresh("y"), **keys))
    drawn, again = FreshSamples.kept
    assert len(drawn) == 8 * 4
    tokenizer, model = load_tokenizer(str(tiny["ada"])), AutoModelForCausalLM.from_pretrained(tiny["ada"])
    texts: dict[str, set[str]] = {}
    for sample, result in drawn.items():
        assert result is not None
        other = again[sample]
        assert other is not None and other.ids == result.ids
        assert result.reward == boxed_reward([result.trajectory.text], answer=[BY_ID[sample.prompt_id].answer])[0]
        assert result.ended == (result.ids[-1] == tokenizer.eos_token_id)
        assert (result.logprobs is not None) == sample.logprobs
        if not sample.hint:
            texts.setdefault(sample.prompt_id, set()).add(result.trajectory.text)
        if result.logprobs is None:
            continue
        hint = tokenizer.decode(result.hint_ids)
        assert len(result.hint_ids) == (4 if sample.hint else 0)
        assert "<eos>" not in hint
        shown = with_hint(BY_ID[sample.prompt_id].text, hint)
        with torch.no_grad():
            prompt = list(tokenizer(shown)["input_ids"])
            logits = model(torch.tensor([prompt + list(result.ids)])).logits[0, len(prompt) - 1 : -1] / 1.3
            expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(result.ids)[:, None])[:, 0]
        assert torch.tensor(result.logprobs) == pytest.approx(expected.numpy(), abs=1e-4)
    assert any(len(distinct) > 1 for distinct in texts.values())  # rows of one prompt are drawn apart
    assert first.kept[0]["plan/samples"] == 32
    assert first.kept[0]["plan/samples_left_out"] == 0


def test_a_prompt_that_leaves_no_room_for_a_completion_is_not_sampled(tiny: dict[str, Path], tmp_path: Path) -> None:
    trainer = MutualGRPOTrainer(
        model=str(tiny["ada"]),
        reward_funcs=boxed_reward,
        args=config(tmp_path / "a"),
        train_dataset=Dataset.from_list([{"prompt": PROMPTS[0].text, "answer": PROMPTS[0].answer, "prompt_id": "p"}]),
        processing_class=load_tokenizer(str(tiny["ada"])),
        sharing=sharing(tmp_path / "x", "sgt"),
    )
    assert longest_sequence(trainer) == 256
    rows = {"p": trainer.train_dataset[0]}
    long = "{prompt}" + " 1+1=2" * 100 + "{hint}"
    samples = [Sample("p", 0, " 1", template=long), Sample("p", 0, " 1+1=2" * 100), Sample("p", 0)]
    results = samples_of(trainer, samples, rows, {})
    assert [results[sample] is None for sample in samples] == [True, False, False]
    cut = results[samples[1]]
    assert cut is not None
    assert len(cut.hint_ids) == trainer.max_completion_length  # of a hint at most as much as of a completion is shown
    limit = longest_sequence(trainer) - trainer.max_completion_length
    bare = len(load_tokenizer(str(tiny["ada"]))(with_hint(PROMPTS[0].text, " 1"))["input_ids"])
    assert bare < limit


def test_chat_prompts_have_the_hint_in_their_last_user_message(
    tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(str(tiny["ada"]))
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": PROMPTS[0].text}]
    judged: list[Any] = []

    def watched(prompts: list[Any], completions: list[Any], **_: object) -> list[float]:
        judged.extend(prompts)
        assert all(completion[0]["role"] == "assistant" for completion in completions)
        return [0.0] * len(completions)

    trainer = MutualGRPOTrainer(
        model=str(tiny["ada"]),
        reward_funcs=watched,
        args=config(tmp_path / "a"),
        train_dataset=Dataset.from_list([{"prompt": chat, "answer": "1", "prompt_id": "p"}]),
        processing_class=tokenizer,
        sharing=sharing(tmp_path / "x", "sgt"),
    )
    shown: list[str] = []
    generate = type(trainer)._generate_single_turn

    def recorded(self: Any, prompt_ids: Any, *arguments: Any, **keys: Any) -> Any:
        shown.extend(tokenizer.decode(ids) for ids in prompt_ids)
        return generate(self, prompt_ids, *arguments, **keys)

    monkeypatch.setattr(type(trainer), "_generate_single_turn", recorded)
    samples_of(trainer, [Sample("p", 0, "two and two"), Sample("p", 1)], {"p": trainer.train_dataset[0]}, {})
    user = FOR_CHATS.format(prompt=PROMPTS[0].text, hint="two and two")
    assert shown == [f"[system]Add.[user]{user}[assistant]", f"[system]Add.[user]{PROMPTS[0].text}[assistant]"]
    assert judged == [chat, chat]


@pytest.mark.parametrize("settings", [{}, {"loss": "policy_gradient"}, {"hint": "none"}, {"fallback": "sgt"}], ids=str)
def test_accumulation_changes_nothing(tiny: dict[str, Path], tmp_path: Path, settings: dict[str, Any]) -> None:
    publish_solutions(tmp_path / "x", sampled_rounds(8, 3))

    def run(name: str, **keys: Any) -> Any:
        (tmp_path / f"exchange-{name}").mkdir()
        (tmp_path / f"exchange-{name}" / "bob").symlink_to(tmp_path / "x" / "bob")
        shared = sharing(tmp_path / f"exchange-{name}", "hinted", **settings)
        return train(ReplayedMutual, tiny["ada"], tmp_path / name, shared, **keys)

    first, split = run("a"), run("b", gradient_accumulation_steps=4, per_device_train_batch_size=8)
    acted = "hinted/samples" if settings.get("hint") == "none" else "hinted/confirmed"
    assert sum(row[acted] for row in first.kept) > 0
    for one, other in zip(first.kept, split.kept, strict=True):
        for key in ("loss", "grad_norm", "reward", "hinted/confirmed", "hinted/nll"):
            assert other.get(key, 0.0) == pytest.approx(one.get(key, 0.0), rel=1e-3, abs=1e-5), key
    for one, other in zip(first.model.parameters(), split.model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=2e-4)


def test_adapters_and_other_regimes_train_with_hints(tiny: dict[str, Path], tmp_path: Path) -> None:
    publish_solutions(tmp_path / "x", sampled_rounds(8, 3))
    adapter = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.0)
    shared = sharing(tmp_path / "x", "xgrpo+hinted", hinted={"loss": "policy_gradient"})
    learner = train(ReplayedMutual, tiny["ada"], tmp_path / "a", shared, peft_config=adapter)
    assert all(row["grad_norm"] > 0 for row in learner.kept)
    assert sum(row["hinted/samples"] for row in learner.kept) > 0
    assert all("xgrpo/sign_flips" in row for row in learner.kept)


def test_a_truncated_sampling_distribution_is_refused_where_ratios_are_taken(
    tiny: dict[str, Path], tmp_path: Path
) -> None:
    publish_peer(tmp_path / "x", sampled_rounds(8, 3))
    with pytest.raises(UsageError, match="top_k: found 5, which biases the regime's importance ratios"):
        shared = sharing(tmp_path / "x", "hinted", loss="policy_gradient")
        train(MutualGRPOTrainer, tiny["ada"], tmp_path / "a", shared, top_k=5)
    train(MutualGRPOTrainer, tiny["ada"], tmp_path / "b", sharing(tmp_path / "x", "hinted"), top_k=5, max_steps=1)


def test_batches_of_samples_are_drawn_in_evaluation_mode_also_if_the_engine_leaves_it(
    tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's continuous batching calls `train()` on the model."""
    trainer = MutualGRPOTrainer(
        model=str(tiny["ada"]),
        reward_funcs=boxed_reward,
        args=config(tmp_path / "a", per_device_train_batch_size=4),
        train_dataset=Dataset.from_list([{"prompt": PROMPTS[0].text, "answer": PROMPTS[0].answer, "prompt_id": "p"}]),
        processing_class=load_tokenizer(str(tiny["ada"])),
        sharing=sharing(tmp_path / "x", "hinted"),
    )
    modes: list[bool] = []
    generate = type(trainer)._generate_single_turn

    def leaving(self: Any, *arguments: Any, **keys: Any) -> Any:
        modes.append(self.model.training)
        result = generate(self, *arguments, **keys)
        self.model.train()
        return result

    monkeypatch.setattr(type(trainer), "_generate_single_turn", leaving)
    samples = [Sample("p", number, logprobs=True) for number in range(9)]
    assert len(samples_of(trainer, samples, {"p": trainer.train_dataset[0]}, {})) == 9
    assert modes == [False] * 3


class StandInServer:
    """What TRL calls of vLLM in server mode: no server, no sockets, no weights moved."""

    def __init__(self, tokenizer: Any, texts: list[str]) -> None:
        self.tokenizer, self.texts, self.asked, self.synced = tokenizer, texts, [], 0  # type: ignore[var-annotated]

    def sync_weights(self) -> None:
        self.synced += 1

    def generate(self, prompts: Any, images: Any, num_generations: int, profiler: Any) -> Any:
        self.asked += [self.tokenizer.decode(ids) for ids in prompts]
        assert num_generations == 1
        ids = [[*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id] for text in self.texts[: len(prompts)]]
        return None, ids, [[[-0.5]] * len(row) for row in ids], None


def test_samples_come_from_a_vllm_server(tiny: dict[str, Path], tmp_path: Path) -> None:
    """The path of TRL's server mode, with an object that stands in for its client."""
    tokenizer = load_tokenizer(str(tiny["ada"]))
    trainer = MutualGRPOTrainer(
        model=str(tiny["ada"]),
        reward_funcs=boxed_reward,
        args=config(tmp_path / "a"),
        train_dataset=Dataset.from_list([{"prompt": PROMPTS[0].text, "answer": PROMPTS[0].answer, "prompt_id": "p"}]),
        processing_class=tokenizer,
        sharing=sharing(tmp_path / "x", "hinted"),
    )
    server = StandInServer(tokenizer, [f" \\boxed{{{PROMPTS[0].answer}}}", " \\boxed{-1}"])
    trainer.use_vllm, trainer.vllm_mode, trainer.vllm_generation = True, "server", server
    trainer.vllm_importance_sampling_correction, trainer.use_transformers_continuous_batching = False, False
    trainer.args.vllm_max_model_length, trainer._last_loaded_step = 160, -1
    assert longest_sequence(trainer) == 160
    samples = [Sample("p", 0, " 1+1=2"), Sample("p", 1, template="never used", logprobs=True)]
    first, second = samples_of(trainer, samples, {"p": trainer.train_dataset[0]}, {}).values()
    assert server.asked == [with_hint(PROMPTS[0].text, " 1+1=2"), PROMPTS[0].text]
    assert server.synced == 1
    assert first is not None
    assert second is not None
    assert (first.reward, second.reward) == (1.0, 0.0)
    assert first.logprobs is None
    assert second.logprobs is not None


def test_what_cannot_answer_requests_is_refused_at_the_start(tiny: dict[str, Path], tmp_path: Path) -> None:
    data = Dataset.from_list([{"prompt": PROMPTS[0].text, "answer": PROMPTS[0].answer, "prompt_id": "p"}])
    keys: dict[str, Any] = {"model": str(tiny["ada"]), "reward_funcs": boxed_reward}
    keys |= {"processing_class": load_tokenizer(str(tiny["ada"])), "args": config(tmp_path / "a")}
    with pytest.raises(UsageError, match=r"found IterableDataset, expected a datasets\.Dataset"):
        shared = sharing(tmp_path / "x", "hinted")
        MutualGRPOTrainer(**keys, train_dataset=data.to_iterable_dataset(), sharing=shared)
    trainer = MutualGRPOTrainer(**keys, train_dataset=data, sharing=sharing(tmp_path / "y", "hinted"))
    assert sampling_problems(trainer) == []
    trainer.use_vllm, trainer.vllm_mode = True, "server"
    (server,) = sampling_problems(trainer)
    assert "expected the server's --max-model-len" in server


class Undeclared(FreshSamples):
    """Requests samples without saying so."""

    name = "undeclared"

    def needs(self) -> Needs:
        return Needs(peers=False)


def test_a_regime_that_requests_samples_must_say_so(tiny: dict[str, Path], tmp_path: Path) -> None:
    from mutualrl.training.peers import PeerLink
    from mutualrl.training.sharing import Sharing

    shared = Sharing(PeerLink(Exchange(tmp_path / "x", "ada", "script"), ()), Undeclared(), None)
    with pytest.raises(RegimeError, match=r"'undeclared' requests samples: its needs\(\) must say samples=True"):
        train(MutualGRPOTrainer, tiny["ada"], tmp_path / "a", shared, max_steps=1)

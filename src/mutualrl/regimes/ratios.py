"""Checks for settings that bias an importance ratio or change the meaning of a regime. No torch."""

from __future__ import annotations

from mutualrl.regimes.regime import Problem, Settings

#: settings that truncate or reshape the sampling distribution, and their neutral values.
DEFAULT_SAMPLING: dict[str, tuple[object, ...]] = {
    "top_p": (1.0, None),
    "top_k": (0, -1, None),
    "min_p": (0.0, None),
    "repetition_penalty": (1.0, None),
}


#: keys of `generation_kwargs` that do not affect the token distribution.
NON_SAMPLING_KEYS = frozenset(
    ("max_new_tokens", "max_tokens", "use_cache", "cache_implementation", "disable_compile", "stop", "stop_strings")
) | {"stop_token_ids", "pad_token_id", "bos_token_id", "eos_token_id"}


def non_default_sampling(settings: Settings) -> Settings:
    """Return the sampling settings (TRL's keys, or any key of its `generation_kwargs` not known to be harmless) that
    are not neutral."""
    own_keys = {key: settings[key] for key in DEFAULT_SAMPLING if key in settings}
    sampling = {**own_keys, **(settings.get("generation_kwargs") or {})}  # as in TRL, the latter take precedence
    return {
        key: value
        for key, value in sampling.items()
        if key not in NON_SAMPLING_KEYS and value not in DEFAULT_SAMPLING.get(key, ())
    }


def ratio_problems(settings: Settings, *, traced: bool) -> list[Problem]:
    """Return (key, problem) for settings that bias an importance ratio.

    The learner's log-probs are of the full distribution at the sampling temperature. If its samples came from a
    truncated one, ratios to a published trace (`traced`) and TRL's correction between vLLM and the trainer are biased.
    """
    corrected = bool(settings.get("use_vllm")) and settings.get("vllm_importance_sampling_correction", True)
    if not traced and not corrected:
        return []
    biased = "the regime's importance ratios" if traced else "TRL's correction between vLLM and the trainer"
    fix = "" if traced else ", or set vllm_importance_sampling_correction: false"
    problems = []
    generation_keys = settings.get("generation_kwargs") or {}
    for key, value in non_default_sampling(settings).items():
        expected = repr(DEFAULT_SAMPLING[key][0]) if key in DEFAULT_SAMPLING else "no such key"
        path = f"generation_kwargs.{key}" if key in generation_keys else key
        problems.append((path, f"found {value!r}, which biases {biased}; expected {expected}{fix}"))
    return problems


def aggregation_problem(
    settings: Settings, *, moves_advantages: bool, why: str = "the regime shares one reward per rollout"
) -> list[Problem]:
    """Return (key, problem) if a regime computes advantages from summed rewards, for which `why` is the reason, and TRL
    is set to normalize first."""
    if moves_advantages and settings.get("multi_objective_aggregation") == "normalize_then_sum":
        return [
            (
                "multi_objective_aggregation",
                f"found 'normalize_then_sum', but {why}; expected 'sum_then_normalize'",
            )
        ]
    return []

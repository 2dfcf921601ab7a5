"""vLLM servers that policies of a recipe name."""

from __future__ import annotations

from collections.abc import Mapping

from mutualrl.recipes.trainer_table import Settings


def server_problems(policies: Mapping[str, Settings]) -> list[str]:
    """Return one line for each pair of policies that would load their weights into the same vLLM server."""
    seen: dict[str, str] = {}
    lines = []
    for name, settings in policies.items():
        if settings.get("use_vllm") and settings.get("vllm_mode") == "server":
            address = settings.get("vllm_server_base_url") or (
                f"http://{settings.get('vllm_server_host', '0.0.0.0')}:{settings.get('vllm_server_port', 8000)}"
            )
            if address in seen:
                lines.append(
                    f"policies {seen[address]!r} and {name!r} both use the vLLM server {address}; give each its "
                    "own server (policies[].trainer.vllm_server_port, or vllm_server_base_url)"
                )
            seen[address] = name
    return lines

"""The container image and the compose file: linted, and their commands run as processes."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from buckets import answers, binary, free_port
from conftest import PATIENCE, REPOSITORY, on_core
from runs import SHORT, FinishedRun, wait_until

DOCKERFILE = REPOSITORY / "Dockerfile"
COMPOSE = REPOSITORY / "compose.yaml"


def services() -> dict[str, dict[str, Any]]:
    parsed: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
    return parsed


def test_dockerfile_passes_its_linter() -> None:
    result = subprocess.run([binary("hadolint"), str(DOCKERFILE)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_images_are_pinned_and_no_process_runs_as_root() -> None:
    text = DOCKERFILE.read_text()
    bases = [line.split()[1] for line in text.splitlines() if line.startswith("FROM ")]
    images = [service["image"] for service in services().values() if "build" not in service]
    assert all("@sha256:" in image for image in (*bases, *images))
    _, _, *images = text.split("\nFROM ")  # the first stage only builds the wheel
    assert len(images) == 2
    for stage in images:
        assert stage.index("USER 1000") < stage.index("ENTRYPOINT")
        assert "HEALTHCHECK" in stage


def test_files_copied_into_the_image_are_in_its_build_context() -> None:
    ignored = (REPOSITORY / ".dockerignore").read_text().split()
    copied = [
        line.split()[1:-1]
        for line in DOCKERFILE.read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
    ]
    assert all(f"!{name}" in ignored for names in copied for name in names)


@pytest.mark.extended
@pytest.mark.slow
def test_compose_commands_train_the_run(unbroken: FinishedRun, tmp_path: Path) -> None:
    composed = services()
    ports = {name: free_port() for name in ("s3", "master", "volume", "filer", "webdav", "admin")}
    command = [binary("weed"), *composed["bucket"]["command"], "-ip=127.0.0.1", "-admin.ui=false"]
    command = [word.replace("/data", str(tmp_path / "data")) for word in command]
    command += [f"-{name}.port={port}" for name, port in ports.items()]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.volumeSizeLimitMB=64"]
    (tmp_path / "data").mkdir()
    endpoint = f"http://127.0.0.1:{ports['s3']}"
    with (tmp_path / "weed.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            wait_until(lambda: answers(endpoint) and has_bucket(endpoint))
            policies = {}
            for core, name in enumerate(("ada", "bob")):
                service = composed[name]
                environment = {**os.environ, **service["environment"], "AWS_ENDPOINT_URL": endpoint}
                (tmp_path / name).mkdir()
                policy_command = [sys.executable, "-m", "mutualrl", *service["command"], *SHORT]
                with on_core(core):
                    policies[name] = subprocess.Popen(policy_command, cwd=tmp_path / name, env=environment)
            for process in policies.values():
                assert process.wait(PATIENCE) == 0
        finally:
            server.kill()
    for name in policies:
        weights = tmp_path / name / "runs" / f"tour-{name}" / "policies" / name / "model" / "model.safetensors"
        assert weights.is_file()


def has_bucket(endpoint: str) -> bool:
    """Return whether the bucket accepts writes: the server answers before that."""
    try:
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/runs/probe", data=b"x", method="PUT"), timeout=5)
    except OSError:
        return False
    return True

"""Completions of an evaluation, in Parquet parts that survive a kill; a part is complete or does not exist.

The columns are those of an exchange (`mutualrl.see.schema`), with `task`, `group`, `answer`, `tokens` and `too_long`,
so that the parts are also rollouts files for the diagnostics."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mutualrl.errors import DataError, UsageError
from mutualrl.storage.files import JsonObject, read_json, user_path, write_atomic, write_json

REQUEST, COMPLETIONS = "request.json", "completions"
_LEFT = re.compile(r"\..*\.tmp")  # what a killed writer left

SCHEMA = pa.schema(
    [
        pa.field("policy", pa.string(), nullable=False),
        pa.field("round", pa.int64(), nullable=False),
        pa.field("task", pa.string(), nullable=False),
        pa.field("group", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("rollout", pa.int32(), nullable=False),
        pa.field("reward", pa.float64(), nullable=False),
        pa.field("ended", pa.bool_(), nullable=False),
        pa.field("too_long", pa.bool_(), nullable=False),
        pa.field("no_box", pa.bool_()),
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("x_text", pa.string(), nullable=False),
        pa.field("y_text", pa.string(), nullable=False),
        pa.field("answer", pa.string(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32())),
    ]
)


class Store:
    """Completions of an evaluation on disk: `DIR/completions/MODEL/TASK.NNNNN.parquet`; without DIR nowhere."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    @classmethod
    def open(cls, out: Path | None, request: JsonObject) -> Store:
        """Return a store for a request: new, or of the same request, which then goes on.

        Raises UsageError when the directory holds another evaluation, with what differs, or anything else.
        """
        if out is None:
            return cls(None)
        directory = user_path(out)
        if directory.exists() and not directory.is_dir():
            raise UsageError(f"--out {out} is a file, expected a directory")
        stored = read_json(directory / REQUEST) if (directory / REQUEST).is_file() else None
        if stored is None and directory.is_dir() and any(not _LEFT.fullmatch(p.name) for p in directory.iterdir()):
            raise UsageError(f"--out {out} holds files that are no evaluation's; name another directory")
        if stored is not None and stored != request:
            differs = sorted(key for key in {*stored, *request} if stored.get(key) != request.get(key))
            raise UsageError(
                f"--out {out} holds another evaluation (it differs in {', '.join(differs)}); name another directory, "
                "or remove it"
            )
        if stored is None:
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"--out {out} cannot be made: {error.strerror}") from None
            write_json(directory / REQUEST, request)
        return cls(directory)

    def get(self, model: str, task: str, part: int) -> list[JsonObject] | None:
        """Return the rows of a part; None when it is not there. Raises DataError when its file is damaged."""
        if self._directory is None or not (path := self._path(model, task, part)).is_file():
            return None
        try:
            rows: list[JsonObject] = pq.read_table(path, page_checksum_verification=True).to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: damaged ({error}); remove it, and the same command makes it again") from None
        return rows

    def put(self, model: str, task: str, part: int, rows: Sequence[JsonObject]) -> None:
        """Keep the rows of a part."""
        if self._directory is None:
            return
        path = self._path(model, task, part)
        path.parent.mkdir(parents=True, exist_ok=True)
        sink = io.BytesIO()
        pq.write_table(
            pa.Table.from_pylist(list(rows), schema=SCHEMA), sink, compression="zstd", write_page_checksum=True
        )
        write_atomic(path, sink.getvalue())

    def results(self, value: JsonObject, markdown: str) -> list[str]:
        """Write `results.json` and `results.md`; returns what lies in the directory."""
        if self._directory is None:
            return []
        write_json(self._directory / "results.json", value)
        write_atomic(self._directory / "results.md", (markdown + "\n").encode())
        return [str(self._directory / name) for name in ("results.json", "results.md", COMPLETIONS)]

    def _path(self, model: str, task: str, part: int) -> Path:
        assert self._directory is not None
        return self._directory / COMPLETIONS / folder_of(model) / f"{task}.{part:05d}.parquet"


def folder_of(model: str) -> str:
    """Return a directory name for a model: its own where it is one, else with a hash, so that no two models share
    one."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip(".-")[-80:]
    if plain == model:
        return plain
    return f"{plain}-{hashlib.sha256(model.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def identity(path: str, revision: str | None, trust_remote_code: bool) -> str:
    """Return what a model directory holds, as far as names, sizes and times tell; of a model of the hub, its commit."""
    directory = Path(path)
    if not directory.is_dir():
        from mutualrl.engines.transformers_engine import commit_of

        return f"{path}@{commit_of(path, revision=revision, trust_remote_code=trust_remote_code)}"
    files = sorted(p for p in directory.iterdir() if p.is_file())
    stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16]

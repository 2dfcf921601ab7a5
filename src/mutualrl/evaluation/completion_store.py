"""Completions of an evaluation in Parquet parts that survive a kill; a part is complete or does not exist.

Each part has a marker, written after it, with the part's identity and sha256. A part under another part's name, or
with a changed byte, is rejected. Stored rewards are for human readers; the code recomputes them from the texts.

The columns are those of a rollout (`mutualrl.rollouts`) plus `task`, `group`, `answer`, `too_long` and `no_box`, so
the diagnostics accept the parts as rollouts files."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mutualrl.console.user_path import user_path
from mutualrl.engines.model_files import model_digest
from mutualrl.errors import FileDamagedError, UsageError
from mutualrl.rollouts import pick
from mutualrl.storage.files import (
    JsonObject,
    read_checksummed,
    read_json,
    read_regular,
    remove_temporaries,
    write_atomic,
    write_checksummed,
    write_json,
)
from mutualrl.storage.format import FORMAT, other_format

REQUEST, COMPLETIONS = "request.json", "completions"
LARGEST_PART = 2**30  # bytes
_LEFTOVER = re.compile(r"\..*\.tmp")  # left by a killed writer

#: columns of a rollout and of its evaluation
SCHEMA = pa.schema(
    [
        *pick("policy", "round"),
        pa.field("task", pa.string(), nullable=False),
        pa.field("group", pa.string(), nullable=False),
        *pick("prompt_id", "rollout", "reward", "ended"),
        pa.field("too_long", pa.bool_(), nullable=False),
        pa.field("no_box", pa.bool_()),
        *pick("tokens", "x_text", "y_text", needed=("tokens", "x_text", "y_text")),
        pa.field("answer", pa.string(), nullable=False),
        *pick("token_ids", "messages"),
    ]
)


@dataclass(frozen=True, slots=True)
class CompletionPart:
    """One part of a model's completions on a task. `model_digest`: identity of the model; `prompts_sha256`: of the
    prompts' ids, in the part's order; `rows`: number of completions."""

    model: str
    model_digest: str
    task: str
    number: int
    prompts_sha256: str
    rows: int


class Store:
    """Completions of an evaluation on disk, `DIR/completions/MODEL/TASK.NNNNN.parquet`; not stored without DIR."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    @classmethod
    def open(cls, out: Path | None, request: JsonObject) -> Store:
        """Create the store of a request, or resume one of the same request.

        Raises UsageError when the directory has another evaluation, naming the differences, or other files.
        """
        if out is None:
            return cls(None)
        directory = user_path(out)
        if directory.exists() and not directory.is_dir():
            raise UsageError(f"--out {out} is a file, expected a directory")
        request = {"format": FORMAT, **request}
        stored = _stored(directory / REQUEST)
        if stored is None and directory.is_dir() and any(not _LEFTOVER.fullmatch(p.name) for p in directory.iterdir()):
            raise UsageError(f"--out {out} holds files that do not belong to an evaluation; name another directory")
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
                raise UsageError(f"--out {out} cannot be created: {error.strerror}") from None
            write_checksummed(directory / REQUEST, request, root=directory)
        remove_temporaries(directory)
        for completions in (directory / COMPLETIONS).glob("*"):
            remove_temporaries(completions)
        return cls(directory)

    def get(self, part: CompletionPart) -> list[JsonObject] | None:
        """Return the rows of a part; None if it does not exist. Raises FileDamagedError for a damaged part, or
        another part's file."""
        if self._directory is None:
            return None
        path = self._path(part)
        try:
            return _rows(path, part)
        except FileDamagedError as error:
            raise FileDamagedError(
                f"{error}; remove it and {_marker(path).name}, then run the same command to regenerate them"
            ) from None

    def put(self, part: CompletionPart, rows: Sequence[JsonObject]) -> None:
        """Write the rows of a part: the file, then its marker."""
        if self._directory is None:
            return
        path = self._path(part)
        path.parent.mkdir(parents=True, exist_ok=True)
        sink = io.BytesIO()
        pq.write_table(
            pa.Table.from_pylist(list(rows), schema=SCHEMA), sink, compression="zstd", write_page_checksum=True
        )
        data = sink.getvalue()
        write_atomic(path, data)
        write_checksummed(_marker(path), {**asdict(part), "sha256": hashlib.sha256(data).hexdigest()})

    def results(self, value: JsonObject, markdown: str) -> list[str]:
        """Write `results.json` and `results.md`; return the paths of all results."""
        if self._directory is None:
            return []
        write_json(self._directory / "results.json", value)
        write_atomic(self._directory / "results.md", (markdown + "\n").encode())
        return [str(self._directory / name) for name in ("results.json", "results.md", COMPLETIONS)]

    def _path(self, part: CompletionPart) -> Path:
        assert self._directory is not None
        return self._directory / COMPLETIONS / directory_name(part.model) / f"{part.task}.{part.number:05d}.parquet"


def _marker(path: Path) -> Path:
    """Return the path of a part's marker; the underscore hides it from readers of the directory as a data set."""
    return path.with_name(f"_{path.stem}.json")


def _stored(path: Path) -> JsonObject | None:
    """Return the stored request of a directory; None if there is none. Raises FileDamagedError."""
    value = read_json(path)
    if value is not None and (problem := other_format(value.get("format"), path)) is not None:
        raise FileDamagedError(problem)
    return read_checksummed(path, root=path.parent)


def _rows(path: Path, part: CompletionPart) -> list[JsonObject] | None:
    """Return the rows of a part's file after checking it against its marker."""
    marker = read_checksummed(_marker(path))
    if marker is None:  # killed between the two writes
        return None
    expected = asdict(part)
    for key, value in expected.items():
        if marker.get(key) != value:
            raise FileDamagedError(f"{path}: its {key} is {marker.get(key)!r}, expected {value!r}")
    try:
        data = read_regular(path, LARGEST_PART)
    except FileNotFoundError:
        raise FileDamagedError(f"{path}: missing, but its marker exists") from None
    if hashlib.sha256(data).hexdigest() != marker.get("sha256"):
        raise FileDamagedError(f"{path}: its checksum does not match its marker")
    try:
        rows: list[JsonObject] = pq.read_table(pa.BufferReader(data), schema=SCHEMA).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise FileDamagedError(f"{path}: not a readable part ({error})") from None
    if len(rows) != part.rows:
        raise FileDamagedError(f"{path}: {len(rows)} rows, expected {part.rows}")
    return rows


def directory_name(model: str) -> str:
    """Return a directory name for a model: its own name if valid, else one with a hash, so that no two models share
    a directory."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip(".-")[-80:]
    if plain == model:
        return plain
    return f"{plain}-{hashlib.sha256(model.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def identity(path: str, revision: str | None, trust_remote_code: bool) -> str:
    """Return the identity of a model: a hash of its files, or the commit of a hub model."""
    if Path(path).is_dir():
        return model_digest(path)
    from mutualrl.engines.transformers_engine import commit_of

    return f"{path}@{commit_of(path, revision=revision, trust_remote_code=trust_remote_code)}"

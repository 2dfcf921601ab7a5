"""Section `sources` of a recipe: members of the pool that publish and never learn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from mutualrl.references import POLICY_NAME, TINY, data_path, free_name, model_path
from mutualrl.section import PATHS, UPKEEP, Free, Section, UserFile, as_tuple
from mutualrl.traits import SourceTraits

Kind = Literal["recorded", "served", "frozen"]
Reasoning = Literal["keep", "drop"]
TASK = "task"  # recorded texts: the solutions in the task's own data

#: fields of a request that some servers refuse: null in `extra_body` leaves them out
OPTIONAL = ("seed", "max_tokens", "temperature")


def _recorded(value: str) -> str:
    """Return a reference to recorded texts; a path to a file or directory is made absolute."""
    return value if value == TASK or value.startswith(TINY) else data_path(Path(value))


def _endpoint(value: str) -> str:
    """Return the URL of an endpoint. Raises ValueError for one that is none, or that could hold a secret: the recipe is
    stored with the run."""
    try:
        parts = urlsplit(value)
        _ = parts.port  # raises for one above 65535
    except ValueError as error:
        raise ValueError(f"expected the URL of an endpoint, such as http://localhost:8000/v1 ({error})") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected the URL of an OpenAI-compatible endpoint, such as http://localhost:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            "expected a URL without user, password and query, which would be stored with the run; name the variable "
            "that has the key in api_key_env"
        )
    return value.rstrip("/")


class Columns(Section):
    """Columns of a recorded file that the user named; those left out are guessed."""

    id: str | None = Field(None, description="id of the prompt")
    prompt: str | None = Field(None, description="the prompt: a string or messages")
    text: Annotated[tuple[str, ...], BeforeValidator(as_tuple), Field(strict=False)] = Field(
        (), description="the response: a string, a list of strings or messages; or several columns"
    )
    ended: str | None = Field(None, description="false for a text that was cut off")
    verdict: str | None = Field(None, description="texts with a false one are left out; a true one proves nothing")

    @property
    def named(self) -> list[str]:
        """Return the columns that the user named."""
        return [name for name in (self.id, self.prompt, self.ended, self.verdict, *self.text) if name]


class _Source(Section):
    """What every kind of source has."""

    name: Annotated[str, Field(pattern=POLICY_NAME, max_length=64), AfterValidator(free_name)]
    learners: Annotated[tuple[str, ...], BeforeValidator(as_tuple), Field(strict=False)] = Field(
        (), description="policies that read it; empty: all"
    )

    @property
    def prices(self) -> tuple[float, float] | None:
        """Return the prices of a million tokens of questions and of answers; None without any."""
        return None

    @property
    def kind(self) -> Kind:
        """Return which kind of source it is."""
        return kind_of(type(self))

    @property
    def asked(self) -> bool:
        """Return whether it answers during training, in a process of its own."""
        return isinstance(self, AskedSource)


class RecordedSource(_Source):
    """Recorded texts: a file (Parquet, JSON Lines, CSV), a directory of files or of a run, `hub:OWNER/NAME`, or `task`
    (the solutions in the task's own data)."""

    recorded: Annotated[Annotated[str, AfterValidator(_recorded)], PATHS, UserFile(words=(TASK,))]
    columns: Columns = Columns()
    reasoning: Reasoning = Field("keep", description="blocks of reasoning (<think>) in the texts")
    max_texts: int | None = Field(None, ge=1, description="recorded: texts kept per prompt; null: all")
    allow_validation: bool = Field(False, description="recorded: accept a file that has mostly validation prompts")

    @property
    def traits(self) -> SourceTraits:
        """Return what it has besides texts and rewards."""
        return SourceTraits()


class AskedSource(_Source):
    """A model that answers during training."""

    ask: Literal["gated", "all"] | None = Field(
        None,
        description="gated: only prompts on which a learner failed; all: every prompt of a round. By default a served "
        "source is gated, a frozen one asked about all",
    )
    samples: int | None = Field(
        None, ge=1, le=1024, description="answers per prompt; null: 1 of a served source, a group of a frozen one"
    )
    temperature: float | None = Field(
        None, ge=0, le=10, description="null: the server's default; of a frozen source, the run's"
    )
    max_tokens: int | None = Field(
        None, ge=1, description="per answer; null: the longest trainer.max_completion_length of its learners"
    )
    column: str | None = Field(None, description="column of the data that names the source to ask about a row")
    weight: float | None = Field(
        None, gt=0, description="sources with a weight divide the prompts in this proportion; null: asked about each"
    )
    after: str | None = Field(None, description="another source: asked only where it has no confirmed text")
    on_source_loss: Annotated[Literal["continue", "fail"], UPKEEP] = Field(
        "continue", description="action where a question has no answer, or the source is lost"
    )

    @model_validator(mode="after")
    def _asked_once(self) -> AskedSource:
        if self.after is not None and self.weight is not None:
            raise ValueError(f"source {self.name!r}: found after and weight, expected one of them")
        return self

    @property
    def gated(self) -> bool:
        """Return whether it is asked only about prompts on which a learner failed."""
        return (self.ask or ("gated" if self.kind == "served" else "all")) == "gated"

    @property
    def traits(self) -> SourceTraits:
        """Return what it has besides texts and rewards. A part of the prompts is a selection, too."""
        whole = self.column is None and self.weight is None and self.after is None
        return SourceTraits(not self.gated and whole, logprobs=self.kind == "frozen")


Price = Annotated[float, Field(ge=0, strict=False)]


class ServedSource(AskedSource):
    """An OpenAI-compatible endpoint, by its URL."""

    served: Annotated[Annotated[str, AfterValidator(_endpoint)], Free.to("resume", "machines")]
    reasoning: Reasoning = Field("keep", description="blocks of reasoning (<think>) in the texts")
    model: str | None = Field(None, description="the server's name of the model; null: the only one that it lists")
    api: Literal["chat", "completions"] = Field("chat", description="endpoint that is asked")
    system: str | None = Field(None, description="system message of each question (api: chat)")
    extra_body: dict[str, object] = Field(
        {}, description="further fields of a request, as the server names them; null leaves out seed or max_tokens"
    )
    api_key_env: Annotated[str | None, UPKEEP] = Field(
        None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="environment variable that has the key"
    )
    concurrency: Annotated[int, UPKEEP] = Field(8, ge=1, le=1000, description="requests in flight")
    timeout: Annotated[float, UPKEEP] = Field(300.0, gt=0, description="seconds for one request, from start to end")
    retries: Annotated[int, UPKEEP] = Field(3, ge=0, le=100, description="repetitions of a request that failed")
    budget_tokens: Annotated[int | None, UPKEEP] = Field(
        None, ge=1, description="tokens of questions and answers, after which nothing more is asked; null: no limit"
    )
    price_per_million: Annotated[Annotated[tuple[Price, Price], Field(strict=False)] | None, UPKEEP] = Field(
        None, description="prices of a million tokens of questions and of answers, shown beside the tokens"
    )

    @property
    def prices(self) -> tuple[float, float] | None:
        """Return the prices of a million tokens of questions and of answers; None without any."""
        return self.price_per_million

    @model_validator(mode="after")
    def _request_is_ours(self) -> ServedSource:
        if self.system is not None and self.api != "chat":
            raise ValueError(f"source {self.name!r}: system is for api: chat; put it into the prompts, or leave it out")
        reserved = {"model", "messages", "prompt", "n", "seed", "stream", "max_tokens", "temperature"}
        left_out = {key for key in OPTIONAL if key in self.extra_body and self.extra_body[key] is None}
        if taken := sorted(reserved & self.extra_body.keys() - left_out):
            others = f"null leaves out {', '.join(OPTIONAL)}" if taken[0] in OPTIONAL else "leave it out"
            raise ValueError(f"source {self.name!r}: extra_body has {taken[0]!r}, which mutualrl sets; {others}")
        return self


class FrozenSource(AskedSource):
    """A model that is sampled and stays as it is."""

    frozen: Annotated[Annotated[str, AfterValidator(model_path)], PATHS, UserFile()]
    revision: Annotated[str | None, PATHS] = None
    trust_remote_code: bool = False


KINDS: Mapping[Kind, type[RecordedSource | ServedSource | FrozenSource]] = {
    "recorded": RecordedSource,
    "served": ServedSource,
    "frozen": FrozenSource,
}
#: every key of a source, in order
KEYS = tuple(dict.fromkeys(key for kind in KINDS.values() for key in kind.model_fields))


def kind_of(source: object) -> Kind:
    """Return the kind of a class of sources, of a source, or of one as a recipe has it: the first that it names."""
    for kind, section in KINDS.items():
        if source is section or isinstance(source, section):
            return kind
        if isinstance(source, dict) and source.get(kind) is not None:
            return kind
    return "recorded"


def _of_one_kind(value: object) -> object:
    """Check that a source is of one kind and has no key of another; `null` is no key. Raises ValueError."""
    if not isinstance(value, dict):
        return value
    name = value.get("name")
    kinds = [kind for kind in KINDS if value.get(kind) is not None]
    if len(kinds) != 1:
        found = "none" if not kinds else " and ".join(kinds)
        raise ValueError(f"source {name!r}: found {found}, expected one of: {', '.join(KINDS)}")
    own = KINDS[kinds[0]].model_fields
    for key in sorted(key for key in value if key in KEYS and key not in own and key not in KINDS):
        others = [kind for kind, section in KINDS.items() if key in section.model_fields]
        raise ValueError(
            f"source {name!r}: {key} is for sources that are {' or '.join(others)}, this one is {kinds[0]}; "
            "leave it out"
        )
    return {key: each for key, each in value.items() if key not in KINDS or each is not None}


#: a member of the pool that publishes rollouts and never learns; a key tells its kind
SourceSection = Annotated[
    Annotated[RecordedSource, Tag("recorded")]
    | Annotated[ServedSource, Tag("served")]
    | Annotated[FrozenSource, Tag("frozen")],
    Discriminator(kind_of),
    BeforeValidator(_of_one_kind),
]

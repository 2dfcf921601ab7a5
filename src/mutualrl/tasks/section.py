"""Section `task` of a recipe: prompts and rewards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mutualrl.process.plugins import FORM as IMPORT_FORM
from mutualrl.process.plugins import absolute_path, is_import_path
from mutualrl.references import data_path
from mutualrl.section import PATHS, Section, UserFile, as_tuple

if TYPE_CHECKING:
    from mutualrl.tasks.base import TaskSource, TurnsSpec

REWARD_FORM = "expected 'boxed', 'package.module:function' or 'path/to/file.py:function'"
UserPath = Annotated[str, AfterValidator(lambda value: data_path(Path(value)))]


def _reward(value: str) -> str:
    """Return `boxed`, or an import path; a path to a file is made absolute."""
    if value == "boxed":
        return value
    if not is_import_path(value):
        raise ValueError(f"found {value!r}, {REWARD_FORM}")
    return absolute_path(value)


def _importable(value: str) -> str:
    """Return an import path; a path to a file is made absolute."""
    if not is_import_path(value):
        raise ValueError(f"found {value!r}, expected {IMPORT_FORM}")
    return absolute_path(value)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


RewardPath = Annotated[str, AfterValidator(_reward)]
CodePath = Annotated[str, AfterValidator(_importable)]
Rewards = Annotated[tuple[RewardPath, ...], BeforeValidator(as_tuple), Field(strict=False)]
Tools = Annotated[tuple[CodePath, ...], BeforeValidator(as_tuple), Field(strict=False)]


class MemberSection(Section):
    """One task of a mixture. Omitted keys default to the mixture's."""

    data: Annotated[UserPath | None, PATHS, UserFile()] = None
    validation_data: Annotated[UserPath | None, PATHS, UserFile()] = None
    template: str | None = None
    answer: str = "answer"
    weight: float | None = Field(None, ge=0, description="relative weight in the training prompts; null: by size")


def _hold_out(value: object) -> object:
    """Return whether, or which fraction of, the training rows are held out. Raises ValueError for another value."""
    if isinstance(value, bool) or (isinstance(value, float) and 0 < value < 1):
        return value
    raise ValueError(f"found {value!r:.80}, expected true, false, or a fraction between 0 and 1, such as 0.25")


class TaskSection(Section):
    """Section `task`: prompts and rewards. `data` and `validation_data`, for tasks that read data: a file, a directory
    or `hub:OWNER/NAME`. `reward`: `boxed`, a TRL reward function by import path, or several (weighted by
    `trainer.reward_weights`). `template` and `answer` apply to task `dataset`, `members` to task `mixture`.
    `hold_out`: without an evaluation split, hold out this fraction of the training rows for validation (true: 1 in
    16); false refuses such data.
    `environment` and `tools`: TRL's `environment_factory` (a class) and `tools` (functions), by import path; rollouts
    then have several turns. With an environment, `reward` defaults to empty: the environment's `get_reward` is the
    reward."""

    name: str = "arithmetic"
    data: Annotated[UserPath | None, PATHS, UserFile()] = None
    validation_data: Annotated[UserPath | None, PATHS, UserFile()] = None
    hold_out: Annotated[bool | float, BeforeValidator(_hold_out)] = Field(
        True, description="without an evaluation split, validate on a fraction of the training rows; true: 1 in 16"
    )
    template: str | None = Field(None, description="prompt template, with {field} for a field of the row")
    answer: str = Field("answer", description="field of the row with the answer")
    members: dict[str, MemberSection] = Field({}, description="tasks of the mixture by name; empty: the paper's seven")
    max_prompt_tokens: int = Field(
        1024, ge=1, description="longer prompts, under any policy's tokenizer, are dropped for all"
    )
    reward: Annotated[Rewards, UserFile(code=True)] = ("boxed",)
    environment: Annotated[CodePath | None, UserFile(code=True)] = Field(
        None, description="class of TRL's environment_factory, by import path"
    )
    tools: Annotated[Tools, UserFile(code=True)] = Field(
        (), description="functions that the model may call, by import path"
    )

    @model_validator(mode="before")
    @classmethod
    def _default_environment_reward(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("environment") is not None:
            return {"reward": (), **value}
        return value

    @model_validator(mode="after")
    def _keys_match_task(self) -> TaskSection:
        if not self.reward and self.environment is None:
            raise ValueError(f"reward: found none; {REWARD_FORM}")
        if self.name != "mixture" and self.members:
            raise ValueError(f"members: only task 'mixture' has members; this is {self.name!r}")
        if self.name != "dataset" and (self.template is not None or self.answer != "answer"):
            raise ValueError(
                f"template, answer: only task 'dataset' has these keys; {self.name!r} has its own template"
            )
        if self.members:
            from mutualrl.tasks.registry import TASKS  # here: the tasks themselves take longer to import
        for name, member in self.members.items():
            if name not in TASKS or name == self.name:
                known = ", ".join(task for task in TASKS if task != self.name)
                raise ValueError(f"members: found {name!r}, expected one of: {known}")
            if name != "dataset" and (member.template is not None or member.answer != "answer"):
                raise ValueError(f"members.{name}: only task 'dataset' has template and answer")
        return self

    @property
    def has_turns(self) -> bool:
        """Return whether a rollout may have several turns: tools or an environment are set."""
        return self.environment is not None or bool(self.tools)

    @property
    def turns(self) -> TurnsSpec | None:
        """Return what its rollouts of several turns have; None for those of one turn."""
        from mutualrl.tasks.base import TurnsSpec

        return TurnsSpec(self.environment, self.tools) if self.has_turns else None

    def source(self, seed: int) -> TaskSource:
        """Return the task's data source."""
        from mutualrl.tasks.base import HELD_OUT, MixtureMember, TaskSource

        fraction = HELD_OUT if isinstance(self.hold_out, bool) else self.hold_out
        members = {
            name: MixtureMember(
                TaskSource(_path(m.data), _path(m.validation_data), seed, m.template, m.answer, hold_out=fraction),
                m.weight,
            )
            for name, m in self.members.items()
        }
        data, validation = _path(self.data), _path(self.validation_data)
        return TaskSource(data, validation, seed, self.template, self.answer, members, fraction)

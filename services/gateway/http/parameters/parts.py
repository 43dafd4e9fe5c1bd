"""The parts that parameters are made of."""

from __future__ import annotations

from typing import Annotated, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from galley.core.errors import InvalidField

_T = TypeVar("_T")

# A body of 4 MiB has a million entries: their checks end with the first that is wrong, else each becomes an
# error, which takes 10 s and 2 GB.
Few: TypeAlias = Annotated[list[_T], Field(fail_fast=True, max_length=1 << 10)]


class Open(BaseModel):
    """A part whose unknown parameters are kept in `model_extra`."""

    model_config = ConfigDict(extra="allow", strict=True)


class ContentPart(Open):
    type: str = Field(description="Must be `text`.")
    text: str | None = None


def text_of(content: str | list[ContentPart], name: str) -> str:
    """Return the text of parameter `name`. Raise InvalidField if it has other content."""
    if isinstance(content, str):
        return content
    for at, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise InvalidField(
                f"{name}[{at}]", f"must be of type text with a text, got type {part.type[:32]!r}"
            )
    return "".join(part.text or "" for part in content)

"""The grammar of a session's output, as its request gives it: a plain value, which imports no compiler."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, TypeAlias, get_args

Kind: TypeAlias = Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"]
KINDS: tuple[Kind, ...] = get_args(Kind)

HASH_BYTES = 16
_PERSON = b"galley.grm.v1"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """The language that the output must belong to.

    `text` is the schema, the regular expression, the choices as a JSON list, the grammar in Lark or GBNF, or
    the structural tag as JSON; empty for `json_object`. With `after_token` the grammar begins after the first
    such token of the output, which ends the model's reasoning.
    """

    kind: Kind
    text: str = ""
    after_token: int | None = None

    @property
    def content_hash(self) -> bytes:
        """Return the blake2b-128 by which gateways and replicas name this grammar."""
        after = b"" if self.after_token is None else str(self.after_token).encode()
        data = b"\0".join((self.kind.encode(), after, self.text.encode()))
        return blake2b(data, digest_size=HASH_BYTES, person=_PERSON).digest()

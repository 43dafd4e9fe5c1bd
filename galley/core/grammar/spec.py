"""The grammar of a session's output, as its request gives it: a plain value, which imports no compiler."""

from __future__ import annotations

from dataclasses import dataclass, field
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
    the structural tag as JSON; empty for `json_object`. With `after_token` the output begins with the model's
    reasoning, and the grammar after the first such token. With `opening_token` besides, the output either
    begins with this token and so with reasoning, or with the grammar.
    """

    kind: Kind
    text: str = ""
    after_token: int | None = None
    opening_token: int | None = None
    content_hash: bytes = field(init=False, compare=False, repr=False)
    """The blake2b-128 by which gateways and replicas name this grammar."""

    def __post_init__(self) -> None:
        head = f"{self.kind}\0{self.after_token}\0{self.opening_token}\0"
        digest = blake2b((head + self.text).encode(), digest_size=HASH_BYTES, person=_PERSON).digest()
        object.__setattr__(self, "content_hash", digest)  # every message to a replica has it

    @property
    def language(self) -> GrammarSpec:
        """Return the grammar alone, for an output that begins with it."""
        return self if self.after_token is None else GrammarSpec(self.kind, self.text)

    @property
    def reasons_first(self) -> bool:
        """Return True if the output begins with reasoning, whatever its first token is."""
        return self.after_token is not None and self.opening_token is None

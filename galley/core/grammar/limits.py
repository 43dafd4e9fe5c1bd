"""Bounds of grammars, and the error of one that is out of bounds or cannot be compiled."""

from __future__ import annotations

from dataclasses import dataclass

from galley.core.errors import InvalidField, ServerFault
from galley.core.grammar.spec import Kind

FIELD = "structured_output"


class InvalidGrammar(InvalidField):
    """A grammar that cannot be used; the message names its place in the request."""

    def __init__(self, kind: Kind, problem: str) -> None:
        super().__init__(f"{FIELD}.{kind}", problem)


class GrammarFailed(InvalidField):
    """The output reached a place where its grammar allows no token, or is too complex to continue."""

    def __init__(self, output_tokens: int) -> None:
        super().__init__(
            FIELD, f"must allow a next token within its limits, got none after {output_tokens} output tokens"
        )


class GrammarUnready(ServerFault):
    """The grammar must be compiled anew, and whoever asks may not wait for that."""

    def __init__(self) -> None:
        super().__init__("the grammar must be compiled anew")


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Bounds of one grammar. `*_bytes` count UTF-8.

    The last seven bound the work and memory of llguidance for one session: to compile its grammar, to read
    its output, and to compute a mask. Two of them bound a lexer, whoever uses it: it has at most so many
    states, of up to 2 KiB, and is made anew once half of `mask_fuel` is spent.
    """

    most_text_bytes: int = 64 * 1024
    most_regex_bytes: int = 8 * 1024
    most_choices: int = 1000
    most_depth: int = 64
    most_grammar_units: int = 1500
    most_reference_levels: int = 2000
    most_pattern_properties: int = 64
    most_grammar_symbols: int = 100_000
    most_items_in_row: int = 2000
    most_lexer_states: int = 12_000
    compile_fuel: int = 1_000_000
    output_fuel: int = 100_000
    mask_fuel: int = 400_000
    mask_items: int = 10_000


DEFAULT_LIMITS = GrammarLimits()

"""Grammars made to take long, and more of them than anybody needs."""

from __future__ import annotations

from galley.core.grammar.spec import GrammarSpec
from tests.attack import storms
from tests.attack.stack import MAX_SESSIONS, MIB, Attacked, unharmed
from tests.fakes.grammar_bombs import BOMBS, small_schema

# A gateway, a target and a draft keep 64 MiB of compiled grammars each.
MOST_KEPT = 3 * 80 * MIB


async def test_grammars_made_to_take_long_block_no_other(stack: Attacked) -> None:
    async with unharmed(stack, most_kept=MOST_KEPT):
        ends = await storms.grammars(stack.gateway, list(BOMBS.values()), MAX_SESSIONS // 2)
    assert ends["OK"]
    assert ends["INVALID_ARGUMENT"]
    assert ends.keys() <= {"OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}


async def test_schemas_that_all_differ_block_no_other(stack: Attacked) -> None:
    schemas = [small_schema(number) for number in range(300)]
    async with unharmed(stack, most_kept=MOST_KEPT):
        ends = await storms.grammars(stack.gateway, schemas, MAX_SESSIONS)
    assert ends == {"OK": len(schemas)}


async def test_long_outputs_of_grammars_that_count_block_no_other(stack: Attacked) -> None:
    """Each letter of such an output leads to a place of the grammar where nobody was before."""
    specs = [GrammarSpec("regex", f"[ -~]*a[ -~]{{{10 + number}}}~") for number in range(48)]
    async with unharmed(stack, most_kept=MOST_KEPT):
        ends = await storms.grammars(stack.gateway, specs, MAX_SESSIONS // 2, max_tokens=400)
    assert ends == {"OK": len(specs)}

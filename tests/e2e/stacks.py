"""Real processes for the end-to-end tests: one target, one Valkey, and a gateway for each draft."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from galley.client.client import AsyncClient
from galley.core import names
from galley.stack.part import Facts, PartSpec
from galley.stack.parts import python_module, stack_parts
from galley.stack.stack import Stack, StackDirs, StackOptions
from tests.e2e.matrix import SPOILS, Case

DRAFT_LAYERS = (0, 1, 28, 29)

# With credit 0, a proposal of the oracle that is always right is never late.
_CREDITS = {0.0: 0, 0.3: 4, 0.7: 32}


@dataclass(frozen=True, slots=True)
class Clients:
    """A client for each draft; `main` is the first gateway's, which has every draft but the oracles."""

    stack: Stack
    main: AsyncClient
    oracles: dict[float, AsyncClient]
    answers: Path

    def of(self, case: Case) -> AsyncClient:
        """Return the client whose draft has the strategy of the case."""
        return self.main if case.spoil is None else self.oracles[case.spoil]

    def teach(self, sequences: Sequence[Sequence[int]]) -> None:
        """Give the oracles prompts with the answers of the target."""
        with self.answers.open("a") as file:
            file.writelines(json.dumps({"tokens": list(tokens)}) + "\n" for tokens in sequences)


@asynccontextmanager
async def running_clients(
    folder: Path,
    draft_model: Path | None,
    *,
    model: str = "",
    dtype: str = "float32",
    gateways: int = 2,
    spoils: Sequence[float] = SPOILS,
) -> AsyncIterator[Clients]:
    """Start a whole stack, and an oracle draft and gateway for each of `spoils`; "" is the default model."""
    answers = folder / "answers.jsonl"
    answers.touch()
    options = StackOptions(
        model=model,
        dtype=dtype,
        gateways=gateways,
        draft_model=None if draft_model is None else str(draft_model),
        strategy=names.NGRAM,
        extra_args={
            "gateway": ["--draft-timeout-s", "30", "--audit-ratio", "0"],
            # As many draft tokens as the largest tree of `matrix.TREES` has.
            "target": ["--max-sessions", "64", "--max-draft-tokens", "32"],
        },
    )

    def parts(options: StackOptions, dirs: StackDirs) -> list[PartSpec]:
        oracles = [part for spoil in spoils for part in _oracle_parts(answers, spoil)]
        return [*stack_parts(options, dirs), *oracles]

    async with AsyncExitStack() as cleanup:
        stack = await cleanup.enter_async_context(Stack(options, parts=parts))
        main = await cleanup.enter_async_context(AsyncClient(stack.address("gateway")))
        oracles = {
            spoil: await cleanup.enter_async_context(AsyncClient(stack.address(_oracle_gateway(spoil))))
            for spoil in spoils
        }
        yield Clients(stack, main, oracles, answers)


def _oracle_gateway(spoil: float) -> str:
    return f"gateway-oracle-{spoil}"


def _oracle_parts(answers: Path, spoil: float) -> list[PartSpec]:
    """Return a draft that knows the answers and spoils its tokens at a rate, and its gateway."""
    draft = f"draft-oracle-{spoil}"

    def draft_command(facts: Facts) -> list[str]:
        return python_module(
            "services.draft",
            *("--tokenizer", facts["model"]["line"], "--default-strategy", names.ORACLE),
            *("--oracle-answers", str(answers), "--oracle-spoil", str(spoil)),
        )

    def gateway_command(facts: Facts) -> list[str]:
        return python_module(
            "services.gateway",
            *("--model", facts["model"]["line"]),
            *("--target", facts["target"]["address"], "--draft", facts[draft]["address"]),
            *("--redis-url", f"unix://{facts['valkey']['address']}", "--draft-timeout-s", "30"),
            *("--credit", str(_CREDITS[spoil]), "--audit-ratio", "0"),
        )

    return [
        PartSpec(draft, draft_command, after=("model",)),
        PartSpec(_oracle_gateway(spoil), gateway_command, after=("model", "valkey", "target", draft)),
    ]

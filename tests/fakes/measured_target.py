"""A target that measures its event loop: `python -m tests.fakes.measured_target FLAGS`.

It runs as in production, but without uvloop, and over an engine that computes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fakes.turns import measure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from galley.core.step import Sampled, StepPlan, StepTrace

CONTEXT, BLOCK_TOKENS, VOCAB, TOKEN = 1 << 17, 32, 50_000, 7
BLOCKS = 2 * CONTEXT // BLOCK_TOKENS
"""Two of the longest sessions."""


def main() -> None:
    measure()
    from galley.common.server.server import Prepared, run_main  # noqa: PLC0415  # after what it imports was replaced
    from galley.core.cost.model import StepTimes  # noqa: PLC0415
    from galley.core.step import Sampled  # noqa: PLC0415
    from services.target import __main__ as target  # noqa: PLC0415
    from services.target.settings import TargetSettings  # noqa: PLC0415
    from tests.fakes.engine import KnownEngine  # noqa: PLC0415

    class Idle(KnownEngine):
        """It draws the same token after any history."""

        def measure(self) -> StepTimes:
            return StepTimes.measured([(1, 1_000_000), (1024, 1_000_001)])

        def run(self, plan: StepPlan, watch: StepTrace | None = None) -> Sequence[Sampled | None]:  # type: ignore[override]
            return [Sampled((TOKEN,)) if chunk.draw is not None else None for chunk in plan.chunks]

    def load(_: object) -> Idle:
        return Idle(context_window=CONTEXT, vocab_size=VOCAB, kv_block_tokens=BLOCK_TOKENS, kv_blocks=BLOCKS)

    target.load_engine = load  # type: ignore[assignment,attr-defined]
    description = "A target that is measured."
    run_main(TargetSettings, "target", description, lambda settings: Prepared(target.build(settings)))


if __name__ == "__main__":
    main()

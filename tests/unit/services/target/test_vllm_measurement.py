"""The cost curve of a core that is measured at start."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from galley.core.errors import Broken
from galley.core.step import Draw
from services.target.engine.measurement import ROWS
from services.target.engine.vllm.measurement import measure
from services.target.engine.vllm.protocol import SequenceStep
from tests.fakes.stepped_core import StubCore

MS = 1_000_000


class Timed(StubCore):
    """Take 10 ms a step and 1 ms a row."""

    now = 0

    def step(
        self,
        drafts: Mapping[str, tuple[int, ...]],
        constrained: Mapping[str, Draw] | None = None,  # nobody has a grammar
    ) -> dict[str, SequenceStep]:
        before = self.rows
        steps = super().step(drafts)
        self.now += (10 + self.rows - before) * MS
        return steps


def test_steps_of_all_sizes_are_timed_with_prompts_read() -> None:
    core = Timed(blocks=2000, max_rows=512, max_sequences=32)
    times = measure(core, lambda: core.now)
    assert times.points == tuple((rows, (10 + rows) * MS) for rows in ROWS)
    assert core.ids == set()
    assert core.facts().used_blocks == 0


@pytest.mark.parametrize(
    ("blocks", "sequences", "drafts", "points"), [(50, 64, 8, 4), (2000, 4, 8, 6), (2000, 4, 0, 3)]
)
def test_steps_that_do_not_fit_are_left_out(blocks: int, sequences: int, drafts: int, points: int) -> None:
    core = Timed(blocks=blocks, max_rows=512, max_sequences=sequences, max_draft_tokens=drafts)
    assert len(measure(core, lambda: core.now).points) == points


def test_a_small_context_is_enough() -> None:
    core = Timed(blocks=4, context_window=16)
    assert measure(core, lambda: core.now).points == ((1, 11 * MS),)


def test_a_model_that_draws_nothing_is_refused() -> None:
    def draw(_: Draw) -> Broken:
        return Broken("the logits are NaN")

    with pytest.raises(Broken, match="NaN"):
        measure(StubCore(draw=draw))

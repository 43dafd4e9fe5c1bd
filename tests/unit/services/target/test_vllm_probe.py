"""What the probe of a started core finds, with cores that draw rightly and cores that do not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import pytest

from galley.core.errors import UnsupportedModel
from galley.core.records import PositionLogprobs
from galley.core.step import Draw, Sampled
from services.target.engine.protocol import EngineInfo
from services.target.engine.vllm.probe import probe
from services.target.engine.vllm.protocol import CoreFacts, NewSequence, SequenceStep

Defect = Literal[
    "",
    "accepts none",
    "accepts all",
    "goes on",
    "rounds by rows",
    "rounds by company",
    "no logits",
    "near tie",
    "forgets in a pause",
]
NEAR_TIE = 42  # the position at which draft rows change the token
INFO = EngineInfo(
    model="m",
    tokenizer_hash="",
    context_window=128,
    vocab_size=50,
    eos_token_ids=(),
    fingerprint="",
    deterministic=False,
    dtype="float32",
    device="cpu",
    ranks=1,
    kv_block_tokens=16,
    kv_blocks=64,
)


@dataclass
class FakeCore:
    """Draws a token that depends on the record alone; prompts take two steps."""

    defect: Defect = ""
    info: EngineInfo = INFO
    max_draft_tokens: int = 4
    max_sequences: int = 4
    records: dict[str, list[int]] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)

    def add(self, sequence: NewSequence) -> None:
        self.records[sequence.id] = list(sequence.tokens)
        self.fresh.add(sequence.id)

    def end(self, ids: Iterable[str]) -> None:
        for name in ids:
            del self.records[name]

    def step(
        self,
        drafts: Mapping[str, tuple[int, ...]],
        constrained: Mapping[str, Draw] | None = None,  # nobody has a grammar
    ) -> dict[str, SequenceStep]:
        if not drafts and self.defect == "forgets in a pause":
            for record in self.records.values():
                record.pop()
        return {name: self._step(name, tokens, len(drafts)) for name, tokens in drafts.items()}

    def _step(self, name: str, drafts: tuple[int, ...], company: int) -> SequenceStep:
        record = self.records[name]
        if name in self.fresh:
            self.fresh.remove(name)
            return SequenceStep(None, len(record) // 2)
        drawn = self._drawn(record, drafts)
        record += drawn
        rows = len(drafts) if self.defect == "rounds by rows" else 0
        rows += company if self.defect == "rounds by company" else 0
        listed = tuple(PositionLogprobs(-1.0 - rows / 8, ((token, -1.0),)) for token in drawn)
        outcome = UnsupportedModel("none") if self.defect == "no logits" else Sampled(tuple(drawn), listed)
        return SequenceStep(outcome, len(record) - 1)

    def _drawn(self, record: list[int], drafts: tuple[int, ...]) -> list[int]:
        drawn: list[int] = []
        for index in range(len(drafts) + 1):
            known = [*record, *drawn]
            drawn.append((sum(known) * 31 + len(known)) % self.info.vocab_size)
            if self.defect == "near tie" and drafts and len(known) == NEAR_TIE:
                drawn[-1] ^= 1
            if index == len(drafts) or self.defect == "accepts none":
                break
            if drawn[-1] != drafts[index] and self.defect != "goes on":
                if self.defect != "accepts all":
                    break
                drawn[-1] = drafts[index]
        return drawn

    def facts(self) -> CoreFacts:
        return CoreFacts(0)

    def close(self) -> None: ...


def test_a_right_core_is_deterministic_and_nothing_is_left() -> None:
    core = FakeCore()
    assert probe(core).deterministic
    assert not core.records
    assert probe(core).bits == probe(FakeCore()).bits


@pytest.mark.parametrize("most", [1, 2, 3, 128])
@pytest.mark.parametrize("window", [16, 40, 56, 60, 128])
def test_neither_the_most_draft_tokens_nor_the_window_changes_what_is_found(most: int, window: int) -> None:
    assert probe(FakeCore(info=replace(INFO, context_window=window), max_draft_tokens=most)).deterministic


def test_a_near_tie_keeps_no_replica_from_serving() -> None:
    for most in (1, 2, 3):
        assert probe(FakeCore("near tie", max_draft_tokens=most)).bits == probe(FakeCore()).bits


@pytest.mark.parametrize("defect", ["rounds by rows", "rounds by company"])
def test_bits_that_depend_on_a_step_are_reported(defect: Defect) -> None:
    assert not probe(FakeCore(defect)).deterministic


@pytest.mark.parametrize(
    ("defect", "message"),
    [
        ("accepts none", "must accept draft tokens that it would draw itself"),
        ("accepts all", "must refuse draft tokens that it would not draw itself"),
        ("goes on", "must end a draw at the first draft token that differs"),
        ("forgets in a pause", "must draw the same after a pause"),
        ("no logits", "must give logits for the probe's prompt"),
    ],
)
def test_a_core_that_verifies_wrongly_is_refused(defect: Defect, message: str) -> None:
    core = FakeCore(defect)
    with pytest.raises(UnsupportedModel, match=message):
        probe(core)
    assert not core.records

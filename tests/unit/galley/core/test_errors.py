"""What errors say, where more than a field and its bound matters."""

from __future__ import annotations

from galley.core.errors import TokenizerMismatch
from galley.core.store import OwnerChanged


def test_a_tokenizer_mismatch_names_both_hashes() -> None:
    assert str(TokenizerMismatch("aa", "bb")) == "tokenizer: must be the target's (bb), got aa at the draft"


def test_a_lost_race_for_a_session_says_what_to_do() -> None:
    assert "resume" in str(OwnerChanged("s"))

"""The names of the draft strategies, as they stand on the wire and in the configuration."""

from __future__ import annotations

MODEL = "model"
NGRAM = "ngram"
HYBRID = "hybrid"
ORACLE = "oracle"
NONE = "none"

STRATEGIES = (MODEL, NGRAM, HYBRID, ORACLE, NONE)

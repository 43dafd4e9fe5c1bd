"""The names of the draft strategies, as they stand on the wire and in the configuration."""

from __future__ import annotations

MODEL = "model"
NGRAM = "ngram"
HYBRID = "hybrid"
ORACLE = "oracle"
NONE = "none"
LOOKUP = "lookup"
"""At the gateway, where no draft can be asked; not to be had by name."""

STRATEGIES = (MODEL, NGRAM, HYBRID, ORACLE, NONE)

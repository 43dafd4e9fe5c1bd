"""How long `make bench-speculation` takes, from its plan: every block at plain decoding's pace. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from bench.arms import PEERS
from bench.speculation_options import CLOSED_FORM, SpeculationOptions
from galley.bench.closed_loop import Load

# The default target in bfloat16 with one thread, on two quiet cores: rows of a pass, and its seconds. What is
# reckoned with these is how long to wait, and no finding.
_PASS_ROWS = (1, 8, 16, 32)
_PASS_S = (0.020, 0.035, 0.050, 0.085)
_ROW_S = (_PASS_S[-1] - _PASS_S[-2]) / (_PASS_ROWS[-1] - _PASS_ROWS[-2])
_CHARS_A_TOKEN = 4
# Assisted generation's seconds a token beside plain decoding's here.
_PEER_TIMES = 3
# Answering, guessing and scoring a token of the closed form, in passes of one row.
_CLOSED_FORM_PASSES = 2


def estimate_s(loads: Sequence[Load], options: SpeculationOptions) -> float:
    """Seconds for all `loads` in their order, and the closed form; only the peer is fed a prompt again."""
    kept: set[str] = set()
    seconds = 0.0
    for load in loads:
        texts = {prompt.text for prompt in load.prompts}
        fed = texts if load.arm in PEERS else texts - kept
        kept |= fed if load.arm not in PEERS else set()
        seconds += _ROW_S * sum(map(len, fed)) / _CHARS_A_TOKEN + _decoding_s(load)
    if CLOSED_FORM in options.parts:
        seconds += _CLOSED_FORM_PASSES * _PASS_S[0] * options.heldout_prompts * options.heldout_tokens
    return seconds


def _decoding_s(load: Load) -> float:
    """Of streams that all take a row of each pass."""
    turns = ceil(len(load.prompts) / load.streams)
    beyond = max(0, load.streams - _PASS_ROWS[-1]) * _ROW_S
    times = _PEER_TIMES if load.arm in PEERS else 1
    pass_s = float(np.interp(load.streams, _PASS_ROWS, _PASS_S)) + beyond
    return times * turns * load.max_tokens * pass_s

"""The noise is the same integers everywhere: published vectors, committed vectors, and bounds on its values.

Rewrite the committed vectors with GALLEY_REWRITE_GOLDEN=1.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest

from galley.core import noise

GOLDEN = Path(__file__).parent / "golden" / "noise.json"

# philox4x32 10 of kat_vectors in Random123, the code published with Salmon et al., SC'11.
PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

CASES: list[dict[str, Any]] = [
    {"seed": seed, "position": position, "domain": domain, "tokens": tokens}
    for seed in (0, 1, 2**32, 0x0123456789ABCDEF, 2**64 - 1)
    for position, domain in ((0, 0), (1, 0), (4095, 0), (2**32 + 7, 0), (17, 1))
    for tokens in ([0, 1, 2, 3, 4, 49151, 128255, 2**32, 2**34 - 1],)
]


@pytest.mark.parametrize(("counter", "key", "expected"), PUBLISHED)
def test_published_vectors(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert tuple(noise.philox4x32(np.array(counter, dtype=np.uint32), key).tolist()) == expected


def test_committed_vectors() -> None:
    """Words to the bit; the noise, which two logarithms round, to 1e-6."""
    got = [case | _noise_of(case) for case in CASES]
    if os.environ.get("GALLEY_REWRITE_GOLDEN"):
        GOLDEN.write_text("[\n" + ",\n".join(json.dumps(case) for case in got) + "\n]\n")
    golden = json.loads(GOLDEN.read_text())
    assert [without_gumbel(case) for case in got] == [without_gumbel(case) for case in golden]
    for ours, theirs in zip(got, golden, strict=True):
        np.testing.assert_allclose(ours["gumbel"], theirs["gumbel"], rtol=0, atol=1e-6)


def _noise_of(case: dict[str, Any]) -> dict[str, Any]:
    of_words = noise.words(case["seed"], case["position"], case["tokens"], case["domain"])
    return {"words": of_words.tolist(), "gumbel": noise.gumbel(of_words).tolist()}


def without_gumbel(case: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in case.items() if name != "gumbel"}


def test_words_are_the_designs_counter_layout() -> None:
    """Key = (seed_lo, seed_hi), counter = (token >> 2, position_lo, position_hi, domain), word token & 3."""
    seed, position, token, domain = 0xAAAAAAAA_BBBBBBBB, 0xCCCC_DDDDDDDD, 4 * 1234 + 3, 7
    counter = np.array([1234, 0xDDDDDDDD, 0xCCCC, 7], dtype=np.uint32)
    expected = noise.philox4x32(counter, (0xBBBBBBBB, 0xAAAAAAAA))[3]
    assert noise.words(seed, position, [token], domain).tolist() == [expected]


@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**64 - 1),
    tokens=st.lists(st.integers(0, 2**34 - 1), max_size=9),
    domain=st.integers(0, 2**32 - 1),
)
def test_a_word_depends_on_its_own_token_alone(
    seed: int, position: int, tokens: list[int], domain: int
) -> None:
    together = noise.words(seed, position, tokens, domain)
    alone = [int(noise.words(seed, position, [token], domain)[0]) for token in tokens]
    assert together.tolist() == alone
    blocks = noise.block_words(seed, position, np.array(tokens, dtype=np.int64) >> 2, domain)
    assert [int(block[token & 3]) for block, token in zip(blocks, tokens, strict=True)] == alone


def test_noise_of_a_word_does_not_depend_on_its_company() -> None:
    """Vectorised logarithms must not round the odd ends of an array otherwise."""
    of_words = noise.words(3, 5, range(1001))
    assert noise.gumbel(of_words).tolist() == [
        float(noise.gumbel(of_words[i : i + 1])[0]) for i in range(1001)
    ]


def test_noise_is_finite_and_bounded_at_the_extreme_words() -> None:
    at_ends = noise.gumbel(np.array([0, 1, 2**32 - 2, 2**32 - 1], dtype=np.uint32))
    assert np.isfinite(at_ends).all()
    assert at_ends[0] == pytest.approx(noise.GUMBEL_MAX, abs=1e-12)
    assert at_ends[3] == pytest.approx(noise.GUMBEL_MIN, abs=1e-12)
    assert (np.diff(at_ends) < 0).all()
    assert math.log(33 * math.log(2)) == pytest.approx(-noise.GUMBEL_MIN)


def test_noise_is_finite_over_a_million_words() -> None:
    of_words = noise.block_words(11, 13, np.arange(250_000)).ravel()
    of_noise = noise.gumbel(of_words)
    assert np.isfinite(of_noise).all()
    assert of_noise.min() >= noise.GUMBEL_MIN - 1e-9
    assert of_noise.max() <= noise.GUMBEL_MAX + 1e-9
    assert kstest(of_noise, "gumbel_r").pvalue > 1e-4


def test_seed_position_token_and_domain_all_matter() -> None:
    base = noise.words(1, 1, range(8)).tolist()
    others = [
        noise.words(2, 1, range(8)),
        noise.words(1 + 2**32, 1, range(8)),
        noise.words(1, 2, range(8)),
        noise.words(1, 1 + 2**32, range(8)),
        noise.words(1, 1, range(8, 16)),
        noise.words(1, 1, range(8), noise.SPOIL),
    ]
    assert all(base != other.tolist() for other in others)
    assert len(set(base)) == 8


@pytest.mark.parametrize("token", [-1, 2**34])
def test_a_token_beyond_the_counter_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match=r"token_ids: must be in \[0, 2\*\*34\)"):
        noise.words(0, 0, [token])


@pytest.mark.parametrize(("seed", "position"), [(-1, 0), (2**64, 0), (0, -1), (0, 2**64)])
def test_a_seed_or_position_beyond_64_bits_is_refused(seed: int, position: int) -> None:
    with pytest.raises(ValueError, match=r"must be in \[0, 2\*\*64\)"):
        noise.words(seed, position, [0])

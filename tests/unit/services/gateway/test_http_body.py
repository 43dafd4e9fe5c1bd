"""The JSON of large bodies: read in pieces, to the same value, and refused where it holds too much."""

from __future__ import annotations

import asyncio
import json
from array import array
from typing import Any

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from services.gateway.http.transport import body as module
from services.gateway.http.transport.body import MOST_IDS, read_json
from services.gateway.http.transport.errors import Refused

MIB = 1 << 20

_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**60), 2**60),
    st.text(max_size=8),
    st.sampled_from(['"', "\\", '],"']),
)
_values = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=6),
        st.dictionaries(st.sampled_from(["prompt", "tokens", "a\\", 'b"']), inner),
    ),
    max_leaves=20,
)
_ids = st.lists(st.integers(0, 99), max_size=30)
_bodies = st.dictionaries(
    st.sampled_from(["prompt", "tokens", "user", '"prompt"', "x"]), st.one_of(_values, _ids, st.lists(_ids))
)


@pytest.mark.parametrize(
    "number", ["1e400", "-1E+309", "1" + "0" * 400 + ".0", "1" + "0" * 309, "-" + "9" * 4300]
)
async def test_a_number_beyond_a_double_is_refused(number: str) -> None:
    with pytest.raises(ValueError, match="a number is too large"):
        await read_json(b'{"a": [{"b": %b}]}' % number.encode())
    kept = {"a": "1e400", "b": 1e300, "c": -(10**308)}
    assert await read_json(json.dumps(kept).encode()) == kept


async def read(body: bytes) -> Any:
    """Return the value of a body with lists in place of arrays."""
    value = await read_json(body)
    for name in ("prompt", "tokens"):
        if isinstance(value, dict) and isinstance(value.get(name), array):
            value[name] = value[name].tolist()
        elif isinstance(value, dict) and isinstance(value.get(name), list):
            value[name] = [one.tolist() if isinstance(one, array) else one for one in value[name]]
    return value


def parsed_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of the sizes that will be parsed at once."""
    sizes: list[int] = []
    parse = module._parse

    def recorded(data: bytes) -> Any:
        sizes.append(data.count(b",") + data.count(b"[") + data.count(b"{"))
        return parse(data)

    monkeypatch.setattr(module, "_parse", recorded)
    return sizes


@seed(1)
@settings(max_examples=150, deadline=None, database=None)
@given(_bodies, st.integers(1, 9), st.sampled_from([None, 1]))
def test_a_body_in_pieces_is_the_same_value(value: dict[str, Any], piece: int, indent: int | None) -> None:
    body = json.dumps(value, indent=indent).encode()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_SMALL_BYTES", 0)
        patched.setattr(module, "_PIECE_BYTES", piece)
        assert asyncio.run(read(body)) == value


@pytest.mark.parametrize("form", ["[%s]", "[[1],[%s],[]]", "[ [%s] , [7] ]"])
@pytest.mark.parametrize("name", ["prompt", "tokens"])
async def test_long_lists_of_ids_are_parsed_in_pieces(
    monkeypatch: pytest.MonkeyPatch, form: str, name: str
) -> None:
    sizes = parsed_sizes(monkeypatch)
    ids = ",".join(map(str, range(200_000)))
    before = f'"user": "\\"{name}\\": [", "workload": "{name}"'
    body = f'{{{before}, "{name}": {form % ids}, "seed": 7}}'.encode()
    assert await read(body) == json.loads(body)
    assert max(sizes) < 40_000


async def test_what_looks_like_ids_elsewhere_is_read_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    filler = "x" * 100_000
    for body in (
        {"metadata": {"prompt": [1, 2]}, "prompt": [3, 4], "user": filler},
        {"metadata": {"prompt": [1, 2]}, "user": filler},
        {"prompt": "\x00ids", "tokens": [1], "user": filler},
        {"prompt": ["a]", ",b", "[1"], "user": filler},
    ):
        assert await read(json.dumps(body).encode()) == body


@pytest.mark.parametrize(
    ("entry", "count", "problem"),
    [
        ("1", MOST_IDS + 1, f"^{{name}}: must have at most {MOST_IDS} token ids"),
        ("[]", 100_000, "values"),
        ('"a"', 300_000, "values"),
        ('{"a":{}}', 60_000, "values"),
    ],
)
@pytest.mark.parametrize("name", ["prompt", "tokens"])
async def test_a_body_that_holds_too_much_is_refused_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch, name: str, entry: str, count: int, problem: str
) -> None:
    sizes = parsed_sizes(monkeypatch)
    body = f'{{"{name}": [{",".join([entry] * count)}]}}'.encode()
    with pytest.raises(Refused, match=problem.replace("{name}", name)):
        await read_json(body)
    assert max(sizes, default=0) < 40_000


async def test_long_numbers_are_refused_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, long = parsed_sizes(monkeypatch), "9" * 4300
    with pytest.raises(ValueError, match="a number is too large"):
        await read_json(f'{{"metadata": [{",".join([long] * 950)}]}}'.encode())
    assert not sizes
    body = {"metadata": [1e-300, int(long[:308])] * 1000, "user": long}
    assert await read(json.dumps(body).encode()) == body


async def test_many_names_of_objects_are_refused() -> None:
    body = json.dumps({"metadata": {f"name {index}": 1 for index in range(20_000)}}).encode()
    with pytest.raises(Refused, match="names of objects"):
        await read_json(body)


async def test_texts_count_as_one_value_whatever_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ('[{,:"' * (MIB // 8), "\\" * MIB, '\\"' * (MIB // 2), "a" * MIB):
        body = {"messages": [{"role": "user", "content": text}]}
        assert await read(json.dumps(body).encode()) == body


@pytest.mark.parametrize(
    "body", [b"{" * 70_000, b'{"prompt": [1' + b",1" * 40_000, b'"' + b"a" * 70_000, b"\\" * 70_000]
)
async def test_what_is_no_json_is_a_value_error(body: bytes) -> None:
    with pytest.raises((ValueError, Refused)):
        await read_json(body)

"""Reading metrics over HTTP: what is read, and what nobody may do to the reader."""

from __future__ import annotations

import asyncio
from socket import AF_INET, AF_INET6
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galley.cli.top import named_by_address
from galley.common.sockets import host_and_port
from galley.top import scrape as scraping
from galley.top.scrape import Away, read_samples, scrape
from tests.fakes.metric_servers import answering, serve_texts, unused_address
from tests.unit.galley.top.sample import services, text

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n"


@pytest.mark.parametrize("at", range(4))
async def test_a_scrape_is_what_the_exposition_says(at: int) -> None:
    reported = text(services()[at], 1)
    with serve_texts(reported) as address:
        samples = await scrape(address)
    assert samples == read_samples(reported)
    lines = [line for line in reported.splitlines() if not line.startswith("#")]
    assert sum(map(len, samples.values())) == len(lines) > 30


def test_openmetrics_with_exemplars_is_read_too() -> None:
    output = (
        "# TYPE galley_round_duration_seconds histogram\n"
        'galley_round_duration_seconds_bucket{le="1.0"} 7 # {trace_id="ab",span_id="cd"} 0.3 1.7e9\n'
        "galley_rounds_total 3.0\n# EOF\n"
    )
    assert read_samples(output) == {
        "galley_round_duration_seconds_bucket": {(("le", "1.0"),): 7},
        "galley_rounds_total": {(): 3},
    }


def test_numbers_that_are_none_and_metrics_of_others_are_left_out() -> None:
    output = 'galley_a 1\ngalley_b NaN\ngalley_c +Inf\npython_info 3\ngalley_d{w="x"} -2e3\n'
    assert read_samples(output) == {"galley_a": {(): 1}, "galley_d": {(("w", "x"),): -2000}}


def test_control_codes_are_replaced() -> None:
    (labels,) = read_samples('galley_a{w="\x1b[2J[red]\u202e"} 1\n')["galley_a"]
    assert labels == (("w", "\ufffd[2J[red]\ufffd"),)
    (labels,) = read_samples(f'galley_a{{w="{"x" * 500}"}} 1\n')["galley_a"]
    assert labels == (("w", "x" * (scraping.MAX_TEXT - 1) + "…"),)


@pytest.mark.parametrize(
    "reported",
    ["galley_a{", "galley_a", "galley_a x", 'galley_a{w="x} 1', "galley_a " + "9" * 400, 'galley_{=","} 1'],
)
def test_unreadable_line_is_reported(reported: str) -> None:
    with pytest.raises(Away, match="unreadable"):
        read_samples(reported)


@settings(max_examples=300)
@given(st.text(alphabet='{}=,"\\ abé#\t019.eE+-_NInf', max_size=60))
def test_arbitrary_lines_parse_or_raise(suffix: str) -> None:
    try:
        read_samples("galley_" + suffix)
    except Away:
        return


def test_the_number_and_the_length_of_lines_are_bounded() -> None:
    many = "".join(f'galley_a{{n="{n}"}} 1\n' for n in range(scraping.MAX_ROWS + 1))
    with pytest.raises(Away, match="over 10000 lines"):
        read_samples(many)
    with pytest.raises(Away, match="a line over 4096 characters"):
        read_samples('galley_a{w="' + '"' * scraping.MAX_LINE + '"} 1')


async def test_unreachable_service_is_reported_at_once() -> None:
    with pytest.raises(Away, match="refused"):
        await scrape(unused_address())


async def test_other_http_status_is_reported() -> None:
    with serve_texts("galley_a 1\n", status=503) as address, pytest.raises(Away, match="HTTP 503"):
        await scrape(address)


@pytest.mark.parametrize(
    "sent", [b"", b"\x00\x01 nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Le", b"\r\n" * 9]
)
async def test_invalid_http_is_reported(sent: bytes) -> None:
    def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        writer.close()

    async with answering(answer) as address:
        with pytest.raises(Away, match=r"not a whole HTTP|cannot be read|broke|reset"):
            await scrape(address)


async def test_an_answer_that_never_ends_in_time_is_given_up() -> None:
    async with answering(lambda writer: writer.write(HEAD + b"galley_a 1\n")) as address:
        with pytest.raises(Away, match=r"no response in 0\.2 s"):
            await scrape(address, 0.2)


async def test_an_answer_without_end_is_cut_off() -> None:
    async with answering(lambda writer: writer.write(HEAD + b"x" * (scraping.MAX_BYTES + 1))) as address:
        with pytest.raises(Away, match="more than 2 MiB"):
            await scrape(address)


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:", ":1", "host:0", "host:65536", "host:1x", "::1:9", "[::1]", "host:" + "9" * 5000],
)
def test_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="must be host:port"):
        host_and_port(address)


def test_addresses() -> None:
    assert host_and_port("[::1]:9464") == ("::1", 9464)
    assert [one.metrics for one in named_by_address("a:1, b:2,,a:1")] == ["a:1", "b:2"]
    with pytest.raises(ValueError, match="at least one address"):
        named_by_address(" , ")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (["10.0.0.2", "10.0.0.1", "fd00::1", "10.0.0.1"], ["10.0.0.1:9464", "10.0.0.2:9464"]),
        (["fd00::2", "fd00::1"], ["[fd00::1]:9464", "[fd00::2]:9464"]),
        (["127.0.0.1", "::1"], ["pods:9464"]),
        (None, ["pods:9464"]),
    ],
)
def test_a_name_of_several_pods_stands_for_each(
    monkeypatch: pytest.MonkeyPatch, found: list[str] | None, expected: list[str]
) -> None:
    def look_up(host: str, port: int, **_: object) -> list[Any]:
        assert (host, port) == ("pods", 9464)
        if found is None:
            raise OSError("no such name")
        families = [AF_INET6 if ":" in one else AF_INET for one in found]
        return [(family, 1, 6, "", (one, port)) for family, one in zip(families, found, strict=True)]

    monkeypatch.setattr("galley.cli.top.getaddrinfo", look_up)
    assert [one.metrics for one in named_by_address("pods:9464")] == expected

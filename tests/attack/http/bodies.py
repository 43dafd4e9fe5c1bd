"""Bodies that are no JSON, or JSON that no honest caller sends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.attack.stack import MAX_MESSAGE_BYTES
from tests.fakes.http_client import BODY, CHAT

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
_ROOM = MAX_MESSAGE_BYTES - 400
_SURROGATE = '"\\ud800"'


def _filled(piece: str) -> str:
    return f"[{','.join([piece] * (_ROOM // (len(piece) + 1)))}]"


def _raw(name: str, value: str, base: dict[str, Any] = BODY) -> bytes:
    kept = {key: given for key, given in base.items() if key != name}
    return json.dumps(kept).encode()[:-1] + f',"{name}":{value}}}'.encode()


def refused() -> Iterator[tuple[str, str, bytes]]:
    """Yield a name, a path and a body that must be refused with 400."""
    texts: dict[str, bytes] = {
        "nothing": b"",
        "a word": b"null",
        "a list": b"[]",
        "half": b'{"prompt": "a"',
        "deep lists": b"[" * (_ROOM // 2),
        "deep objects": b'{"a":' * (_ROOM // 6),
        "no UTF-8": b'{"prompt": "\xff\xfe"}',
        "surrogates in UTF-8": b'{"prompt": "\xed\xa0\x80"}',
        "UTF-16": json.dumps(BODY).encode("utf-16"),
        "a list of lists": b'{"prompt": ' + b"[" + b"[]," * (_ROOM // 4) + b"[]]}",
    }
    for name, body in texts.items():
        yield name, COMPLETIONS, body
    digits = "9" * 5000
    for name in ("temperature", "seed", "max_tokens", "top_k", "n"):
        for value in (digits, f"-{digits}", "1e999", "NaN", "-Infinity", "[]", "{}", '"1"', _filled("1")):
            yield f"{name} {value[:9]}", COMPLETIONS, _raw(name, value)
    for name in ("prompt", "stop", "workload", "idempotency_key", "model"):
        yield f"{name} of a lone surrogate", COMPLETIONS, _raw(name, _SURROGATE)
    yield "ids of a lone surrogate", COMPLETIONS, _raw("prompt", f"[{_SURROGATE}]")
    yield "a name of a lone surrogate", COMPLETIONS, _raw("a", "1").replace(b'"a"', _SURROGATE.encode())
    for piece in ("-1", "1.5", '""', "null", "[1]", "[-1]", "{}", "99999999999", "4294967295"):
        for name in ("prompt", "stop", "stop_token_ids", "logit_bias"):
            yield f"{name} of {piece}", COMPLETIONS, _raw(name, _filled(piece))
    for piece in ("1", "{}", '{"role":1}', '{"role":"user","content":[{}]}', '{"role":"user"}'):
        yield f"messages of {piece}", CHATS, _raw("messages", _filled(piece), CHAT)
    parts = f'[{{"role":"user","content":{_filled("{}")}}}]'
    yield "parts of nothing", CHATS, _raw("messages", parts, CHAT)
    names = ",".join(f'"{index}":1' for index in range(_ROOM // 10))
    for name in ("logit_bias", "speculation"):
        yield f"{name} of many names", COMPLETIONS, _raw(name, "{" + names + "}")
    echoed = _raw("echo", "true")[:-1] + b',"prompt":' + _filled("4294967295").encode() + b"}"
    yield "ids beyond the vocabulary to echo", COMPLETIONS, echoed
    yield "ids beyond the vocabulary", "/detokenize", f'{{"tokens":{_filled("4294967295")}}}'.encode()
    yield "ids of text", "/detokenize", f'{{"tokens":{_filled("null")}}}'.encode()
    yield "a prompt and messages", "/tokenize", b'{"prompt":"a","messages":[]}'


def served() -> Iterator[tuple[str, str, bytes]]:
    """Yield bodies that are unusual, and must be answered."""
    yield "zeros", COMPLETIONS, _raw("prompt", '"a\\u0000b"')
    yield "a name twice", COMPLETIONS, _raw("seed", "1")[:-1] + b',"seed":2}'
    yield (
        "many unknown names",
        COMPLETIONS,
        _raw("metadata", "{" + ",".join(f'"{index}":1' for index in range(_ROOM // 10)) + "}"),
    )
    yield "a pair of surrogates", COMPLETIONS, _raw("prompt", '"\\ud83d\\ude80"')
    yield "spaces", COMPLETIONS, b" " * 1000 + json.dumps(BODY).encode() + b"\n" * 1000

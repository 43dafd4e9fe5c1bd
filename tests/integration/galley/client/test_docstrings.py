"""The example in the docstring of each public method runs, and shows what it prints."""

from __future__ import annotations

import ast
import contextlib
import doctest
import inspect
import io
from collections.abc import Iterator
from typing import Any

import pytest

from galley import AsyncClient, AsyncStream, Client, Stream
from galley.client import client as client_module
from tests.fakes.gateway import FakeGateway, serving

ADDRESS = '"127.0.0.1:50051"'


def documented() -> Iterator[tuple[str, Any]]:
    for kind in (Client, AsyncClient, Stream, AsyncStream):
        yield kind.__name__, kind
        for name, member in vars(kind).items():
            if kind in (Client, AsyncClient) and inspect.isfunction(member) and not name.startswith("_"):
                yield f"{kind.__name__}.{name}", member


DOCUMENTED = dict(documented())
WITHOUT_EXAMPLE = {"Client.close", "AsyncClient.close", "AsyncClient.resume_stream"}


@pytest.mark.parametrize("name", sorted(DOCUMENTED.keys() - WITHOUT_EXAMPLE))
async def test_example(name: str) -> None:
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(DOCUMENTED[name]) or "")
    assert examples, "each method has an example"
    with serving(FakeGateway()) as address:
        sync = Client(address)
        client = AsyncClient(address) if name.startswith("Async") else sync
        names: dict[str, Any] = {**vars(client_module), "Client": Client, "client": client}
        for example in examples:
            printed = await run(example.source.replace(ADDRESS, repr(address)), names)
            assert printed.strip() == example.want.strip()
        if isinstance(client, AsyncClient):
            await client.close()
        sync.close()


async def run(source: str, names: dict[str, Any]) -> str:
    """Return what a notebook shows for `source`: the value of an expression, else what it prints."""
    tree = ast.parse(source)
    is_expression = isinstance(tree.body[-1], ast.Expr)
    node: Any = ast.Expression(tree.body[-1].value) if isinstance(tree.body[-1], ast.Expr) else tree
    code = compile(node, "<docstring>", "eval" if is_expression else "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        value = eval(code, names)
        if inspect.iscoroutine(value):
            value = await value
    return out.getvalue() + ("" if value is None else repr(value))

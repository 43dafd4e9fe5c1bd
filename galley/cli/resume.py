"""`galley resume`: continue an answer that was cut off."""

from __future__ import annotations

from typing import Annotated

import typer

from galley.cli.flags import AsJson, Connection, Origins, Timeout, with_connection_flags


@with_connection_flags
def resume(
    session_id: Annotated[str, typer.Argument(help="The session id that `galley generate` printed.")],
    *,
    connection: Connection,
    next_index: Annotated[
        int, typer.Option(min=0, help="The first output token to show; 0 shows the whole answer.")
    ] = 0,
    timeout: Timeout = None,
    as_json: AsJson = False,
    origins: Origins = False,
) -> None:
    """Continue an answer that was cut off, at any gateway of the same store."""
    from galley.cli.answer import show_stream, view_of  # noqa: PLC0415  # grpc is slow to load

    show_stream(
        connection,
        lambda client: client.resume(session_id, next_index, timeout_s=timeout),
        view_of(as_json=as_json, origins=origins),
        summary=not as_json,
    )

"""`galley plan --capacity FILE`: the targets, drafts and gateways that the load in a TOML file needs."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import typer
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked
from rich.console import Console
from rich.table import Table

from galley.core.cost.model import RowCostCurve
from galley.core.errors import InvalidField
from galley.core.kv.blocks import BLOCK_TOKENS
from galley.plan.capacity import (
    NO_DRAFT,
    Capacity,
    DraftSize,
    KvMemory,
    Load,
    Spares,
    TargetSize,
    capacity,
)

T = TypeVar("T")

_OPTION = "--capacity"
_GIB = 2**30
_TABLES = ("load", "target", "draft", "spares")
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class _Case:
    load: Load
    target: TargetSize
    draft: DraftSize
    spares: Spares
    gpus: int | None  # of a target


def plan_capacity(path: Path, *, as_json: bool) -> None:
    """Print what the load in the file needs. Raises typer.BadParameter with the key and its bound."""
    try:
        case = _read_case(_read(path))
        found = capacity(case.load, case.target, case.draft, case.spares)
    except InvalidField as fault:
        raise typer.BadParameter(f"{path}: {fault}", param_hint=_OPTION) from fault
    if as_json:
        typer.echo(json.dumps(_as_dict(found, case)))
    else:
        _print(found, case)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror}", param_hint=_OPTION) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path}: must be TOML: {error}", param_hint=_OPTION) from error


def _read_case(tables: dict[str, Any]) -> _Case:
    """Return the case; keys are the fields of the classes in `galley.plan.capacity`. Raises InvalidField."""
    for name, table in tables.items():
        if name not in _TABLES:
            raise InvalidField(name, f"must be one of {', '.join(_TABLES)}")
        if not isinstance(table, dict):
            raise InvalidField(name, "must be a table")
    target = dict(tables.get("target", {}))
    memory = None
    if ("kv_tokens" in target) == ("memory" in target):
        raise InvalidField("target", "needs either kv_tokens or [target.memory]")
    if "memory" in target:
        memory = _read_as(KvMemory, target.pop("memory"), "target.memory")
        target["kv_tokens"] = memory.tokens()
    if "row_costs" in target:
        target["row_costs"] = RowCostCurve.parse(str(target["row_costs"]))
    return _Case(
        _read_as(Load, tables.get("load", {}), "load"),
        _read_as(TargetSize, target, "target"),
        _read_as(DraftSize, tables["draft"], "draft") if "draft" in tables else NO_DRAFT,
        _read_as(Spares, tables.get("spares", {}), "spares"),
        memory.gpus if memory is not None else None,
    )


def _read_as(what: type[T], table: object, name: str) -> T:
    try:
        strict = checked(what, config=_STRICT, frozen=True)
        return cast("T", TypeAdapter(strict).validate_python(table))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join((name, *(str(part) for part in problem["loc"])))
        raise InvalidField(where, problem["msg"]) from error


def _as_dict(found: Capacity, case: _Case) -> dict[str, Any]:
    whole = asdict(found) | {"kv_blocks_a_target": case.target.kv_tokens // BLOCK_TOKENS}
    return whole if case.gpus is None else whole | {"target_gpus": case.gpus * found.targets}


def _print(found: Capacity, case: _Case) -> None:
    spares, gpus = case.spares, case.gpus
    blocks = case.target.kv_tokens // BLOCK_TOKENS
    at, spare = found.at, f"{spares.replicas} of them spare" if spares.replicas else ""
    table = Table(title="What the load needs", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    devices = "" if gpus is None else f"{gpus * found.targets} GPUs; "
    for row in (
        ("targets", str(found.targets), devices + spare),
        ("drafts", str(found.drafts), spare if found.drafts else "no draft token pays"),
        ("gateways", str(found.gateways), spare),
        ("sessions at once", f"{found.sessions:.0f}", ""),
        ("memory of the store", f"{found.store_bytes / _GIB:.2f} GiB", "beside Redis' own"),
    ):
        table.add_row(*row)
    Console().print(table)
    bound = {"time": "time per output token", "kv": "KV blocks", "max_sessions": "max_sessions"}
    for line in (
        f"A full target: {at.sessions} sessions at k={at.k} (bound by {bound[found.bound_by]}),",
        (
            f"  {at.tokens_per_s:.0f} tokens/s, {at.time_per_output_token_ms:.1f} ms a token, "
            f"{found.answers_per_s_a_target:.2f} answers/s, {blocks} KV blocks."
        ),
        f"Replicas are counted at {spares.busy:.0%} of that.",
    ):
        typer.echo(line)

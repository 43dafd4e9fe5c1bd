"""What Grafana's own types (its Foundation SDK, made of its schemas) say of our dashboards.

They drop what they do not know, and take a value of any kind: so what is read is written again and compared,
and each value is held against the type that its field has.
"""

from __future__ import annotations

import copy
import json
import typing
from collections.abc import Iterator
from enum import Enum
from types import UnionType
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.fakes.promql import dashboards

register_default_plugins()


def faults(dashboard: Any) -> list[str]:
    """What in it Grafana has no use for."""
    read = Dashboard.from_json(dashboard)
    return [*_dropped(dashboard, _written(read), ""), *_misfits(read, Dashboard, "")]


def _written(read: object) -> Any:
    return json.loads(json.dumps(read, cls=JSONEncoder))


def _dropped(given: Any, written: Any, where: str) -> Iterator[str]:
    """What was lost on the way; what was added are defaults."""
    if isinstance(given, dict) and isinstance(written, dict):
        for key, value in given.items():
            if key in written:
                yield from _dropped(value, written[key], f"{where}.{key}")
            else:
                yield f"{where}.{key} is not known"
    elif isinstance(given, list) and isinstance(written, list) and len(given) == len(written):
        for index, (one, other) in enumerate(zip(given, written, strict=True)):
            yield from _dropped(one, other, f"{where}[{index}]")
    elif given != written:
        yield f"{where} became {written!r}"


def _misfits(value: Any, kind: Any, where: str) -> Iterator[str]:
    """Values that are not of their kind, here and below."""
    if isinstance(value, dict) and hasattr(kind, "from_json"):  # the SDK leaves some as they came
        read = kind.from_json(value)
        yield from _dropped(value, _written(read), where)
        value = read
    if not _fits(value, kind):
        yield f"{where}: {value!r} is no {kind}"
    elif isinstance(value, list):
        [inner] = [arg for it in _kinds(kind) for arg in typing.get_args(it)] or [Any]
        for index, one in enumerate(value):
            yield from _misfits(one, inner, f"{where}[{index}]")
    elif hasattr(value, "to_json"):
        for name, its in typing.get_type_hints(type(value)).items():
            inner = next((it for it in _kinds(its) if hasattr(it, "from_json")), its)
            found = getattr(value, name)
            yield from _misfits(found, its if found is None else inner, f"{where}.{name}")


def _kinds(kind: Any) -> tuple[Any, ...]:
    """Those of which it may be one."""
    if typing.get_origin(kind) in {typing.Union, UnionType}:
        return typing.get_args(kind)
    return (kind,)


def _fits(value: Any, kind: Any) -> bool:
    return any(_fits_one(value, it) for it in _kinds(kind))


def _fits_one(value: Any, kind: Any) -> bool:
    origin = typing.get_origin(kind) or kind
    if origin is typing.Literal:
        return value in typing.get_args(kind)
    if not isinstance(origin, type) or getattr(origin, "_is_protocol", False):
        return True  # of any kind, as far as can be told
    if issubclass(origin, Enum):
        return isinstance(value, origin) or value in {one.value for one in origin}
    if isinstance(value, bool):
        return origin in {bool, object}
    return isinstance(value, (int, float) if origin is float else origin)


@pytest.mark.parametrize("name", dashboards())
def test_grafana_knows_all_that_it_says(name: str) -> None:
    assert faults(dashboards()[name]) == []


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (("colour",), 1),
        (("gridPos", "z"), 3),
        (("gridPos", "x"), "1"),
        (("options", "legends"), {}),
        (("options", "legend", "displayMode"), "tabel"),
        (("options", "tooltip", "sort"), "down"),
        (("fieldConfig", "defaults", "custom", "fillOpacity"), "much"),
        (("fieldConfig", "defaults", "custom", "stacking", "mode"), "high"),
        (("targets", 0, "expression"), "up"),
        (("targets", 0, "range"), "yes"),
        (("links",), [{"title": "a runbook", "address": "x"}]),
    ],
    ids=lambda it: ".".join(map(str, it)) if isinstance(it, tuple) else "",
)
def test_what_grafana_would_not_understand_is_found(path: tuple[str | int, ...], wrong: object) -> None:
    dashboard = copy.deepcopy(dashboards()["overview"])
    holder = next(panel for panel in dashboard["panels"] if panel["type"] == "timeseries")
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = wrong
    assert len(faults(dashboard)) == 1

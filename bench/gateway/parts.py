"""The processes of one measurement: a store, instant replicas, gateways, a collector of traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gateway.replicas import MODEL
from bench.loops.telemetry import SCRAPED, environment_of
from galley.stack.part import Facts, PartSpec
from galley.stack.parts import python_module, stack_parts
from galley.stack.stack import Stack, StackDirs, StackOptions

MAX_SESSIONS = 4096
"""Of a gateway: more than any load has, unless the load is to be refused."""
TRACED = "gateway-traced"
_REPLICAS, _SINK = "target", "sink"


@dataclass(frozen=True, slots=True)
class Cluster:
    """`rate` is the number of verdicts a second over all gateways; 0: at once."""

    model_dir: Path
    rate: float = 0.0
    gateways: int = 1
    traced: bool = False
    max_sessions: int = MAX_SESSIONS

    @property
    def names(self) -> list[str]:
        """Return the names of the gateways' parts; a traced one is the last."""
        plain = ["gateway", *(f"gateway-{number}" for number in range(2, self.gateways + 1))]
        return [*plain, TRACED] if self.traced else plain

    def stack(self, log_dir: Path | None = None) -> Stack:
        """Return the stack that runs it."""
        return Stack(StackOptions(model=str(self.model_dir), log_dir=log_dir), parts=self._parts)

    def _parts(self, options: StackOptions, dirs: StackDirs) -> Sequence[PartSpec]:
        valkey = next(part for part in stack_parts(options, dirs) if part.name == "valkey")
        arguments = ("--model", str(self.model_dir), "--rate", str(self.rate))
        replicas = PartSpec(_REPLICAS, lambda _: python_module("bench.gateway.replicas", *arguments))
        sink = [PartSpec(_SINK, lambda _: python_module("bench.loops.otlp_sink"))] if self.traced else []
        return [valkey, replicas, *sink, *map(self._gateway, self.names)]

    def _gateway(self, name: str) -> PartSpec:
        is_traced = name == TRACED

        def command(facts: Facts) -> list[str]:
            address = facts[_REPLICAS]["address"]
            flags = {
                "--target": address,
                "--draft": address,
                "--redis-url": f"unix://{facts['valkey']['address']}",
                "--model": str(self.model_dir),
                "--target-models": MODEL,
                "--max-sessions": str(self.max_sessions),
                **({"--metrics-port": "0"} if is_traced else {}),
            }
            return python_module("services.gateway", *(part for flag in flags.items() for part in flag))

        def environment(facts: Facts) -> Mapping[str, str]:
            return environment_of(SCRAPED, str(facts[_SINK]["address"])) if is_traced else {}

        after = ("valkey", _REPLICAS, *([_SINK] if is_traced else []))
        return PartSpec(name, command, after=after, environment=environment)

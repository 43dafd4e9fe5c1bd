"""The plan of a trial."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path

from tests.deploy.render import Manifest


@dataclass(frozen=True, slots=True)
class Plan:
    # Where the model is that the images have as their default.
    model: str
    values: Manifest = field(default_factory=dict)
    objects: tuple[Manifest, ...] = ()
    # What an earlier chart rendered: it is deployed first, and upgraded to `values` under load.
    before: tuple[Manifest, ...] = ()
    ipv6: bool = False
    # The user that an admission plugin gives to pods that name none, as OpenShift's restricted-v2 does; it
    # refuses those that name one.
    assigned_user: int | None = None
    # Pods find this machine's compiled kernels in their caches: a start costs seconds, not half a minute.
    warm: bool = True
    # The Deployment in the namespace `hub` is gone before anything is rolled.
    hub_outage: bool = False
    # What is rolled, by component, one after the other; and how often everything is done.
    rolls: tuple[str, ...] = ()
    rounds: int = 1
    # Of each of these components one pod is killed; stopped until its readiness probe tells; stopped until
    # its liveness probe has it started again. All at the same time.
    killed: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    hung: tuple[str, ...] = ()
    # How many answers are asked for at once, of how many tokens, and how long each asker then waits.
    streams: int = 2
    # And how many for one token, again and again: they meet whatever should not be met any more.
    brief: int = 0
    max_tokens: int = 48
    pause_s: float = 0.0
    patience_s: float = 60.0
    # Of the clients: environment, and Secrets of the release that they mount, by path.
    client_environment: dict[str, str] = field(default_factory=dict)
    client_secrets: dict[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        path.write_bytes(pickle.dumps(self))

    @staticmethod
    def read(path: Path) -> Plan:
        plan = pickle.loads(path.read_bytes())
        assert isinstance(plan, Plan)
        return plan

"""The life of a release: install, test, upgrade, scale, kill, uninstall."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.deploy.render import CHART, Manifest
from tests.proofs.cluster.commands import Commands, Failed

RELEASE = "galley"
_LAPTOP = CHART / "examples" / "values-laptop.yaml"
_WAIT = ("--wait", "--timeout", "15m")
_TARGETS = "app.kubernetes.io/component=target"
_TESTS = "app.kubernetes.io/component=test"
Step = tuple[str, Callable[[], object]]


class Life:
    def __init__(self, commands: Commands, namespace: str, values: Manifest) -> None:
        self._commands, self._namespace, self._values = commands, namespace, values

    def run(self) -> list[dict[str, Any]]:
        """Take every step until one fails; return what was done, how long it took, and the problem."""
        done: list[dict[str, Any]] = []
        for name, act in self._steps():
            began = time.monotonic()
            problem = ""
            try:
                act()
            except Failed as failure:
                problem = str(failure)
            done.append({"step": name, "seconds": round(time.monotonic() - began, 1), "problem": problem})
            print(f"{name}: {problem or 'done'}", flush=True)
            if problem:
                break
        return done

    def _steps(self) -> Iterator[Step]:
        twice = {"gateway": {"replicas": 2}, "target": {"replicas": 2}}
        yield "install", lambda: self._install({})
        yield "test", self._test
        yield "upgrade to two replicas", lambda: self._install(twice)
        yield "test the upgrade", self._test
        yield "scale the drafts", self._scale
        yield "kill the targets", self._kill
        yield "test what came back", self._test
        yield "upgrade back", lambda: self._install({})
        yield "uninstall", self._uninstall

    def _install(self, further: Manifest) -> None:
        values = json.dumps({**self._values, **further})
        where = ("--namespace", self._namespace, "--values", str(_LAPTOP), "--values", "-")
        self._commands.helm("upgrade", "--install", RELEASE, str(CHART), *where, *_WAIT, stdin=values)

    def _test(self) -> None:
        self._commands.helm("test", RELEASE, "--namespace", self._namespace, "--logs")

    def _scale(self) -> None:
        self._kubectl("scale", "deployment/galley-draft", "--replicas=2")
        self._kubectl("rollout", "status", "deployment/galley-draft", "--timeout=10m")

    def _kill(self) -> None:
        self._kubectl("delete", "pod", "--selector", _TARGETS, "--grace-period=0", "--force")
        self._kubectl("rollout", "status", "statefulset/galley-target", "--timeout=10m")

    def _uninstall(self) -> None:
        self._commands.helm("uninstall", RELEASE, "--namespace", self._namespace, "--wait")
        # The pod of the test is no part of the release, so that its log outlives it.
        self._kubectl("delete", "pod", "--selector", _TESTS)
        left, _ = self._kubectl(
            "get", "all,networkpolicy,poddisruptionbudget,serviceaccount,configmap", "-o", "name"
        )
        own = [line for line in left.split() if RELEASE in line]
        if own:
            raise Failed(f"left behind: {', '.join(own)}")

    def _kubectl(self, *arguments: str) -> tuple[str, str]:
        return self._commands.kubectl("--namespace", self._namespace, *arguments)

"""A restart is no load balancer: an address behind which several processes are is not shown as one."""

from __future__ import annotations

import pytest

from galley.common.metrics import catalogue
from galley.stack.endpoint import Service
from galley.top.fleet import SEVERAL, Fleet
from galley.top.series import Samples

GATEWAY = Service("gateway", "gateway:9464")


def samples(started: float, count: float) -> Samples:
    return {
        catalogue.PROCESS_START.series[0]: {(): started},
        catalogue.STREAMS.series[0]: {(): count},
    }


@pytest.mark.parametrize(
    ("starts", "away"),
    [((1, 1, 1), ""), ((1, 2, 2), ""), ((1, 2, 3), ""), ((1, 2, 1), SEVERAL), ((1, 2, 1, 1, 1), SEVERAL)],
)
def test_a_process_that_comes_back_is_another(starts: tuple[float, ...], away: str) -> None:
    fleet = Fleet([GATEWAY], 0.0)
    for at_s, started in enumerate(starts):
        fleet.add(GATEWAY, float(at_s), samples(started, 100 * started))
    (reading,) = fleet.readings(float(len(starts)))
    assert reading.away == away
    assert bool(reading.now) == (not away)

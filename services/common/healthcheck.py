"""`python -m services.common.healthcheck ADDRESS`: exit 0 if the server says SERVING, else 1 and why.

For whatever can only ask by running a command, such as Docker's HEALTHCHECK. Kubernetes asks the health
service natively.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Sequence

_TIMEOUT_S = 3.0


def problem_of(address: str, timeout_s: float = _TIMEOUT_S) -> str | None:
    """What keeps the server at `address` (host:port) from serving; None if nothing does."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return None if name == "SERVING" else name


def main(argv: Sequence[str]) -> int:
    """The exit status; 2 if there is not exactly one argument."""
    if len(argv) != 1:
        sys.stderr.write("usage: python -m services.common.healthcheck ADDRESS\n")
        return 2
    problem = problem_of(argv[0])
    if problem is not None:
        sys.stderr.write(f"{argv[0]}: {problem}\n")
    return int(problem is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

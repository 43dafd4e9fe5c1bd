"""`python -m galley.common.server.healthcheck ADDRESS`: exit 0 if the server says SERVING, else 1 and why.

For whatever can only ask by running a command, such as Docker's HEALTHCHECK. Kubernetes asks the health
service natively. Where the server speaks TLS, ask its `health_port`, or say whom to trust: by the flags, or
by the same environment that `galley` reads.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from galley.common.tls.credentials import Material, TlsFiles, channel_credentials
from galley.common.tls.files import BadFile, NamedFile

_TIMEOUT_S = 3.0
_FILES = ("tls_ca_file", "tls_cert_file", "tls_key_file")
_FLAGS = {
    "tls_ca_file": "authorities that the server's certificate may be of (PEM)",
    "tls_cert_file": "certificate to show, where the server asks for one (PEM)",
    "tls_key_file": "its key (PEM)",
    "tls_server_name": "name in the server's certificate; else the host of ADDRESS",
}


def problem_of(
    address: str, timeout_s: float = _TIMEOUT_S, tls: Material | None = None, server_name: str = ""
) -> str | None:
    """What keeps the server at `address` (host:port) from serving; None if nothing does."""
    with _channel(address, tls, server_name) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return None if name == "SERVING" else name


def _channel(address: str, tls: Material | None, server_name: str) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(address)
    options = [("grpc.ssl_target_name_override", server_name)] if server_name else []
    return grpc.secure_channel(address, channel_credentials(tls), options)


def main(argv: Sequence[str]) -> int:
    """The exit status; 2 if the arguments are wrong."""
    asked = _parser().parse_args(argv)
    try:
        tls = _tls(asked)
    except BadFile as error:
        sys.stderr.write(f"--{error.setting.replace('_', '-')}: {error.problem}\n")
        return 2
    problem = problem_of(asked.address, tls=tls, server_name=asked.tls_server_name)
    if problem is not None:
        sys.stderr.write(f"{asked.address}: {problem}\n")
    return int(problem is not None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m galley.common.server.healthcheck")
    parser.add_argument("address", metavar="ADDRESS", help="host:port")
    for name, told in _FLAGS.items():
        variable = f"GALLEY_{name.upper()}"
        parser.add_argument(
            "--" + name.replace("_", "-"),
            default=os.environ.get(variable, ""),
            help=f"{told}; or {variable}",
        )
    return parser


def _tls(asked: argparse.Namespace) -> Material | None:
    """What the flags ask for; raises BadFile."""
    if not any(getattr(asked, name) for name in _FLAGS):
        return None
    ca, cert, key = (NamedFile(name, getattr(asked, name)) for name in _FILES)
    return TlsFiles(ca, cert, key).read()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

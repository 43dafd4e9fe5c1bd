"""Check the health of a server by command: `python -m galley.common.server.healthcheck ADDRESS`.

Exits 0 if the server is SERVING, else 1 with the reason. It serves Docker's HEALTHCHECK, which can only run a
command; Kubernetes uses gRPC probes. If the server uses TLS, check its `health_port`, or give the files by
flags or by the environment variables of `galley`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from galley.common.tls.channels import Material, channel_credentials
from galley.common.tls.credentials import TlsFiles
from galley.common.tls.files import BadFile, NamedFile

_TIMEOUT_S = 3.0
_FILES = ("tls_ca_file", "tls_cert_file", "tls_key_file")
_FLAGS = {
    "tls_ca_file": "PEM file of the authorities of the server certificate",
    "tls_cert_file": "PEM file of the client certificate, if the server requires one",
    "tls_key_file": "PEM file of the key of --tls-cert-file",
    "tls_server_name": "name in the server certificate; empty uses the host of ADDRESS",
}


def problem_of(
    address: str, timeout_s: float = _TIMEOUT_S, tls: Material | None = None, server_name: str = ""
) -> str | None:
    """Return why the server at `address` (host:port) is not serving, or None if it is."""
    options = [("grpc.ssl_target_name_override", server_name)] if server_name else []
    with (
        grpc.insecure_channel(address)
        if tls is None
        else grpc.secure_channel(address, channel_credentials(tls), options)
    ) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    return None if name == "SERVING" else name


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    try:
        tls = _tls(arguments)
    except BadFile as error:
        sys.stderr.write(f"--{error.setting.replace('_', '-')}: {error.problem}\n")
        return 2
    problem = problem_of(arguments.address, tls=tls, server_name=arguments.tls_server_name)
    if problem is not None:
        sys.stderr.write(f"{arguments.address}: {problem}\n")
    return int(problem is not None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m galley.common.server.healthcheck")
    parser.add_argument("address", metavar="ADDRESS", help="host:port")
    for name, text in _FLAGS.items():
        variable = f"GALLEY_{name.upper()}"
        parser.add_argument(
            "--" + name.replace("_", "-"),
            default=os.environ.get(variable, ""),
            help=f"{text}. Default: the environment variable {variable}.",
        )
    return parser


def _tls(arguments: argparse.Namespace) -> Material | None:
    """Return the contents of the files; None if no flag or variable of TLS is set. Raise BadFile."""
    if not any(getattr(arguments, name) for name in _FLAGS):
        return None
    ca, cert, key = (NamedFile(name, getattr(arguments, name)) for name in _FILES)
    return TlsFiles(ca, cert, key).read()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

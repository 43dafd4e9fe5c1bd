"""The packet filter of `make chaos` drops one direction, and what was dropped arrives after its mend."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.chaos import packets

_TRIAL = """
import socket
from tests.chaos.packets import PacketFilter

server = socket.create_server(("127.0.0.1", 0))
port = server.getsockname()[1]
caller = socket.create_connection(("127.0.0.1", port))
called, _ = server.accept()
filter = PacketFilter()
for requests, sender, receiver in ((True, caller, called), (False, called, caller)):
    filter.drop(port, requests=requests)
    sender.sendall(b"held back")
    receiver.settimeout(0.2)
    try:
        receiver.recv(1)
    except TimeoutError:
        filter.mend(port, requests=requests)
        receiver.settimeout(20)
        print(receiver.recv(9).decode())
"""


@pytest.mark.skipif(not packets.is_usable(), reason=packets.NEEDED)
def test_what_is_dropped_arrives_after_the_mend() -> None:
    command = ["-c", f"from tests.chaos import packets; packets.isolate(['-c', {_TRIAL!r}])"]
    done = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True)
    assert done.stdout.split("\n") == ["held back", "held back", ""]

"""Drop packets of one direction of a relay's connections, by nftables in a network namespace of our own.

Unlike the cuts of a relay, TCP resends what was dropped at its own times, and knows nothing of the mend.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

NEEDED = "the packet filter needs root, ip, nft and unshare"
_TABLE = "inet galley_chaos"
_RULES = f"""
table {_TABLE} {{
  set requests {{ type inet_service; }}
  set responses {{ type inet_service; }}
  chain input {{
    type filter hook input priority 0; policy accept;
    tcp dport @requests drop
    tcp sport @responses drop
  }}
}}
"""
_ISOLATED = "GALLEY_CHAOS_ISOLATED"


def is_usable() -> bool:
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "nft", "unshare"))


def is_isolated() -> bool:
    """Return True if this process was started by `isolate`."""
    return _ISOLATED in os.environ


def isolate(command: Sequence[str]) -> None:
    """Become `python COMMAND` in a network namespace that has only a loopback."""
    os.environ[_ISOLATED] = "1"
    inside = f'ip link set lo up && exec "{sys.executable}" "$@"'
    os.execvp("unshare", ["unshare", "--net", "sh", "-c", inside, "sh", *command])


class PacketFilter:
    """Use it only in a namespace of our own: its table stays until the namespace ends."""

    def __init__(self) -> None:
        _nft(_RULES)

    def drop(self, port: int, *, requests: bool) -> None:
        """Drop what callers send to this port of the loopback, else what they receive from it."""
        _nft(f"add element {_TABLE} {_set(requests=requests)} {{ {port} }}")

    def mend(self, port: int, *, requests: bool) -> None:
        _nft(f"delete element {_TABLE} {_set(requests=requests)} {{ {port} }}")


def _set(*, requests: bool) -> str:
    return "requests" if requests else "responses"


def _nft(rules: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True)

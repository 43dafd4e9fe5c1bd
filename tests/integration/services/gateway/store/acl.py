"""The users that docs/operate/redis.md tells operators to make."""

from __future__ import annotations

from pathlib import Path

DOC = Path(__file__).parents[5] / "docs" / "operate" / "redis.md"


def documented_user(name: str) -> list[str]:
    """Its rules, as the page has them."""
    for line in DOC.read_text(encoding="utf-8").splitlines():
        match line.split():
            case ["user", found, *rules] if found == name:
                return rules
            case _:
                pass
    raise LookupError(name)

"""The target's states of confirmed tokens, which a draft with a feature head reads.

The state of a token is the residual stream of its row after some layers of the target: bfloat16,
little-endian, [layers, size]. It is kept as bytes: only the engines and the draft look inside.
"""

from __future__ import annotations

from galley.core.values import value

MAX_FEATURE_LAYERS = 4
MAX_FEATURE_TOKENS = 64  # of one message


def state_bytes(layers: int, size: int) -> int:
    """Return the bytes of one token's state: `size` numbers after each of `layers` layers."""
    return 2 * layers * size


@value
class FeatureForm:
    """The states that a draft reads: after which layers, and how many numbers each. No layers: none."""

    layers: tuple[int, ...] = ()
    size: int = 0

    @property
    def token_bytes(self) -> int:
        return state_bytes(len(self.layers), self.size)


@value
class States:
    """The states of `tokens` consecutive tokens from `position` (absolute), [tokens, layers, size]."""

    position: int
    tokens: int
    data: bytes

    @property
    def end(self) -> int:
        return self.position + self.tokens

    @property
    def _token_bytes(self) -> int:
        return len(self.data) // self.tokens if self.tokens else 0

    def since(self, position: int) -> States:
        """Return the states of the tokens from `position` on."""
        if position <= self.position:
            return self
        if position >= self.end:
            return NO_STATES
        skipped = (position - self.position) * self._token_bytes
        return States(position, self.end - position, self.data[skipped:])

    def until(self, end: int) -> States:
        """Return the states of the tokens before `end`."""
        if end >= self.end:
            return self
        if end <= self.position:
            return NO_STATES
        tokens = end - self.position
        return States(self.position, tokens, self.data[: tokens * self._token_bytes])

    def joined(self, later: States) -> States:
        """Return these states followed by `later`, at most the last MAX_FEATURE_TOKENS.

        Where both have a token, the later state holds. After a gap, or if the sizes differ, only `later` is
        returned.
        """
        if not later.tokens:
            return self
        kept = later.position - self.position
        if not 0 < kept <= self.tokens or self._token_bytes != later._token_bytes:
            return later.since(later.end - MAX_FEATURE_TOKENS)
        both = States(self.position, kept + later.tokens, self.data[: kept * self._token_bytes] + later.data)
        return both.since(both.end - MAX_FEATURE_TOKENS)


NO_STATES = States(0, 0, b"")

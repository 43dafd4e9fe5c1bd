"""Keys and values of one session, with the token ids that they belong to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.engine.tiles import PAGE, pages_up

if TYPE_CHECKING:
    from torch import Tensor

_FIRST_CAPACITY = 4 * PAGE


class LayerKV:
    """Keys and values of one layer, [kv_heads, capacity, head_dim]; unwritten positions hold zeros."""

    __slots__ = ("keys", "values")

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys.new_zeros(keys.shape[0], 0, keys.shape[2])
        self.values = values.new_zeros(values.shape[0], 0, values.shape[2])

    def write(self, start: int, keys: Tensor, values: Tensor) -> None:
        """Put [kv_heads, n, head_dim] at positions [start, start + n), growing where needed."""
        end = start + keys.shape[1]
        self._reserve(end)
        self.keys[:, start:end] = keys
        self.values[:, start:end] = values

    def _reserve(self, length: int) -> None:
        held = self.keys.shape[1]
        if length <= held:
            return
        capacity = max(_FIRST_CAPACITY, 2 * held, pages_up(length))
        self.keys = _grown(self.keys, capacity)
        self.values = _grown(self.values, capacity)


def _grown(tensor: Tensor, capacity: int) -> Tensor:
    # Zeros, not garbage: a masked position has weight 0, and 0 * NaN would not be 0.
    grown = tensor.new_zeros(tensor.shape[0], capacity, tensor.shape[2])
    grown[:, : tensor.shape[1]] = tensor
    return grown


class SessionCache:
    """The KV of `tokens`, no more and no less; only CausalModel.forward adds to it."""

    __slots__ = ("_layers", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._layers: dict[int, LayerKV] = {}

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on. Raises ValueError if less than `length` is held."""
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"cannot cut {len(self.tokens)} tokens to {length}")
        del self.tokens[length:]

    def layer(self, index: int, keys: Tensor, values: Tensor) -> LayerKV:
        """The buffers of layer `index`, made to fit `keys` and `values` on first use."""
        layer = self._layers.get(index)
        if layer is None:
            layer = self._layers[index] = LayerKV(keys, values)
        return layer

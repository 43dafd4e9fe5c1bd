"""A draft that reads the target's states where it has them, and its own where not.

At the place of token t[p] its input is the embedding of t[p], and one of three: the target's states at p - 1
(after some of its layers; EAGLE-3, arXiv 2503.01840), its own state at p - 1 while it drafts beyond the
confirmed tokens, or nothing, for confirmed tokens whose states never came. Each is projected and added to the
embedding. The projections start at 0: at first the draft is the plain draft that it started from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from galley.distill.training.models import Layer, Llama, LlamaShape, Rotation, rotation_of

_KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class TargetStates:
    """The target's states at each place of a batch, and which of them the draft gets."""

    states: Tensor  # [batch, length, layers, hidden]
    known: Tensor  # bool [batch, length]


class FeatureDraft(Llama):
    """A Llama with a projection of the target's states after `after` layers, and one of its own."""

    def __init__(self, shape: LlamaShape, embedding: Tensor, head_rows: int, after: Sequence[int]) -> None:
        super().__init__(shape, embedding, head_rows)
        self.after = tuple(after)
        width = len(self.after) * shape.hidden
        # One weight for each number of a state, so that all have the size of an embedding's.
        size = embedding.float().square().mean().sqrt().item()
        self.features_scale = nn.Parameter(torch.full((width,), size))
        self.features = nn.Linear(width, shape.hidden, bias=False)
        self.own_scale = nn.Parameter(torch.full((shape.hidden,), size))
        self.own = nn.Linear(shape.hidden, shape.hidden, bias=False)
        for projection in (self.features, self.own):
            nn.init.zeros_(projection.weight)

    def level(self, states: Tensor) -> None:
        """Scale each number of the target's states by its size in `states` [rows, layers, hidden]."""
        sizes = self._normalized(states).abs().mean(0).flatten()
        with torch.no_grad():
            self.features_scale.div_(sizes.clamp_min(1e-3 * float(sizes.mean())))

    def unrolled(self, tokens: Tensor, rows: Tensor, given: TargetStates | None, depths: int) -> list[Tensor]:
        """Return normalized states [rows, hidden] at each depth, at some flattened `rows`.

        At depth d the draft proposes its token d + 1 after the confirmed ones: the inputs at the last d
        places had its own states. `tokens` are [batch, length]; the `rows` of a sequence follow each other,
        and at depth d its first d are meaningless.
        """
        embedded = self.embedding[tokens].float()
        rotation, mask = rotation_of(self.shape, tokens.shape[1]), _Masks(tokens.shape[1])
        earlier: list[list[_KeysValues]] = [[] for _ in self.layers]
        added = None if given is None else self._from_target(given)
        outputs = []
        for depth in range(depths):
            residual = embedded if added is None else embedded + _one_later(added)
            residual = self._layers(residual, rotation, mask.at(depth), rows, earlier)
            outputs.append(self.model.norm(residual))
            if depth + 1 < depths:
                added = self._from_own(residual, rows, tokens.shape)
        return outputs

    def states(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """Return normalized states [rows, hidden] without any of the target's."""
        return self.unrolled(tokens, rows, None, 1)[0]

    def _layers(
        self,
        residual: Tensor,
        rotation: Rotation,
        mask: Tensor | None,
        rows: Tensor,
        earlier: list[list[_KeysValues]],
    ) -> Tensor:
        last = len(earlier) - 1
        for number, (layer, kept) in enumerate(zip(self.layers, earlier, strict=True)):
            residual = _attended(layer, residual, rotation, mask, kept)
            residual = layer.fed(residual, rows if number == last else None)
        return residual

    def _from_target(self, given: TargetStates) -> Tensor:
        scaled = self._normalized(given.states).flatten(-2) * self.features_scale
        out: Tensor = self.features(scaled) * given.known.unsqueeze(-1)
        return out

    def _normalized(self, states: Tensor) -> Tensor:
        out: Tensor = functional.rms_norm(states.float(), (self.shape.hidden,), eps=self.shape.norm_eps)
        return out

    def _from_own(self, residual: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
        scaled = self._normalized(residual) * self.own_scale
        projected: Tensor = self.own(scaled)
        whole = projected.new_zeros(shape.numel(), self.shape.hidden)
        return whole.index_copy(0, rows, projected).view(*shape, -1)


def _attended(
    layer: Layer, residual: Tensor, rotation: Rotation, mask: Tensor | None, kept: list[_KeysValues]
) -> Tensor:
    """Return the residual after attention to the keys of all depths so far, this one's included."""
    queries, keys, values = layer.self_attn.projected(layer.input_layernorm(residual), rotation)
    kept.append((keys, values))
    if mask is None:
        return residual + layer.self_attn.mixed(queries, keys, values)
    keys, values = (torch.cat(parts, 2) for parts in zip(*kept, strict=True))
    return residual + layer.self_attn.mixed(queries, keys, values, mask)


class _Masks:
    """The keys that a place sees at a depth: of depth 0 up to `depth` places back, then one of each depth."""

    def __init__(self, length: int) -> None:
        self._back = torch.arange(length)[:, None] - torch.arange(length)  # query minus key

    def at(self, depth: int) -> Tensor | None:
        """Return bool [length, (depth + 1) * length]; None at depth 0, where attention is causal."""
        if depth == 0:
            return None
        own = [self._back == depth - past for past in range(1, depth + 1)]
        return torch.cat([self._back >= depth, *own], 1)


def _one_later(added: Tensor) -> Tensor:
    """Return what is added at each place [batch, length, hidden] from what came of the place before."""
    return functional.pad(added, (0, 0, 1, 0))[:, :-1]

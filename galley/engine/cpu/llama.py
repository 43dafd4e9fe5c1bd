"""Our own forward pass of the Llama family on the CPU: few products of packed weights, kernels in between.

transformers loads the weights and computes the rotary frequencies. The module is taken apart layer by layer,
so that no weight is stored twice. (Llama: arXiv 2302.13971; Qwen3's norms of queries and keys: 2505.09388.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from galley.core.errors import UnsupportedModel
from galley.engine.cpu.int8 import Int8Product, instructions, int8_product
from galley.engine.cpu.kernels import openmp
from galley.engine.cpu.kernels.compile import compiled
from galley.engine.cpu.kernels.int8 import GROUP
from galley.engine.cpu.packing import Linears, rows_of_product
from galley.engine.paged import CompiledAttention, as_array
from galley.engine.pages import KvPool, Pages, Shape, Span
from galley.engine.parallel.ranks import Ranks
from galley.engine.parallel.sharding import AddedLinear, JoinedLinear
from galley.engine.states import UNTOUCHED, Residuals

Floats = NDArray[np.float32]
Linear = Callable[[Tensor], Tensor]

# Approximate time of one number of a row in each loop.
_NORMALIZE_NS, _ROTATE_NS, _GATE_NS = 0.7, 3.0, 0.6

_FAMILY = ("llama", "mistral", "qwen2", "qwen3")


def can_serve(module: Any, pool: KvPool) -> bool:
    """Return True if `LlamaForward` can run `module`: `fits`, and the sizes of its heads too."""
    if not fits(module.config, pool.shape.dtype, pool.keys.device.type):
        return False
    rotary = module.model.rotary_emb
    return 2 * len(rotary.inv_freq) == pool.shape.key_dim == pool.shape.value_dim


def fits(config: Any, dtype: torch.dtype, device: str) -> bool:
    """Return True if family, activation, dtype and device are those of `LlamaForward`."""
    computed = dtype in {torch.float32, torch.bfloat16} and torch.device(device).type == "cpu"
    return computed and config.model_type in _FAMILY and config.hidden_act == "silu"


def refuse_int8(config: Any, dtype: torch.dtype, device: str, ranks: Ranks) -> None:
    """Raise UnsupportedModel unless `LlamaForward` can run such a model with int8 weights on this CPU."""
    name = f"quantization: must be none for {config.model_type}"
    if not fits(config, dtype, device):
        raise UnsupportedModel(
            f"{name} in {str(dtype).removeprefix('torch.')} on {device}; int8 is for {', '.join(_FAMILY)} in "
            "bfloat16 or float32 on a CPU"
        )
    if instructions() is None:
        raise UnsupportedModel("quantization: must be none on this CPU; int8 needs AVX2 or AVX-512 VNNI")
    head_dim = _declared(config, "head_dim") or config.hidden_size // config.num_attention_heads
    sizes = {
        "hidden_size": config.hidden_size,
        "heads": config.num_attention_heads * head_dim // ranks.size,
        "intermediate_size": config.intermediate_size // ranks.size,
    }
    for size, value in sizes.items():
        if value % GROUP:
            raise UnsupportedModel(f"{name}: {size} of a rank must be a multiple of {GROUP}, got {value}")


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights; norms are float32."""

    input_norm: Floats
    qkv: Linear
    query_norm: Floats
    key_norm: Floats
    output: Linear
    inner_norm: Floats
    gate_up: Linear
    down: Linear
    shape: Shape


class LlamaForward:
    """The layers, the head, and the memory for a step of at most `max_rows` rows."""

    kind = "own"

    def __init__(self, module: Any, attention: CompiledAttention, ranks: Ranks, max_rows: int) -> None:
        self.attention = attention
        self._ranks = ranks
        self._kernels = compiled()
        config, model = module.config, module.model
        self._eps = np.float32(config.rms_norm_eps)
        self._frequencies = _floats(model.rotary_emb.inv_freq)
        self._rotary_scale = np.float32(model.rotary_emb.attention_scaling)
        self._embedding: Tensor = model.embed_tokens.weight.detach()
        linears = Linears(module.dtype, "cpu")
        self._layers = [
            self._take_apart(model.layers, i, linears, config) for i in range(config.num_hidden_layers)
        ]
        self._final_norm = _floats(model.norm.weight)
        self._head = self._head_of(module, linears)
        # Fewest rows that the products compute.
        floats = any(not isinstance(one, Int8Product) for one in self._products())
        self._min_rows = linears.min_rows if floats else 1
        inner = config.intermediate_size // ranks.size
        heads = attention.group * attention.pool.shape.kv_heads
        self._widths = config.hidden_size, heads * attention.pool.shape.value_dim, inner
        self._make_room(max_rows, linears.rows_dtype)

    def _make_room(self, max_rows: int, dtype: torch.dtype) -> None:
        hidden, mixed, inner = self._widths
        self._residual = torch.zeros(max_rows, hidden)
        self._hidden = torch.zeros(max_rows, hidden, dtype=dtype)
        self._mixed = torch.zeros(max_rows, mixed, dtype=dtype)
        self._inner = torch.zeros(max_rows, inner, dtype=dtype)

    def twin(self) -> LlamaForward:
        """Return a forward pass of the same weights and pool on one thread, which may run beside this one."""
        twin = copy(self)
        twin.attention = self.attention.twin()
        twin._make_room(len(self._hidden), self._hidden.dtype)  # noqa: SLF001  # its own class
        return twin

    def _products(self) -> list[Linear]:
        own = [(layer.qkv, layer.output, layer.gate_up, layer.down) for layer in self._layers]
        return [self._head, *chain.from_iterable(own)]

    def _take_apart(self, layers: Any, index: int, linears: Linears, config: Any) -> _Layer:
        """Return one layer's weights as the kernels read them; drops the module's own layer."""
        layer = layers[index]
        own, mlp = layer.self_attn, layer.mlp
        no_norm = np.empty(0, np.float32)
        weights = _Layer(
            input_norm=_floats(layer.input_layernorm.weight),
            qkv=_fused(linears, own.q_proj, own.k_proj, own.v_proj),
            query_norm=_floats(own.q_norm.weight) if hasattr(own, "q_norm") else no_norm,
            key_norm=_floats(own.k_norm.weight) if hasattr(own, "k_norm") else no_norm,
            output=self._added(linears, own.o_proj),
            inner_norm=_floats(layer.post_attention_layernorm.weight),
            gate_up=_fused(linears, mlp.gate_proj, mlp.up_proj),
            down=self._added(linears, mlp.down_proj),
            shape=Shape(own.scaling, _window(config, index)),
        )
        layers[index] = torch.nn.Identity()
        return weights

    def _added(self, linears: Linears, layer: Any) -> Linear:
        """Return a product whose inputs are cut over the ranks: adds the parts, then the bias."""
        plain = layer.part if isinstance(layer, AddedLinear) else layer
        bias = layer.bias
        if self._ranks.size == 1:
            return _fused(linears, plain)
        run, add = _fused(linears, plain), self._ranks.add

        def added(rows: Tensor) -> Tensor:
            total = add(run(rows))
            return total if bias is None else total + bias

        return added

    def _head_of(self, module: Any, linears: Linears) -> Linear:
        head = module.get_output_embeddings()
        plain = head.part if isinstance(head, JoinedLinear) else head
        run = int8_product([plain], torch.float32) or _fused(linears, plain)
        return run if plain is head else lambda rows: self._ranks.join_columns(run(rows))

    def __call__(
        self,
        spans: Sequence[Span],
        tokens: Sequence[int],
        logit_rows: Sequence[int],
        residuals: Residuals = UNTOUCHED,
    ) -> Tensor:
        return self.run(spans, tokens, logit_rows, residuals).float()

    def run(
        self, spans: Sequence[Span], tokens: Sequence[int], logit_rows: Sequence[int], residuals: Residuals
    ) -> Tensor:
        """Return the logits as the head computes them."""
        pages = self.attention.lay_out(spans)
        rows = pages.rows
        padded = self._padded(rows)
        hidden, residual = self._hidden[:padded], self._residual[:rows]
        residual.copy_(self._embedding[torch.tensor(tokens)])
        if residuals.added is not None:
            residual.add_(residuals.added)
        states, sums = as_array(hidden)[:rows], residual.numpy()
        work = _Work(pages, states, sums, hidden, self._mixed[:padded], self._inner[:padded])
        cosines, sines = self._rotations(pages)
        queries = self.attention.queries(rows)
        part: Tensor | None = None
        for index, layer in enumerate(self._layers):
            self._normalize(work, part, layer.input_norm)
            residuals.read(index, residual)
            self._attend(work, index, layer, queries, cosines, sines)
            part = self._feed(work, layer)
        if not logit_rows and len(self._layers) not in residuals.layers:
            return torch.empty(0, self._embedding.shape[0])
        self._normalize(work, part, self._final_norm)
        residuals.read(len(self._layers), residual)
        if not logit_rows:
            return torch.empty(0, self._embedding.shape[0])
        return self._logits(hidden, logit_rows)

    def _normalize(self, work: _Work, part: Tensor | None, weight: Floats) -> None:
        """Add `part`, if any, to the residual; write the normalized residual to the states."""
        threads = self._threads(work.sums.size * _NORMALIZE_NS)
        stored = work.states[:0] if part is None else as_array(part)
        self._kernels.normalize(threads, work.sums, stored, weight, self._eps, work.states)

    def _rotations(self, pages: Pages) -> tuple[Floats, Floats]:
        cosines = np.empty((pages.rows, len(self._frequencies)), np.float32)
        sines = np.empty_like(cosines)
        self._kernels.rotations(pages.positions, self._frequencies, self._rotary_scale, cosines, sines)
        return cosines, sines

    def _attend(
        self, work: _Work, index: int, layer: _Layer, queries: Floats, cosines: Floats, sines: Floats
    ) -> None:
        keys, values = self.attention.layers[index]
        qkv = as_array(layer.qkv(work.hidden))
        self._kernels.rotate_store(
            self._threads(qkv.size * _ROTATE_NS),
            qkv, layer.query_norm, layer.key_norm, self._eps, cosines, sines,
            np.float32(layer.shape.scale), work.pages.places, queries, keys, values,
            self.attention.pool.shape.value_dim,
        )  # fmt: skip
        self.attention.attend(work.pages, index, queries, as_array(work.mixed), layer.shape)
        self._normalize(work, layer.output(work.mixed), layer.inner_norm)

    def _feed(self, work: _Work, layer: _Layer) -> Tensor:
        gate_up, inner = as_array(layer.gate_up(work.hidden)), as_array(work.inner)
        self._kernels.gate(self._threads(inner.size * _GATE_NS), gate_up, inner)
        return layer.down(work.inner)

    def _threads(self, work_ns: float) -> int:
        return openmp.worth(self.attention.threads, work_ns)

    def _padded(self, rows: int) -> int:
        """Return how many rows the products compute; int8 products take any number."""
        if self._min_rows == 1:
            return rows
        return max(self._min_rows, rows_of_product(rows, len(self._hidden)))

    def _logits(self, hidden: Tensor, logit_rows: Sequence[int]) -> Tensor:
        filler = [0] * (self._padded(len(logit_rows)) - len(logit_rows))
        logits = self._head(hidden[torch.tensor([*logit_rows, *filler])])
        return logits[: len(logit_rows)]


@dataclass(frozen=True, slots=True)
class _Work:
    """The memory of one step; `states` and `sums` cover its rows, the tensors also its padding."""

    pages: Pages
    states: Any  # stored [rows, hidden]: a view of `hidden`
    sums: Floats  # the residual, [rows, hidden]
    hidden: Tensor
    mixed: Tensor
    inner: Tensor


def _fused(linears: Linears, *layers: nn.Linear) -> Linear:
    int8 = int8_product(layers, linears.rows_dtype)
    if int8 is not None:
        return int8
    weight = torch.cat([layer.weight.detach() for layer in layers])
    biases = [_detached(layer.bias) for layer in layers]
    bias = None if biases[0] is None else torch.cat([one for one in biases if one is not None])
    return linears.make(weight, bias)


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


def _floats(weight: Tensor) -> Floats:
    array: Floats = weight.detach().float().contiguous().numpy()
    return array


def _window(config: Any, layer: int) -> int | None:
    """Return how many keys this layer's queries see; None: all."""
    window: int | None = _declared(config, "sliding_window")
    kinds = _declared(config, "layer_types")
    return None if kinds and kinds[layer] != "sliding_attention" else window


def _declared(config: Any, name: str) -> Any:
    """Return the value of `name`, or None if the configuration's class does not declare it."""
    return getattr(config, name, None) if hasattr(type(config), name) else None

"""Load one rank's shard of a model, cut by transformers' own tensor-parallel plan.

transformers decides how each module is cut and reads only this rank's part of each file (its DTensor
loading). Its styles are replaced, by its registry, with ones that leave the modules' forward alone. The
result is plain modules with local weights, for a forward pass of our own, which adds and joins by `Ranks`;
`join_ranks` makes the modules do the same where transformers' forward runs. transformers' own hooks cannot
be kept: they all-reduce, so from three ranks on a row's bits would depend on the rest of the batch.

Every rank holds the whole embedding table, so that a look-up needs no sum. The head is cut by vocabulary if
the number of ranks divides it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import (  # type: ignore[attr-defined]  # 5.19 has it here only
    ALL_PARALLEL_STYLES,
    ColwiseParallel,
    RowwiseParallel,
    TensorParallelLayer,
)

from galley.core.errors import UnsupportedModel
from galley.engine.load.support import read_weights
from galley.engine.parallel.ranks import Ranks

# transformers' annotations are not accurate.
CAUSAL_LM: Any = AutoModelForCausalLM

COLUMNS, ROWS, WHOLE = "galley_columns", "galley_rows", "galley_whole"
"""Our names of transformers' styles: outputs cut, inputs cut (partial sums), not cut."""

_STYLES = {
    "colwise": COLUMNS,
    "rowwise": ROWS,
    "replicate": WHOLE,
    "replicated_with_grad_allreduce": WHOLE,  # inference has no gradients
}
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")
_COUNTS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


class _PlainForward:
    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:  # noqa: ARG002
        return module


def register() -> None:
    styles: Any = ALL_PARALLEL_STYLES  # annotated for other registries
    for name, base in ((COLUMNS, ColwiseParallel), (ROWS, RowwiseParallel), (WHOLE, TensorParallelLayer)):
        styles.register(name, type(name, (_PlainForward, base), {})())


def refuse_ranks(config: Any, size: int) -> None:
    """Raise UnsupportedModel, with the numbers, unless `size` ranks can share such a model."""
    if size > 1:
        plan_of(config, size)


def plan_of(config: Any, size: int) -> dict[str, str]:
    """Return our style of each module that transformers' plan names (layers as `*`).

    Raises UnsupportedModel if `size` does not divide what is cut, or a style is not served here.
    """
    name = config.model_type
    model = _meta_model(config)
    plan = dict(model.tp_plan or {})
    if not any(
        key.rpartition(".")[2] in _KEY_PROJECTIONS and style == "colwise" for key, style in plan.items()
    ):
        raise UnsupportedModel(f"tensor_parallel: must be 1, got {size}: {name} has no tensor-parallel plan")
    _refuse_counts(config, size)
    head, embedding = _names_of(model)
    ours = {
        key: WHOLE
        if key == embedding
        else _head_style(model, size)
        if key == head
        else _style(name, key, style)
        for key, style in plan.items()
    }
    _refuse_features(name, model, ours, size)
    return ours


def _meta_model(config: Any) -> Any:
    with torch.device("meta"):
        return CAUSAL_LM.from_config(config)


def _on_host(model_class: Any) -> Any:
    """Return `model_class` with shards read into host memory: a device map would need accelerate."""

    class OnHost(model_class):  # type: ignore[misc]  # the class is known only at run time
        @classmethod
        def prepare_distribute_model(cls, distributed_config: Any, device_map: Any = None) -> Any:
            prepared, _, mesh = super().prepare_distribute_model(distributed_config, device_map)
            return prepared, None, mesh

    # transformers finds the names of the weights in files by these two.
    OnHost.__name__, OnHost.__module__ = model_class.__name__, model_class.__module__
    return OnHost


def _names_of(model: Any) -> tuple[str | None, str | None]:
    names = {id(module): name for name, module in model.named_modules()}
    return names.get(id(model.get_output_embeddings())), names.get(id(model.get_input_embeddings()))


def _refuse_counts(config: Any, size: int) -> None:
    for count in _COUNTS:
        value = getattr(config, count, None)
        if value is not None and value % size:
            raise UnsupportedModel(
                f"tensor_parallel: must divide {count} = {value} of {config.model_type}, got {size}"
            )


def _style(name: str, key: str, style: str) -> str:
    if style not in _STYLES:
        raise UnsupportedModel(
            f"tensor_parallel: must be 1: {name} needs {key} cut as {style!r}, which is not supported"
        )
    return _STYLES[style]


def _head_style(model: Any, size: int) -> str:
    # A tied head is cut after loading: it shares the whole table.
    tied = model.config.tie_word_embeddings
    return WHOLE if tied or model.get_output_embeddings().out_features % size else COLUMNS


def _refuse_features(name: str, model: nn.Module, plan: Mapping[str, str], size: int) -> None:
    for path, module in _planned(model, plan):
        if not isinstance(module, nn.Linear):
            if plan[_starred(path)] != WHOLE:
                raise UnsupportedModel(
                    f"tensor_parallel: must be 1: {name} needs {path} cut, which is not a linear layer"
                )
            continue
        style = plan[_starred(path)]
        features = {COLUMNS: module.out_features, ROWS: module.in_features}.get(style, 0)
        if features % size:
            raise UnsupportedModel(
                f"tensor_parallel: must divide the {features} features of {path} of {name}, got {size}"
            )


def _planned(model: nn.Module, plan: Mapping[str, str]) -> list[tuple[str, nn.Module]]:
    return [(path, module) for path, module in model.named_modules() if _starred(path) in plan]


def _starred(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def load_shard(
    directory: Path, config: Any, *, dtype: torch.dtype, device: str, attention: str, ranks: Ranks
) -> Any:
    """Return this rank's shard of the model in `directory`: plain modules with local weights, on `device`.

    All ranks call it, after `process_group.join`. The modules' forward cannot be used until `join_ranks`.
    """
    plan = plan_of(config, ranks.size)
    register()
    module = read_weights(
        _on_host(type(_meta_model(config))),
        directory,
        config=config,
        dtype=dtype,
        attn_implementation=attention,
        distributed_config=DistributedConfig(tp_size=ranks.size, tp_plan=plan),
    )
    _make_local(module)
    _cut_tied_head(module, ranks)
    return module.to(device).eval()


def _make_local(module: nn.Module) -> None:
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False)):
            to_local = getattr(parameter, "to_local", None)
            if to_local is not None:
                local = nn.Parameter(to_local().contiguous(), requires_grad=False)
                child.register_parameter(name, local)
        if isinstance(child, nn.Linear):
            child.out_features, child.in_features = child.weight.shape


def _cut_tied_head(module: Any, ranks: Ranks) -> None:
    head, table = module.get_output_embeddings(), module.get_input_embeddings()
    vocabulary = table.weight.shape[0]
    if not module.config.tie_word_embeddings or vocabulary % ranks.size:
        return
    each = vocabulary // ranks.size
    mine = slice(ranks.rank * each, (ranks.rank + 1) * each)
    cut = nn.Linear(
        head.in_features, each, bias=head.bias is not None, device="meta", dtype=head.weight.dtype
    )
    cut.weight = nn.Parameter(head.weight.detach()[mine], requires_grad=False)
    if head.bias is not None:
        cut.bias = nn.Parameter(head.bias.detach()[mine], requires_grad=False)
    module.set_output_embeddings(cut)


class AddedLinear(nn.Module):
    """A linear layer with inputs cut over the ranks: adds the partial products, then the bias."""

    def __init__(self, linear: nn.Linear, ranks: Ranks) -> None:
        super().__init__()
        self.bias: nn.Parameter | None = linear.bias
        self.part = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
        self.part.weight = linear.weight
        self._ranks = ranks

    def forward(self, rows: Tensor) -> Tensor:
        """Return outputs [..., out_features] for `rows` [..., in_features / size]."""
        total = self._ranks.add(self.part(rows))
        return total if self.bias is None else total + self.bias


class JoinedLinear(nn.Module):
    """A linear layer with outputs cut over the ranks and joined."""

    def __init__(self, linear: nn.Linear, ranks: Ranks) -> None:
        super().__init__()
        self.part = linear
        self._ranks = ranks

    def forward(self, rows: Tensor) -> Tensor:
        """Return outputs [..., out_features * size] for `rows` [..., in_features]."""
        return self._ranks.join_columns(self.part(rows))


def join_ranks(module: Any, ranks: Ranks) -> None:
    """Make the forward of modules of `load_shard` add and join over the ranks. Call it before packing."""
    if ranks.size == 1:
        return
    head = module.get_output_embeddings()
    if head.out_features < module.get_input_embeddings().weight.shape[0]:
        module.set_output_embeddings(JoinedLinear(head, ranks))
    plan = plan_of(module.config, ranks.size)
    for path, child in _planned(module, plan):
        if plan[_starred(path)] == ROWS:
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, AddedLinear(child, ranks))  # type: ignore[arg-type]

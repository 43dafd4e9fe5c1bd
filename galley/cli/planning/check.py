"""`galley check`: tell from their files whether a draft fits a target."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from galley.cli.flags import FAILED, fail, require, say
from galley.common.models.files import (
    DEFAULT_MODEL,
    NumberFormat,
    hub_model,
    model_name,
    model_path,
    shipped_draft,
)
from galley.common.models.hub import hub_directory, refused
from galley.core.errors import GalleyError
from galley.plan.pair import NUMBER_BYTES, Fit, Model, Tensor, judge, read_model

_GIB = 2**30
_FILES = ("config.json", "tokenizer.json")


def check(
    target: Annotated[str, typer.Argument(help="Target model: hub id, directory or GGUF file.")],
    draft: Annotated[
        str,
        typer.Argument(
            help="Draft model. Default: the draft that Galley brings for its own target.", show_default=False
        ),
    ] = "",
    *,
    dtype: Annotated[NumberFormat, typer.Option(help="Number format of weights and KV.")] = "bfloat16",
    memory_gib: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1 << 20,
            help="Memory for the pair, in GiB. Default: what is free on this machine's CPUs.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Tell whether a pair fits: tokenizers, memory, and the gain to expect. Reads no weights.

    Exits 0 if it fits. Exits 1 if not, with the reason in one line on standard error.
    """
    require("target")
    own = shipped_draft(target)
    if not draft and own is None:
        problem = "must be given: Galley brings a draft for its own target only"
        raise typer.BadParameter(problem, param_hint="DRAFT")
    specs = (target, draft or str(own))
    try:
        pair = (_model(specs[0]), _model(specs[1]))
        memory = _free_bytes() if memory_gib is None else round(memory_gib * _GIB)
        fit = judge(*pair, dtype, memory)
    except (GalleyError, OSError) as error:
        raise fail(error) from None
    if as_json:
        facts = asdict(fit) | {"fits": not fit.problem, "models": [_facts(one, dtype) for one in pair]}
        typer.echo(json.dumps(facts))
    else:
        _print(specs, pair, fit, dtype, memory)
    if fit.problem:
        say(f"does not fit: {fit.problem}", style="red")
        raise typer.Exit(FAILED)


def _model(spec: str) -> Model:
    """Read a model without its weights. Raises UnsupportedModel or OSError."""
    from galley.engine.load.support import refuse_raw_config  # noqa: PLC0415  # imports safetensors

    path = model_path(spec)
    if spec == DEFAULT_MODEL or path.exists() or path.suffix == ".gguf":
        from galley.engine.load.resolve import resolve_model  # noqa: PLC0415  # converts a GGUF once

        directory = path if path.is_dir() else resolve_model(spec)
        return read_model(model_name(spec), directory, refuse_raw_config)
    return _hub_model(spec, refuse_raw_config)


def _hub_model(spec: str, refuse_config: Callable[[dict[str, Any]], None]) -> Model:
    import httpx2  # noqa: PLC0415
    import huggingface_hub  # noqa: PLC0415  # slow to load
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError  # noqa: PLC0415

    name, revision = hub_model(spec)
    directory = hub_directory(spec, _FILES)
    try:
        headers = huggingface_hub.get_safetensors_metadata(name, revision=revision).files_metadata
    except (httpx2.HTTPError, OSError, NotASafetensorsRepoError, SafetensorsParsingError) as error:
        raise refused(spec, error) from error
    tensors = (
        Tensor(tensor, info.dtype, tuple(info.shape))
        for header in headers.values()
        for tensor, info in header.tensors.items()
    )
    return read_model(name, directory, refuse_config, tensors)


def _free_bytes() -> int:
    """Return what Linux calls available memory; raises OSError elsewhere."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    [available] = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(available) * 1024


def _facts(model: Model, dtype: NumberFormat) -> dict[str, Any]:
    return {
        "name": model.name,
        "parameters": model.parameters,
        "weight_bytes": model.weight_bytes(NUMBER_BYTES[dtype]),
        "kv_bytes_per_token": model.kv_bytes(NUMBER_BYTES[dtype]),
        "tokenizer_hash": model.tokenizer_hash,
    }


def _print(
    specs: tuple[str, str], pair: tuple[Model, Model], fit: Fit, dtype: NumberFormat, memory: int
) -> None:
    console = Console(highlight=False)
    table = Table("", "model", box=None, pad_edge=False)
    for heading in ("parameters", f"GiB in {dtype}", "KV KiB a token"):
        table.add_column(heading, justify="right")
    for role, model in zip(("target", "draft"), pair, strict=True):
        facts = _facts(model, dtype)
        weights, kv = facts["weight_bytes"] / _GIB, facts["kv_bytes_per_token"] / 1024
        table.add_row(
            role, Text(model.name), f"{model.parameters / 1e6:,.1f} M", f"{weights:.2f}", f"{kv:.1f}"
        )
    console.print(table)
    context, needed = pair[0].context, fit.needed_bytes / _GIB
    console.print(
        f"Weights and the KV of one context of {context:,} tokens need {needed:.2f} GiB "
        f"of {memory / _GIB:.2f}.",
        soft_wrap=True,
    )
    if fit.break_even_alpha is None:
        return
    console.print(
        f"A draft step reads 1/{fit.cost_ratio:.1f} of what a target step reads. "
        f"Speculation pays from an acceptance rate of {fit.break_even_alpha:.2f} on.",
        soft_wrap=True,
    )
    for one in fit.gains:
        console.print(f"  at {one.alpha:.2f}: at most {one.gain:.2f}× plain decoding (k={one.k})")
    if (expected := fit.expected) is not None:
        console.print(
            f"  at {expected.alpha:.2f}, measured when the draft was trained: at most {expected.gain:.2f}× "
            f"(k={expected.k})",
            soft_wrap=True,
        )
    if not fit.problem:
        console.print(
            Text(
                "fits; measure it: galley bench --quick "
                f"--model {quote(specs[0])} --draft-model {quote(specs[1])}"
            ),
            soft_wrap=True,
        )

"""Read all weights that a model needs, or refuse it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from galley.engine.errors import UnsupportedModel

_NAMED = 3


def read_weights(model_class: Any, directory: Path, **arguments: Any) -> Any:
    """Load a transformers class (or auto class) from the safetensors in `directory`.

    Raises UnsupportedModel if a weight is missing, which transformers itself would fill with random numbers,
    or has another shape, or if a file is not a safetensors file.
    """
    try:
        module, report = model_class.from_pretrained(
            directory,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **arguments,
        )
    except (OSError, SafetensorError) as error:
        raise UnsupportedModel(f"{directory}: its weights cannot be read: {error}") from error
    mismatched = {name for name, *_ in report["mismatched_keys"]}
    refuse_weights(directory, sorted({*report["missing_keys"], *mismatched}))
    return module


def refuse_weights(directory: Path, wrong: Sequence[str]) -> None:
    """Raise UnsupportedModel if there are names of weights that are missing or have another shape."""
    if wrong:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise UnsupportedModel(
            f"{directory}: weights are missing or do not have the shape of config.json: "
            f"{', '.join(wrong[:_NAMED])}{more}"
        )

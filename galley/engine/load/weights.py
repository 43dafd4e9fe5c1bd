"""Reading weights: all that a model needs, or a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from galley.engine.errors import UnsupportedModel

_NAMED = 3


def read_weights(model_class: Any, directory: Path, **given: Any) -> Any:
    """The model of a transformers class (or auto class), from safetensors in `directory` only.

    Raises UnsupportedModel where a weight is missing, for which transformers itself would make up random
    numbers, or of another shape; or where a file is no safetensors file, whatever it is called.
    """
    try:
        module, found = model_class.from_pretrained(
            directory,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **given,
        )
    except (OSError, SafetensorError) as error:
        raise UnsupportedModel(f"{directory}: its weights cannot be read: {error}") from error
    mismatched = {name for name, *_ in found["mismatched_keys"]}
    refuse_weights(directory, sorted({*found["missing_keys"], *mismatched}))
    return module


def refuse_weights(directory: Path, wrong: Sequence[str]) -> None:
    """Raise UnsupportedModel if there are `wrong` names: of weights missing, or of another shape."""
    if wrong:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise UnsupportedModel(
            f"{directory}: weights are missing or of another shape than config.json says: "
            f"{', '.join(wrong[:_NAMED])}{more}"
        )

"""Checkpoints of a training: one safetensors file, replaced as a whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from galley.core.errors import InvalidField
from galley.distill.export import save_atomically
from galley.distill.origin import refuse_other
from galley.distill.training.training import Progress, Training

_STATE = ("step", "exp_avg", "exp_avg_sq")


def save_checkpoint(training: Training, about: dict[str, Any], path: Path) -> None:
    """Store weights, optimizer and progress; `about` is what a continued run must agree on."""
    tensors = {f"weight/{name}": value for name, value in training.student.state_dict().items()}
    for name, weight in training.student.named_parameters():
        state = training.optimizer.state.get(weight, {})
        tensors |= {f"{part}/{name}": state[part] for part in _STATE if part in state}
    header = {"progress": json.dumps(training.progress.as_dict()), "about": json.dumps(about)}
    save_atomically(tensors, header, path)


def load_checkpoint(training: Training, about: dict[str, Any], path: Path) -> None:
    """Continue from a checkpoint. Raises InvalidField if it cannot be read or belongs to another run."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    except (OSError, SafetensorError) as error:
        raise InvalidField("work", f"{path}: cannot be read: {error}") from error
    stored = json.loads(header["about"])
    refuse_other(stored, about, path)
    training.student.load_state_dict(_under("weight", tensors))
    for part in _STATE:
        for name, value in _under(part, tensors).items():
            training.optimizer.state[training.student.get_parameter(name)][part] = value
    training.progress = Progress(**json.loads(header["progress"]))


def _under(part: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    prefix = f"{part}/"
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

"""Continue training from an existing draft, with more layers if requested."""

from __future__ import annotations

import torch

from galley.core.errors import InvalidField
from galley.distill.export import NORM, SHARPENING
from galley.distill.training.student import Llama

_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def begin_from(student: Llama, draft: Llama) -> None:
    """Give the student the draft's weights; layers that the draft lacks add nothing at first.

    Their outputs start at 0, so that the student proposes what the draft does (as residual branches start in
    Fixup, Zhang et al., arXiv 1901.09321, section 3). Raises InvalidField if the draft does not fit.
    """
    weights = student.state_dict()
    for name, weight in draft.state_dict().items():
        if name not in weights or weights[name].shape != weight.shape:
            raise InvalidField("start", f"{name} does not fit into {student.shape.layers} layers")
        weights[name] = weight / SHARPENING if name == NORM else weight
    for layer in range(draft.shape.layers, student.shape.layers):
        for output in _OUTPUTS:
            name = f"model.layers.{layer}.{output}"
            weights[name] = torch.zeros_like(weights[name])
    student.load_state_dict(weights)

"""Training that goes on from a draft there is already, with more layers if asked."""

from __future__ import annotations

import torch

from galley.core.errors import InvalidField
from galley.distill.export import NORM, SHARPENING
from galley.distill.training.student import Llama

_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def begin_from(student: Llama, draft: Llama) -> None:
    """Give the student the draft's weights; layers that the draft lacks add nothing at first.

    Their outputs begin at 0, so that the student guesses what the draft does (as residual branches begin in
    Fixup, Zhang et al., arXiv 1901.09321, section 3). Raises InvalidField where the draft does not fit.
    """
    begun = student.state_dict()
    for name, weight in draft.state_dict().items():
        if name not in begun or begun[name].shape != weight.shape:
            raise InvalidField("start", f"the draft's {name} has no place in {student.shape.layers} layers")
        begun[name] = weight / SHARPENING if name == NORM else weight
    for layer in range(draft.shape.layers, student.shape.layers):
        for output in _OUTPUTS:
            name = f"model.layers.{layer}.{output}"
            begun[name] = torch.zeros_like(begun[name])
    student.load_state_dict(begun)

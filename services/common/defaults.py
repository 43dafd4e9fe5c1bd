"""Names that more than one part must agree on."""

from __future__ import annotations

# The model that is served where none is named: it comes with the installation, as a GGUF of 4 bits.
DEFAULT_MODEL = "smollm2-135m-instruct"

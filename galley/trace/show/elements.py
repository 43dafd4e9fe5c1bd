"""Build HTML as a tree, so that all text is escaped."""

from __future__ import annotations

from xml.etree.ElementTree import Element, tostring

from galley.common.printable import printable


def element(tag: str, *content: str | Element, **attributes: str) -> Element:
    """Make an element; `class_` is its class. Control characters in its text are replaced."""
    made = Element(tag, {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()})
    last: Element | None = None
    for part in content:
        if isinstance(part, Element):
            made.append(part)
            last = part
        elif last is None:
            made.text = (made.text or "") + printable(part)
        else:
            last.tail = (last.tail or "") + printable(part)
    return made


def markup(tree: Element) -> str:
    """Serialize the tree as HTML."""
    return tostring(tree, encoding="unicode", method="html")

"""HTML as a tree, so that whatever stands in it is escaped."""

from __future__ import annotations

from xml.etree.ElementTree import Element, tostring

from galley.common.printable import printable


def element(tag: str, *content: str | Element, **attributes: str) -> Element:
    """An element; `class_` is its class. What a terminal or a parser might obey in its text is replaced."""
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
    """The tree, written out."""
    return tostring(tree, encoding="unicode", method="html")

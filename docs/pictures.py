"""Save the pictures of the documentation, after a check that they can be read on a phone."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

DPI = 192  # twice the resolution of a screen
SCREEN = 96  # CSS pixels per inch: a picture is shown at half of its pixels, or smaller
PHONE = 358  # CSS pixels of a picture on a phone 390 pixels wide, between the margins of the page
LEAST = 8  # CSS pixels of the smallest text


def save(figure: Figure, path: Path, **options: Any) -> None:
    """Save a figure; raise an error if some of its text cannot be read on a phone."""
    if found := unreadable(figure):
        raise ValueError(f"{path.stem} cannot be read on a phone: {'; '.join(found)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, facecolor="white", **options)


def unreadable(figure: Figure) -> list[str]:
    """List the texts of a figure that are too small on a phone, cut off, or over each other."""
    texts = texts_drawn(figure)
    pixels = min(SCREEN, PHONE / figure.get_figwidth()) / 72  # of a point
    boxes = [text.get_window_extent() for text in texts]
    found = []
    for text, box in zip(texts, boxes, strict=True):
        size, around = text.get_fontsize() * pixels, figure.bbox.padded(1)
        if size < LEAST:
            found.append(f"{text.get_text()!r} is {size:.1f} pixels high, not {LEAST}")
        if not (around.contains(*box.min) and around.contains(*box.max)):
            found.append(f"{text.get_text()!r} is cut off")
    for (one, a), (other, b) in combinations(zip(texts, boxes, strict=True), 2):
        width = min(a.x1, b.x1) - max(a.x0, b.x0)
        height = min(a.y1, b.y1) - max(a.y0, b.y0)
        smaller = min(a.width * a.height, b.width * b.height)
        if width > 0 and height > 0 and width * height > 0.1 * smaller:
            found.append(f"{one.get_text()!r} is over {other.get_text()!r}")
    return found


def texts_drawn(figure: Figure) -> list[Text]:
    """Return the texts that drawing really draws; axes keep ticks that lie outside of them, too."""
    from matplotlib.text import Text

    drawn: dict[int, Text] = {}
    draw = Text.draw

    def recorded(text: Text, *args: Any, **options: Any) -> None:
        if text.get_visible() and text.get_text().strip():
            drawn[id(text)] = text
        draw(text, *args, **options)

    figure.set_dpi(DPI)
    figure.draw_without_rendering()  # the layout of a figure is known after it was drawn once
    with patch.object(Text, "draw", recorded):
        figure.draw_without_rendering()
    return list(drawn.values())

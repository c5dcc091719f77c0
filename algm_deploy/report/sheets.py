"""Sheets of pictures: panels with titles in rows, and the legends and scales that belong to them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from math import ceil, log
from textwrap import wrap

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from algm_deploy.recipe.network import Size
from algm_deploy.recipe.schema import Color
from algm_deploy.report.colors import value_colors

Rgb = NDArray[np.uint8]

INK, SOFT_INK, PAPER = (32, 32, 36), (96, 98, 106), (255, 255, 255)
MARGIN = 28
HEADING, TITLE, TEXT = 30, 26, 21
_LINE, _PAD = 1.35, 14
_SHEET_ASPECT = 1.3
_PAGE_WIDTH = 720


@dataclass(frozen=True)
class Panel:
    """One picture (h, w, 3) with what stands above it; `foot` is drawn below and as wide as the picture."""

    title: str
    subtitle: str
    picture: Rgb
    foot: Rgb | None = None

    def data_url(self) -> str:
        """The picture and its foot for a page, at most `_PAGE_WIDTH` pixels wide.

        Pictures of few colours, such as label maps, stay sharp as PNG; others become JPEG.
        """
        picture = self.picture if self.foot is None else np.concatenate([self.picture, self.foot])
        image = Image.fromarray(picture)
        few = image.getcolors(256) is not None
        if image.width > _PAGE_WIDTH:
            size = (_PAGE_WIDTH, max(1, round(image.height * _PAGE_WIDTH / image.width)))
            image = image.resize(size, Image.Resampling.NEAREST if few else Image.Resampling.LANCZOS)
        stream = BytesIO()
        if few:
            image.quantize(256).save(stream, "PNG", optimize=True)
        else:
            image.save(stream, "JPEG", quality=82)
        return f"data:image/{'png' if few else 'jpeg'};base64,{base64.b64encode(stream.getvalue()).decode()}"


def columns_for(panels: int, size: Size) -> int:
    """How many panels of `size` (height, width) go side by side so that the sheet fits a screen, with few gaps."""

    def misfit(columns: int) -> float:
        rows = ceil(panels / columns)
        gaps = (rows * columns - panels) / panels
        return abs(log(columns * size[1] / (rows * size[0] * _SHEET_ASPECT))) + gaps

    return min(range(1, panels + 1), key=misfit)


def sheet(heading: str, panels: Sequence[Panel], caption: str, columns: int) -> Image.Image:
    """Panels of one size in rows of `columns`, under a heading and over a caption."""
    width = panels[0].picture.shape[1]
    total = columns * (width + MARGIN) + MARGIN
    titles = _leading(TITLE) + max(len(wrapped(panel.subtitle, TEXT, width)) for panel in panels) * _leading(TEXT) + 6
    rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    heights = [titles + max(_height(panel) for panel in row) + MARGIN for row in rows]
    top = MARGIN + _leading(HEADING) + 14
    lines = wrapped(caption, TEXT, total - 2 * MARGIN)
    page = Image.new("RGB", (total, top + sum(heights) + len(lines) * _leading(TEXT) + MARGIN), PAPER)
    write(page, (MARGIN, MARGIN - 6), fitted(heading, HEADING, total - 2 * MARGIN), HEADING)
    for row, height in zip(rows, heights, strict=True):
        for column, panel in enumerate(row):
            _place(page, panel, (MARGIN + column * (width + MARGIN), top), titles)
        top += height
    write_lines(page, (MARGIN, top), lines)
    return page


def legend(entries: Sequence[tuple[Color, str]], width: int) -> Rgb:
    """Colour samples with their names in as many rows as `width` asks for, (h, width, 3)."""
    box, rows, left, width = TEXT, 0, 0, width - 2 * _PAD
    places = []
    for color, name in entries:
        name = fitted(name, TEXT, width - box - 10)
        need = box + 10 + text_width(name, TEXT) + 26
        if left and left + need - 26 > width:
            rows, left = rows + 1, 0
        places.append((color, name, _PAD + left, _PAD + rows * _leading(TEXT)))
        left += need
    page = Image.new("RGB", (width + 2 * _PAD, 2 * _PAD + (rows + 1) * _leading(TEXT)), PAPER)
    draw = ImageDraw.Draw(page)
    for color, name, x, y in places:
        draw.rectangle((x, y + 2, x + box, y + 2 + box), fill=color, outline=INK)
        write(page, (x + box + 10, y), name, TEXT)
    return np.asarray(page)


def scale(low: float, threshold: float, width: int, name: str = "threshold") -> Rgb:
    """The colour scale of similarities from `low` and below to 1, with the threshold marked by name, (h, width, 3)."""
    left, right, top, bottom = 0, width - 1, 12, 32
    page = Image.new("RGB", (width, bottom + 12 + _leading(TEXT)), PAPER)
    bar = value_colors(np.linspace(low, 1, width, dtype=np.float32), low, 1.0)
    page.paste(Image.fromarray(np.broadcast_to(bar, (bottom - top, width, 3)).copy()), (left, top))
    mark = round(min((threshold - low) / (1 - low), 2) * width)  # an infinite threshold lies off the scale as well
    if 0 <= mark < width:
        ImageDraw.Draw(page).line((mark, top - 8, mark, bottom + 8), fill=INK, width=3)
    texts = [(left, f"<= {round(low, 2) + 0.0:.2f}"), (right - text_width("1.00", TEXT), "1.00")]
    label = f"{name} {threshold:.4g}"
    texts.append((min(max(mark - text_width(label, TEXT) // 2, 100), right - 60 - text_width(label, TEXT)), label))
    for x, text in texts:
        write(page, (x, bottom + 10), text, TEXT)
    return np.asarray(page)


def write(page: Image.Image, place: tuple[int, int], text: str, size: int, color: Color = INK) -> None:
    """One line of text; `place` (x, y) is its upper left corner."""
    ImageDraw.Draw(page).text(place, printable(text), fill=color, font=ImageFont.load_default(size))


def write_lines(page: Image.Image, place: tuple[int, int], lines: Sequence[str]) -> None:
    """Lines of explanation below each other from `place` (x, y) on."""
    for number, line in enumerate(lines):
        write(page, (place[0], place[1] + number * _leading(TEXT)), line, TEXT, SOFT_INK)


def printable(text: str) -> str:
    """The text in the letters that Pillow's built-in font has, with `?` for others."""
    return text.encode("ascii", "replace").decode()


def text_width(text: str, size: int) -> int:
    """Width of a line in pixels."""
    return ceil(ImageFont.load_default(size).getlength(printable(text)))


def fitted(text: str, size: int, width: int) -> str:
    """The line, cut with dots where it is longer than `width` pixels."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "...", size) > width:
        text = text[:-1]
    return text + "..."


def wrapped(text: str, size: int, width: int) -> list[str]:
    """The text in lines of at most `width` pixels."""
    letters = max(1, int(len(text) * width / max(text_width(text, size), 1) * 0.97))
    return wrap(text, letters)


def _place(page: Image.Image, panel: Panel, place: tuple[int, int], titles: int) -> None:
    (left, top), (height, width) = place, panel.picture.shape[:2]
    write(page, (left, top), fitted(panel.title, TITLE, width), TITLE)
    write_lines(page, (left, top + _leading(TITLE)), wrapped(panel.subtitle, TEXT, width))
    page.paste(Image.fromarray(panel.picture), (left, top + titles))
    if panel.foot is not None:
        page.paste(Image.fromarray(panel.foot), (left, top + titles + height))


def _height(panel: Panel) -> int:
    return len(panel.picture) + (len(panel.foot) if panel.foot is not None else 0)


def _leading(size: int) -> int:
    return round(size * _LINE)

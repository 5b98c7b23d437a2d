"""Drawings of the page on strides and layouts: memory order, a break, and an ambiguous tensor."""

from html import escape
from pathlib import Path

STYLE = """
svg { --paper: #ffffff; --ink: #1c2430; --soft: #566173; --rule: #b9c2cf; --hurt: #b3261e;
  --last: #0072b2; --on-last: #ffffff; --contiguous: #e69f00; --on-contiguous: #231a00;
  --r: #d55e00; --g: #007a59; --b: #0072b2; --on: #ffffff; --box: #eef1f6; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #14181f; --ink: #e7ebf1; --soft: #a3aebd; --rule: #556172; --hurt: #ff9a90;
    --last: #56b4e9; --on-last: #06202f; --r: #ff9a56; --g: #3ccb9d; --b: #56b4e9; --on: #0d1117;
    --box: #262d38; }
}
text { font: 15px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: var(--ink); }
.paper { fill: var(--paper); } .box { fill: var(--box); stroke: var(--rule); }
.title { font-size: 16px; font-weight: 650; } .soft { fill: var(--soft); font-size: 14px; }
.code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.middle { text-anchor: middle; } .end { text-anchor: end; } .bold { font-weight: 700; }
.r { fill: var(--r); } .g { fill: var(--g); } .b { fill: var(--b); } .on { fill: var(--on); }
.last { fill: var(--last); } .contiguous { fill: var(--contiguous); }
.on-last { fill: var(--on-last); } .on-contiguous { fill: var(--on-contiguous); }
.hurt { fill: var(--hurt); } .cross { stroke: var(--hurt); stroke-width: 3; fill: none; }
.line { stroke: var(--soft); stroke-width: 1.5; fill: none; }
"""
CHANNELS = "RGB"
HEIGHT, WIDTH = 2, 3
_PAGE, _CELL = 680, 32


def text(x: float, y: float, content: str, style: str = "") -> str:
    """Return a line of text; `style` holds classes."""
    return f'<text x="{x:g}" y="{y:g}" class="{style}">{escape(content)}</text>'


def rectangle(x: float, y: float, width: float, height: float, style: str) -> str:
    """Return a rectangle with slightly round corners."""
    size = f'width="{width:g}" height="{height:g}"'
    return f'<rect x="{x:g}" y="{y:g}" {size} rx="3" class="{style}"/>'


def picture(title: str, height: int, parts: list[str], *, width: int = _PAGE) -> str:
    """Return an SVG file with a title for readers that do not see it."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}"'
    lines = [
        f'{head} width="{width}" height="{height}">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        rectangle(0, 0, width, height, "paper"),
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def cell(x: float, y: float, channel: str, label: str) -> list[str]:
    """Draw one value in the colour of its channel."""
    style = channel.lower()
    return [
        rectangle(x + 1, y + 1, _CELL - 2, _CELL - 2, style),
        text(x + _CELL / 2, y + 21, label, "middle on bold"),
    ]


def arc(x: float, y: float, steps: int, label: str) -> list[str]:
    """Draw an arrow above a row of memory, from the first cell to the one `steps` later."""
    start, end = x + _CELL / 2, x + _CELL * (steps + 0.5)
    top = y - 16 - 2 * steps
    curve = f"M{start:g} {y - 3:g}C{start:g} {top:g} {end:g} {top:g} {end:g} {y - 4:g}"
    head = f"M{end - 4:g} {y - 9:g}l4 6l4 -6"
    return [
        f'<path class="line" d="{curve}{head}"/>',
        text(end + 10, y - 9, label, "soft"),
    ]


def memory() -> str:
    """Draw an image of three channels, and its values in memory in both orders."""
    pixels = [(row, column) for row in range(HEIGHT) for column in range(WIDTH)]
    number = {pixel: str(index + 1) for index, pixel in enumerate(pixels)}
    parts = [text(20, 30, "An image with 3 channels (R, G, B) and 2 x 3 pixels", "title")]
    for place, channel in enumerate(CHANNELS):
        left = 20 + place * (WIDTH * _CELL + 28)
        for row, column in pixels:
            label = channel + number[row, column]
            parts += cell(left + column * _CELL, 46 + row * _CELL, channel, label)
    contiguous = [(channel, pixel) for channel in CHANNELS for pixel in pixels]
    last = [(channel, pixel) for pixel in pixels for channel in CHANNELS]
    rows = [
        (190, "contiguous", "stride (18, 6, 3, 1)", contiguous, 6),
        (300, "channels_last", "stride (18, 1, 9, 3)", last, 1),
    ]
    for y, name, stride, order, step in rows:
        parts += [text(20, y - 36, name, "title code"), text(596, y - 36, stride, "soft code end")]
        for place, (channel, pixel) in enumerate(order):
            parts += cell(20 + place * _CELL, y, channel, channel + number[pixel])
        unit = "element" if step == 1 else "elements"
        parts += arc(20, y, step, f"next channel: {step} {unit}")
    return picture("The same image in memory, contiguous and channels-last", 350, parts)


def chain(y: int, title: str, names: list[str], layouts: list[str], notes: list[str]) -> list[str]:
    """Draw modules in a row; `layouts` are those of their outputs, `notes` stand below them."""
    wide, gap = 132, 36
    parts = [text(20, y, title, "title")]
    for place, (name, note) in enumerate(zip(names, notes, strict=True)):
        x = 20 + place * (wide + gap)
        parts += [
            rectangle(x, y + 18, wide, 40, "box"),
            text(x + wide / 2, y + 43, name, "middle bold"),
            *(
                text(x + wide / 2, y + 78 + 18 * line, words, "middle soft")
                for line, words in enumerate(note.split("\n"))
            ),
        ]
        if place == len(names) - 1:
            break
        layout = layouts[place]
        parts += [
            f'<path class="line" d="M{x + wide} {y + 38}h{gap - 3}m-7 -5l7 5l-7 5"/>',
            rectangle(x + wide + gap / 2 - 13, y + 12, 22, 20, layout),
            text(
                x + wide + gap / 2 - 2,
                y + 27,
                "L" if layout == "last" else "C",
                f"middle bold on-{layout}",
            ),
        ]
    return parts


def layout_break() -> str:
    """Draw a chain of modules that loses channels-last, and the same with the repair."""
    names = ["Conv2d", "InstanceNorm", "ReLU", "Conv2d"]
    lost = chain(
        30,
        "Lost: one break, two copies in each forward",
        names,
        ["last", "contiguous", "contiguous"],
        ["", "copies its input\nto contiguous", "keeps what\nit is given", "copies it back\nfirst"],
    )
    kept = chain(
        180,
        "Kept: the same modules after repair_layout",
        names,
        ["last", "last", "last"],
        ["", "computes in\nchannels_last", "", "copies nothing"],
    )
    cross = '<path class="cross" d="M306 37l8 8m0 -8l-8 8"/>'
    legend = [
        rectangle(20, 306, 22, 20, "last"),
        text(31, 321, "L", "middle bold on-last"),
        text(50, 321, "channels_last"),
        rectangle(176, 306, 22, 20, "contiguous"),
        text(187, 321, "C", "middle bold on-contiguous"),
        text(206, 321, "contiguous"),
        '<path class="cross" d="M312 311l10 10m0 -10l-10 10"/>',
        text(332, 321, "break: the layout is lost here"),
    ]
    title = "InstanceNorm returns a contiguous tensor, and the next convolution copies it back"
    return picture(title, 342, [*lost, cross, *kept, *legend])


def ambiguous() -> str:
    """Draw an image of one channel, whose two stride tuples describe the same memory."""
    parts = [text(20, 30, "With one channel both orders are the same memory", "title")]
    for place in range(HEIGHT * WIDTH):
        parts += cell(20 + place * _CELL, 46, "R", f"R{place + 1}")
    parts += [
        text(236, 60, "contiguous", "soft code"),
        text(366, 60, "stride (6, 6, 3, 1)", "soft code"),
        text(236, 80, "channels_last", "soft code"),
        text(366, 80, "stride (6, 1, 3, 1)", "soft code"),
    ]
    return picture("An ambiguous tensor: one memory, two stride tuples", 100, parts)


def write_drawings(folder: Path) -> None:
    """Write the three drawings."""
    for name, draw in (("memory", memory), ("break", layout_break), ("ambiguous", ambiguous)):
        (folder / f"layout-{name}.svg").write_text(draw())

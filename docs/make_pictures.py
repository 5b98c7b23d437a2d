"""Make the pictures of the pages from real runs: drawings, and pages in Chromium.

    python docs/make_pictures.py [drawings] [runs] [screenshots] [example] [--runs FOLDER]

Without a word it makes all of them. `runs` takes about five minutes on two quiet cores; the other words take
its results from the folder of the last call. Screenshots need Chromium and Pillow.
"""

import argparse
import io
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from draw_layouts import picture, text, write_drawings

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
NETWORK = ["model=unet3d", "model.norm=instance"]
LAST, REPAIR = "memfmt=channels_last_3d", "+steps.repair_layout={}"
RUNS = {
    "after": [*NETWORK, LAST, REPAIR],
    "tune": ["task=tune", *NETWORK, "tune.budget=60"],
}  # fmt: skip
# Its page is the example of the site, and what it prints the picture at the top of it.
EXAMPLE = [*NETWORK, LAST, REPAIR]  # on a quiet machine: its page shows a speed
# Name of the picture: run, section (None is the top of the page), height.
SCREENSHOTS = {
    "run-page": ("after", None, 760),
    "verify-section": ("after", "verify", 620),
    "timing-section": ("after", "bench", 620),
    "tune-page": ("tune", None, 900),
}
WIDTH, LIMIT = 1000, 150_000
COLUMNS = 92
CHROMIUM = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--virtual-time-budget=4000",
]  # fmt: skip


def make_runs(folder: Path) -> None:
    """Run every job anew, each in its folder."""
    for name, words in RUNS.items():
        shutil.rmtree(folder / name, ignore_errors=True)
        prepare([*words, f"hydra.run.dir={name}"], folder)


def prepare(words: list[str], folder: Path) -> None:
    """Call the command line in `folder`."""
    subprocess.run([sys.executable, str(ROOT / "run.py"), *words], cwd=folder, check=True)


def make_screenshots(folder: Path) -> None:
    """Take a picture of each page or section, light and dark."""
    for name, (run, section, height) in SCREENSHOTS.items():
        page = folder / run / "report.html"
        for scheme in ("light", "dark"):
            save(
                screenshot(page, section, height, dark=scheme == "dark"),
                PICTURES / f"{name}-{scheme}.webp",
            )


def make_example(folder: Path) -> None:
    """Run the example anew; keep its page, and draw what it prints."""
    shutil.rmtree(folder / "example", ignore_errors=True)
    command = [sys.executable, str(ROOT / "run.py"), *EXAMPLE, "hydra.run.dir=example"]
    environment = os.environ | {"COLUMNS": str(COLUMNS)}
    ran = subprocess.run(command, cwd=folder, check=True, capture_output=True, env=environment)
    (ROOT / "docs" / "example").mkdir(exist_ok=True)
    page = (folder / "example" / "report.html").read_text()
    (ROOT / "docs" / "example" / "report.html").write_text(page)
    shown = terminal(f"$ python run.py {' '.join(EXAMPLE)}", ran.stdout.decode())
    (PICTURES / "run-terminal.svg").write_text(shown)


def terminal(command: str, printed: str) -> str:
    """Draw a command and what it prints, as a terminal shows them."""
    folded = [part for row in printed.splitlines() for part in textwrap.wrap(row, COLUMNS) or [""]]
    rows = [*textwrap.wrap(command, COLUMNS, subsequent_indent="    "), "", *folded]
    first = rows.index("")
    parts = [
        text(20, 36 + 20 * y, row.replace(" ", "\u00a0"), f"code {'bold' if y < first else ''}")
        for y, row in enumerate(rows)
    ]
    return picture(printed.partition("\n")[0], 36 + 20 * len(rows), parts, width=40 + 9 * COLUMNS)


def screenshot(page: Path, section: str | None, height: int, *, dark: bool) -> bytes:
    """Return the PNG of the top of a page, or of one of its sections alone."""
    alone = (
        f"main > :not(#{section}), body > :not(main), header, nav {{ display: none }}"
        if section
        else ""
    )
    with tempfile.TemporaryDirectory() as temporary:
        copy, image = Path(temporary) / "page.html", Path(temporary) / "page.png"
        style = f"<style>{alone} details {{ break-inside: avoid }}</style></head>"
        copy.write_text(page.read_text().replace("</head>", style, 1))
        command = [
            "chromium", *CHROMIUM, f"--user-data-dir={temporary}/profile", f"--screenshot={image}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--window-size={WIDTH},{height}",
            copy.as_uri(),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        return image.read_bytes()


def save(png: bytes, path: Path) -> None:
    """Write the picture as WebP, without the empty rest below its content."""
    from PIL import Image, ImageChops

    image = Image.open(io.BytesIO(png)).convert("RGB")
    empty = Image.new("RGB", image.size, image.getpixel((2, image.height - 2)))
    content = ImageChops.difference(image, empty).getbbox() or (0, 0, *image.size)
    image.crop((0, 0, image.width, min(image.height, content[3] + 16))).save(
        path, quality=82, method=6
    )
    if path.stat().st_size > LIMIT:
        raise SystemExit(f"{path}: {path.stat().st_size} bytes; the limit is {LIMIT}")


def main() -> None:
    """Make what the command line names."""
    words = ("drawings", "runs", "screenshots", "example")
    parser = argparse.ArgumentParser(description="Make the pictures of the pages.")
    parser.add_argument("what", nargs="*", help=f"any of {', '.join(words)}; all without one")
    parser.add_argument("--runs", type=Path, default=ROOT / "outputs" / "pictures")
    options = parser.parse_args()
    if unknown := set(options.what) - set(words):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(words)}")
    chosen = options.what or words
    options.runs.mkdir(parents=True, exist_ok=True)
    if "drawings" in chosen:
        write_drawings(PICTURES)
    if "runs" in chosen:
        make_runs(options.runs)
    if "screenshots" in chosen:
        make_screenshots(options.runs)
    if "example" in chosen:
        make_example(options.runs)


if __name__ == "__main__":
    main()

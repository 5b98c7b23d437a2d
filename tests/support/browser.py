"""Open a page in headless Chromium, and measure it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


browser = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed"),
]


# Opens a page in a frame, and says how wide it came out and how long it took to be laid out.
HARNESS = """<body style="margin:0"><pre id="out"></pre><script>
const frame = document.createElement("iframe");
frame.style.cssText = "border:0;width:%dpx;height:900px";
const start = performance.now();
frame.onload = () => {
  const root = frame.contentDocument.documentElement;
  for (const one of frame.contentDocument.querySelectorAll("details")) one.open = %s;
  document.getElementById("out").textContent = JSON.stringify({
    wide: Math.max(root.scrollWidth, frame.contentDocument.body.scrollWidth), room: root.clientWidth,
    milliseconds: performance.now() - start,
    dark: getComputedStyle(frame.contentDocument.body).backgroundColor});
};
frame.srcdoc = %s;
document.body.append(frame);
</script>"""


# Opens a page in a frame and does something there; `page` is its document, and `seen` is what is told.
ACTING = """<body><pre id="out"></pre><script>
const frame = document.createElement("iframe"), seen = {};
frame.style.cssText = "border:0;width:1200px;height:900px";
if (%s) frame.sandbox = "allow-same-origin";
const pause = () => new Promise((done) => setTimeout(done, 300));
frame.onload = async () => {
  const page = frame.contentDocument;
  try { %s } catch (error) { seen.error = String(error); }
  document.getElementById("out").textContent = JSON.stringify(seen);
};
frame.srcdoc = %s;
document.body.append(frame);
</script>"""


def opened(text: str, folder: Path, *, width: int = 1280, details: bool = False, extra=()):
    """What chromium measures of a page, and what it writes to its console."""
    return dumped(HARNESS % (width, str(details).lower(), quoted(text)), folder, extra)


def acted(text: str, folder: Path, script: str, *, without_scripts: bool = False):
    """What `script` saw after it did something to a page, and what the page wrote to the console."""
    # In a string of a script `<\/` is `</`, and does not end the harness's own.
    harness = ACTING % (str(without_scripts).lower(), script.replace("</", "<\\/"), quoted(text))
    return dumped(harness, folder, ["--virtual-time-budget=20000"])


def quoted(text: str) -> str:
    return json.dumps(text).replace("</", "<\\/").replace("<!--", "<\\!--")


def dumped(harness: str, folder: Path, extra):
    (folder / "harness.html").write_text(harness)
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
               f"--user-data-dir={folder / 'profile'}", *extra, "--dump-dom", (folder / "harness.html").as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    measured = re.search(r'<pre id="out">(.*?)</pre>', done.stdout, re.DOTALL)[1]
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(measured)), said

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


# Opens a page in a frame, and measures its width and counts its elements.
MEASURE = """<body style="margin:0"><pre id="out"></pre><script>
const frame = document.createElement("iframe");
frame.style.cssText = "border:0;width:%dpx;height:900px";
frame.onload = () => {
  const root = frame.contentDocument.documentElement;
  for (const details of frame.contentDocument.querySelectorAll("details")) details.open = %s;
  document.getElementById("out").textContent = JSON.stringify({
    wide: Math.max(root.scrollWidth, frame.contentDocument.body.scrollWidth), room: root.clientWidth,
    elements: frame.contentDocument.querySelectorAll("*").length,
    dark: getComputedStyle(frame.contentDocument.body).backgroundColor});
};
frame.srcdoc = %s;
document.body.append(frame);
</script>"""


# Opens a page in a frame and runs a script on its document `page`; the script fills `seen`.
ACT = """<body><pre id="out"></pre><script>
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
    """Return what chromium measures of a page, and the lines of its console."""
    return run_chromium(MEASURE % (width, str(details).lower(), quoted(text)), folder, extra)


def acted(text: str, folder: Path, script: str, *, without_scripts: bool = False):
    """Run `script` on a page; return what it saw, and the lines of the console."""
    # In a string of a script `<\/` means `</`, and does not end the script of the harness.
    harness = ACT % (str(without_scripts).lower(), script.replace("</", "<\\/"), quoted(text))
    return run_chromium(harness, folder, ["--virtual-time-budget=20000"])


def quoted(text: str) -> str:
    return json.dumps(text).replace("</", "<\\/").replace("<!--", "<\\!--")


def run_chromium(harness: str, folder: Path, extra):
    (folder / "harness.html").write_text(harness)
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
               f"--user-data-dir={folder / 'profile'}", *extra, "--dump-dom", (folder / "harness.html").as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    measured = re.search(r'<pre id="out">(.*?)</pre>', done.stdout, re.DOTALL)[1]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(measured)), console

"""Reports in a real browser: drawn, no errors on the console, nothing cut off on a phone.

Run with ``pytest -m browser`` where Chromium is installed (Debian's package ``chromium``); the
screenshots are kept in the directory that ``--basetemp`` names. Elsewhere they are skipped, and
``-rs`` says so: no package of pip brings a browser along.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from gemma_convert.convert.validation.report import html
from tests.reports import results

pytestmark = pytest.mark.browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SIZES = {"desk": (1200, 4500), "phone": (500, 4500)}

# Written into the page's title once it is drawn: what is wider than the window, and what failed.
PROBE = """
<script>
const failed = [];
addEventListener("error", event => failed.push(event.message));
addEventListener("load", () => {
  const drawn = [...document.querySelectorAll("svg")].map(x => x.getBoundingClientRect());
  document.title = JSON.stringify({
    failed,
    width: document.documentElement.scrollWidth,
    window: innerWidth,
    pictures: drawn.length,
    empty: drawn.filter(x => x.width < 200 || x.height < 20).length,
  });
});
</script>
"""


def chromium(page: Path, *words: str) -> subprocess.CompletedProcess[str]:
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium is installed")
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    # every request that is not for the file itself fails, and would be told on the console
    fixed += ["--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command = [found, *fixed, *words, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(html(results(), ["gemma-convert", "validate"]), encoding="utf-8")
    return path


@pytest.mark.parametrize("size", SIZES)
def test_it_is_drawn_whole(size: str, report: Path) -> None:
    probed = report.with_name(f"{size}.html")
    probed.write_text(report.read_text().replace("</head>", PROBE + "</head>"))
    width, height = SIZES[size]
    done = chromium(probed, f"--window-size={width},{height}", "--dump-dom")
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None
    told = dict(re.findall(r'"(\w+)":(\[\]|\d+)', title[1].replace("&quot;", '"')))
    assert told["failed"] == "[]"
    assert (told["pictures"], told["empty"]) == ("4", "0")
    assert int(told["width"]) <= int(told["window"])  # wide tables scroll inside their own box
    assert "CONSOLE" not in done.stderr


@pytest.mark.parametrize("size", SIZES)
def test_a_screenshot_has_the_colours_of_its_pictures(size: str, report: Path) -> None:
    picture = report.with_name(f"{size}.png")
    width, height = SIZES[size]
    chromium(report, f"--window-size={width},{height}", f"--screenshot={picture}")
    with Image.open(picture) as image:
        assert image.size == (width, height)
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
    print(f"\n{picture}")
    # the verdict's red, the darkest cell of a heat map, the first line of a chart
    assert {(254, 226, 226), (23, 37, 84)} <= colours
    assert any(abs(r - 31) + abs(g - 95) + abs(b - 168) < 30 for r, g, b in colours)


def test_it_prints(report: Path) -> None:
    paper = report.with_name("paper.pdf")
    chromium(report, f"--print-to-pdf={paper}", "--no-pdf-header-footer")
    data = paper.read_bytes()
    assert data.startswith(b"%PDF-")
    assert len(data) > 20_000

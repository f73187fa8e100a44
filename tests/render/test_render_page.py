"""Files: pages with nothing in them but themselves, as a browser opens them, and tables."""

import base64
import hashlib
import io
import json
import math
import re
import shutil
import warnings
from html.parser import HTMLParser
from importlib import resources

import children
import numpy as np
import pytest
import torch
from files_reports import (
    EVIL,
    WRONG,
    attention_report,
    attribution_report,
    experts_report,
    lens_report,
    patterns,
)
from PIL import Image

from llmcli.commands.attention.view import files as pages
from llmcli.commands.attribute.view import attribution_page
from llmcli.commands.experts.view import experts_page, experts_png
from llmcli.commands.lens.view import lens_page
from llmcli.config.attention import visible_pairs
from llmcli.ops.attention import visible_keys
from llmcli.ui.page import SCRIPTS, page
from llmcli.ui.palette import VIRIDIS
from llmcli.ui.png import MOST_TOKENS

TITLE = "a model </title> · Q4_1"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def visible(tokens, window):
    return visible_keys(torch.arange(tokens), tokens, window).numpy()


def attention_page(report, matrices, what="pattern", window=None):
    page = pages.AttentionPage(what)
    for layer, values in matrices.items():
        seen = visible(values.shape[-1], window)
        page.add(layer, values, seen, {"window": window, "chunks": False})
    return page.html(report, TITLE, kind="sqrt")


class Parts(HTMLParser):
    """Elements with what they say: (tag, attributes, text directly in it)."""

    def __init__(self, html):
        super().__init__()
        self.found, self._open = [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes), []))
        if tag not in ("meta", "link", "br", "input", "hr"):
            self._open.append(self.found[-1])

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, text):
        if self._open:
            self._open[-1][2].append(text)

    def by(self, **wanted):
        """Texts and attributes of the elements that have these attributes."""
        return [
            ("".join(text), attributes)
            for _, attributes, text in self.found
            if all(attributes.get(name) == value for name, value in wanted.items())
        ]

    def text(self, id):
        return self.by(id=id)[0][0]

    def kind(self, tag):
        return [one for one in self.found if one[0] == tag]


PAGES = {
    "attention": lambda: attention_page(attention_report(), patterns()),
    "attribute": lambda: attribution_page(attribution_report(method="gradient"), TITLE),
    "experts": lambda: experts_page(experts_report(), TITLE),
    "lens": lambda: lens_page(lens_report(), TITLE),
}


def digest(text):
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@pytest.mark.parametrize("kind", PAGES)
def test_a_page_names_nothing_outside_itself_and_runs_its_own_script_alone(kind):
    text = PAGES[kind]().decode()
    assert not re.findall(r"(?:https?|wss?|ftp)://", text)
    assert not re.findall(r"fetch\(|XMLHttp|WebSocket|import\(|@import|url\(", text)
    parts = Parts(text)
    for _, attributes, _ in parts.found:
        assert all(
            attributes.get(name, "data:,").startswith("data:") for name in ("src", "href", "action")
        )
    policy = next(a["content"] for _, a, _ in parts.kind("meta") if "content" in a)
    assert policy.startswith("default-src 'none'; img-src data:; ")
    assert "unsafe" not in policy
    (style,) = ["".join(text) for _, _, text in parts.kind("style")]
    (script,) = ["".join(text) for _, a, text in parts.kind("script") if "type" not in a]
    for name, text in (("script", script), ("style", style)):
        assert f"{name}-src 'sha256-{digest(text)}'" in policy


@pytest.mark.parametrize("kind", SCRIPTS)
def test_what_a_script_looks_up_by_its_id_is_in_the_page(kind):
    folder = resources.files("llmcli") / "assets" / "pages"
    script = "".join((folder / f"{name}.js").read_text("utf-8") for name in SCRIPTS[kind])
    found = Parts(page(kind, TITLE, {}).decode()).found
    ids = {attributes.get("id") for _, attributes, _ in found}
    assert set(re.findall(r'\$\("([\w-]+)"\)', script)) <= ids


def test_tokens_are_data_and_never_html_and_what_has_no_value_is_null():
    text = PAGES["attention"]().decode()
    parts = Parts(text)
    data = json.loads(parts.text("data"))
    tokens = data["tokens"]
    assert tokens[0] == {"id": 100, "text": EVIL[0]}
    assert tokens[1]["text"] == "\\u2028\\u2029\\n\\x1b[31m"
    assert tokens[3]["text"] == EVIL[3]
    assert not {"\u2028", "\u202e"} & set(text)
    assert parts.kind("title")[0][2] == [f"Attention: {TITLE}"]
    assert data["layers"][0]["heads"][1]["metrics"]["previous_token"] is None
    lens = json.loads(Parts(PAGES["lens"]().decode()).text("data"))
    assert lens["rows"][0]["cells"][0][1] is None
    assert lens["most_kl"] == 2.0


def test_the_page_has_every_choice_and_null_for_what_is_not_there():
    text = experts_page(experts_report(), TITLE).decode()
    data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    assert data["layers"][1]["chosen"] == [5, 0, 0, 1, 1, 2, 2, 3]
    assert data["layers"][1]["margins"][-1] is None
    assert data["layers"][0]["shared"] is None
    assert data["layers"][0]["mean_weights"][5] is None


@pytest.mark.parametrize(
    "report",
    [
        experts_report(3), experts_report(MOST_TOKENS + 50, layers=3, experts=128, per_token=8),
        experts_report(5, layers=40, experts=256, per_token=1), experts_report(check=WRONG),
    ],
)  # fmt: skip
def test_a_picture_of_bounded_size(report):
    image = Image.open(io.BytesIO(experts_png(report, TITLE)))
    assert 1240 <= image.width <= 3000
    red = (np.asarray(image) == (200, 40, 30)).all(-1).any()
    assert bool(red) is not report.ok


@pytest.mark.parametrize(("tokens", "window"), [(12, None), (150, None), (150, 16)])
def test_the_size_of_a_page_is_known_before(tokens, window):
    report, made = attention_report(6, 8, tokens), patterns(6, 8, tokens, window)
    cells = [visible_pairs(tokens, 0, window)] * 6
    estimate = pages.page_size(tokens, cells, 8, len(report.metrics))
    assert len(attention_page(report, made, window=window)) == pytest.approx(estimate, rel=0.1)


@pytest.mark.parametrize("window", [None, 1, 4])
def test_weights_are_kept_as_exactly_as_the_page_says(window):
    values = patterns(1, 2, 9, window)[0]
    data = attention_page(attention_report(1, 2, 9), {0: values}, window=window).decode()
    for number in range(2):
        steps = np.frombuffer(base64.b64decode(Parts(data).text(f"cells-0-{number}")), np.uint8)
        query, key = np.indices((9, 9))
        weights = values[number][(key <= query) & (query - key < (window or 9))]
        assert steps.shape == weights.shape
        error = np.abs((steps / 255) ** 2 - weights)
        assert (error <= np.sqrt(weights) / 255 + 4e-6).all()


@pytest.mark.parametrize("window", [None, 1, 3, 7, 9])
def test_what_is_visible_is_counted(window):
    seen = visible(7, window)
    assert seen.sum() == visible_pairs(7, 0, window)
    assert (seen.sum(1) == np.minimum(np.arange(1, 8), window or 7)).all()
    assert not np.triu(seen, 1).any()


# ---- in a real browser


def driven(html, drive):
    """The page with more behind its own script, and both named by one hash."""
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    html = html.replace(f"<script>{script}", f"<script>{script}{drive}")
    return html.replace(digest(script), digest(script + drive))


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found and children.run([found, "--version"], capture_output=True).returncode == 0:
        return found
    warnings.warn("no Chromium: the pages were NOT opened in a browser", stacklevel=1)
    pytest.skip("no Chromium: the pages were NOT opened in a browser")


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a page without a network, runs `drive` in it, and returns what it has become."""

    def run(make, hash="", drive=""):
        (tmp_path / "page.html").write_bytes(driven(make().decode(), drive).encode())
        done = children.run(
            [
                *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
                *("--disable-dev-shm-usage", "--disable-extensions", "--mute-audio"),
                *("--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--v=0"),
                *(f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000"),
                *("--window-size=1400,900", "--dump-dom"),
                f"file://{tmp_path / 'page.html'}#{hash}",
            ],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        assert not said, said
        page = Parts(done.stdout)
        (body,) = page.kind("body")
        assert body[1].get("data-ready") == "1", done.stderr[-2000:]
        assert "data-error" not in body[1]
        assert page.kind("title")[0][2][0].endswith(TITLE)
        return page

    return run


def weights_shown(page):
    return [
        float(attributes["data-weight"]) if attributes["data-weight"] else None
        for _, attributes in page.by()
        if "data-weight" in attributes
    ]


@pytest.mark.browser
@pytest.mark.parametrize(("layer", "head", "query", "window"), [(0, 3, 7, None), (1, 2, 11, 4)])
def test_a_browser_shows_the_row_of_a_token(opened, layer, head, query, window):
    matrices, report = patterns(window=window), attention_report()
    page = opened(
        lambda: attention_page(report, matrices, window=window),
        f"layer={layer}&head={head}&query={query}&theme=dark",
    )
    shown = weights_shown(page)
    row = matrices[layer][head, query]
    for key, weight in enumerate(row):
        if key > query or (window and query - key >= window):
            assert shown[key] is None
        else:
            assert shown[key] == pytest.approx(weight, abs=math.sqrt(weight) / 255 + 5e-6)
    assert page.text("head") == f"Layer {layer}, head {head}"
    assert page.by(**{"data-metric": "entropy"})[0][1]["data-value"] == str(1.5 + layer + head)
    assert page.by(**{"data-theme": "dark"})
    spans = [text for text, attributes in page.by() if "data-weight" in attributes]
    assert spans[0] == EVIL[0]
    assert spans[1] == "\\u2028\\u2029\\n\\x1b[31m"
    news = [a for _, a in page.by() if "new" in a.get("class", "").split()]
    assert len(news) == 2


@pytest.mark.browser
def test_keys_a_click_and_a_wheel_do_what_they_say(opened):
    matrices, report = patterns(), attention_report()
    drive = """
    const press = (key) => dispatchEvent(new KeyboardEvent("keydown", { key }));
    "ArrowDown ArrowRight ArrowRight ArrowRight ArrowLeft s d t".split(" ").forEach(press);
    document.querySelectorAll(".token")[3].click();
    $("matrix").dispatchEvent(new WheelEvent("wheel",
      { deltaY: -1, clientX: 300, clientY: 300, cancelable: true }));
    document.body.dataset.view = String(view.size);
    """
    page = opened(lambda: attention_page(report, matrices), "theme=light", drive)
    assert page.text("head") == "Layer 1, head 2"
    assert page.by(**{"class": "chip"})[0][0] == "previous"
    assert page.by(**{"data-theme": "dark"})
    pressed = [text for text, _ in page.by(**{"aria-pressed": "true"})]
    assert pressed == ["log", "is attended to by"]
    column = matrices[1][2, :, 3]
    shown = weights_shown(page)
    assert shown[:3] == [None, None, None]
    assert shown[3:] == pytest.approx(column[3:].tolist(), abs=0.004)
    (body,) = page.kind("body")
    assert float(body[1]["data-view"]) == pytest.approx(12 * 0.8)


@pytest.mark.browser
def test_the_canvas_has_the_colours_of_the_numbers(opened):
    """The first row sees itself alone: weight 1 is the last colour, what is masked is hatched."""
    matrices = patterns()
    drive = """
    const ratio = devicePixelRatio, cell = frame.side / T;
    const shown = $("matrix"), context = shown.getContext("2d");
    const all = context.getImageData(0, 0, shown.width, shown.height).data;
    const pixel = (row, column) => {
      const x = Math.floor((frame.left + (column + 0.5) * cell) * ratio);
      const y = Math.floor((frame.top + (row + 0.5) * cell) * ratio);
      return [...all.slice(4 * (y * shown.width + x), 4 * (y * shown.width + x) + 4)];
    };
    document.body.dataset.pixels = JSON.stringify([pixel(0, 0), pixel(0, 9), pixel(9, 2)]);
    """
    page = opened(
        lambda: attention_page(attention_report(), matrices), "theme=light&query=5", drive
    )
    first, masked, other = json.loads(page.kind("body")[0][1]["data-pixels"])
    assert first[:3] == VIRIDIS[255].tolist()
    assert min(masked[:3]) > 215
    step = round(255 * math.sqrt(matrices[0][0, 9, 2]))  # the page begins with this very scale
    assert other[:3] == VIRIDIS[step].tolist()


@pytest.mark.browser
def test_scores_and_a_failed_check_in_a_browser(opened):
    random = np.random.default_rng(1)
    scores = {0: np.where(np.tri(12, dtype=bool), random.normal(size=(4, 12, 12)), -np.inf)}
    report = attention_report(1, check=WRONG)
    page = opened(lambda: attention_page(report, scores, "scores"), "layer=0&head=1&query=11", "")
    seen = scores[0][1][np.tri(12, dtype=bool)]
    step = (seen.max() - seen.min()) / 510 + 1e-6
    assert weights_shown(page) == pytest.approx(scores[0][1, 11].tolist(), abs=step)
    assert page.by(**{"class": "bad"})[0][0].startswith("every row adds up to 1 · 0.5")
    experts = opened(lambda: experts_page(experts_report(check=WRONG), TITLE))
    assert not any("hidden" in one.by(id="alarm")[0][1] for one in (page, experts))


@pytest.mark.browser
def test_one_token_is_a_page_too(opened):
    report = attention_report(1, 2, 1, generated=0)
    page = opened(lambda: attention_page(report, {0: np.ones((2, 1, 1), np.float32)}))
    assert weights_shown(page) == [1.0]
    assert "hidden" in page.by(id="alarm")[0][1]


@pytest.mark.browser
def test_a_browser_shows_the_lens(opened):
    report = lens_report(generated=2)
    drive = """
    dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowUp" }));
    document.querySelector('td[data-row="2"][data-place="3"]').click();
    """
    page = opened(lambda: lens_page(report, TITLE), "row=blocks.0.resid_post&position=2", drive)
    cells = [a for _, a in page.by() if "data-place" in a]
    assert len(cells) == 4 * 5
    settled = [
        (a["data-row"], a["data-place"]) for a in cells if "settled" in a.get("class", "").split()
    ]
    assert settled == [("0", "0"), ("1", "1"), ("2", "2"), ("3", "4")]
    heads = [("".join(text), a.get("class", "")) for _, a, text in page.kind("th")]
    assert [kind for _, kind in heads[:6]] == ["name", "", "", "", "new", "new"]
    assert [words for words, _ in heads[-12:-6]] == ["settled", "embedding", "0", "1", "77", "2"]
    small = ["".join(text) for _, _, text in page.kind("small")]
    assert small == ["1", "2", "3", "4, generated", "5, generated"]
    assert "from 4 on generated; target" in page.text("span")
    cell = report.rows[2].cells[3]
    shown = [a for _, a in page.by() if "data-probability" in a]
    assert [(int(a["data-id"]), float(a["data-probability"])) for a in shown] == [
        (one.id, pytest.approx(one.probability, rel=1e-5)) for one in cell.top
    ]
    assert page.text("place") == "After layer 1"
    words = page.text("place-words")
    assert words.startswith("blocks.1.resid_post at position 4")
    assert words.endswith("(generated)")


@pytest.mark.browser
def test_a_long_lens_shows_a_part_at_a_time(opened):
    report = lens_report(150, 3)
    page = opened(lambda: lens_page(report, TITLE), "position=3", "$('after').click();")
    places = sorted({int(a["data-place"]) for _, a in page.by() if "data-place" in a})
    assert places == list(range(64, 128))
    assert page.text("span").startswith("Positions 65 to 128 of 151")


@pytest.mark.browser
def test_a_browser_shows_the_experts_of_a_token_and_the_load_of_its_layer(opened):
    report = experts_report()
    page = opened(lambda: experts_page(report, TITLE), "layer=1&position=2&by=margin")
    assert page.text("place") == 'Layer 1, position 2: ␣"quoted"␣&␣<b>bold</b>'
    cells = [(text, a) for text, a in page.by() if "data-place" in a]
    assert [text for text, a in cells if a["data-layer"] == "1"] == ["5 0", "0 1", "1 2", "2 3"]
    (chosen,) = [a for _, a in cells if "chosen" in a.get("class", "").split()]
    assert (chosen["data-layer"], chosen["data-place"]) == ("1", "2")
    loads = [text for text, a in page.by() if "aria-pressed" in a and text.startswith("expert")]
    assert sorted(loads) == [f"expert {expert}" for expert in range(6)]
    assert "1 of 6 never taken" in page.text("balance")
    assert "top 2 of 6 by sigmoid + correction, of 2 of 3 groups" in page.text("place-words")


@pytest.mark.browser
def test_an_expert_that_is_clicked_is_seen_in_its_own_layer_alone(opened):
    drive = """
    const press = (key) => dispatchEvent(new KeyboardEvent("keydown", { key }));
    press("ArrowDown"); press("ArrowLeft");
    const buttons = [...document.querySelectorAll("#load button")];
    buttons.find((one) => one.textContent === "expert 1").click();
    """
    page = opened(lambda: experts_page(experts_report(), TITLE), "layer=0&position=3", drive)
    coloured = [a for _, a in page.by() if "data-place" in a and "background" in a.get("style", "")]
    assert {(a["data-layer"], a["data-place"]) for a in coloured} == {("1", "1"), ("1", "2")}
    assert "what expert 1 of layer 1 counts" in page.text("span")

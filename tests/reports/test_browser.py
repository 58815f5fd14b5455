"""The page in Debian's Chromium: what a reader sees and can do, by mouse and by keyboard."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("selenium", reason="the browser tests need selenium")
from selenium import webdriver
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

from noisescope.diagnosis.report import RobustnessCurve
from noisescope.diagnosis.rows import (
    AvalanchePoint,
    CellEffect,
    Divergence,
    Interaction,
    LayerAnalysis,
    LayerEffect,
    LevelEffect,
    WindowEffect,
)
from noisescope.reports import analysis_sections, diagnosis_charts, report_document
from noisescope.reports import document as d
from noisescope.reports.html import to_html
from noisescope.reports.saved_report import DiagnosisReport, Report
from noisescope.stats import Estimate

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")  # fmt: skip
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'`--></script></style></title>{{7*7}}"
OPERATORS = ("linear", "matmul", "bmm", "softmax", "silu", "gelu", "norm", "embedding", "residual")


def axe_file() -> Path | None:
    """axe-core's script: where NOISESCOPE_AXE says, in .axe of the repository, or among npm's global packages."""
    root = Path(__file__).parents[2]
    places = [Path(os.environ.get("NOISESCOPE_AXE", "")), root / ".axe" / "node_modules" / "axe-core" / "axe.min.js"]
    places += [Path(folder) / "node_modules" / "axe-core" / "axe.min.js" for folder in ("/usr/local/lib", "/usr/lib")]
    return next((place for place in places if place.is_file()), None)


pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (os.access(CHROMIUM, os.X_OK) and os.access(DRIVER, os.X_OK)),
        reason=f"no {CHROMIUM} with {DRIVER}: apt-get install chromium chromium-driver",
    ),
]


# -- documents


def estimate(value: float) -> Estimate:
    return Estimate(value, value * 0.6, value * 1.7, 200)


def kl(value: float) -> Divergence:
    return Divergence(estimate(value), estimate(2 * value))


def layer_analysis() -> LayerAnalysis:
    """28 layers x 9 operators, 60 windows; gelu is missing in odd layers."""
    draw = random.Random(1)
    windows: list[WindowEffect] = []
    cells: list[CellEffect] = []
    points: list[AvalanchePoint] = []
    for first in range(60):
        loss = 0.25 if first in (8, 9, 24) else 0.02 * draw.random()
        band = "CRITICAL" if loss > 0.2 else "ROBUST"
        name, last = f"L{first}-{first + 2}", first + 2
        windows.append(
            WindowEffect(
                layer_range=name, start_layer=first, end_layer=last, evidence="injected", band=band, band_upper=band,
                degradation=estimate(loss), kl=kl(loss), predicted_kl=kl(loss / 2),
                interaction_index=Interaction(estimate(draw.random()), "injected"),
            )
        )  # fmt: skip
        if first in (8, 9):
            state: Literal["avalanche", "borderline"] = "avalanche" if first == 8 else "borderline"
            common, loss_found = (first, last), estimate(loss)
            points.append(AvalanchePoint(first, last, name, state, band, loss_found, (0.01,), None, common, None))
    for layer in range(28):
        for operator in OPERATORS:
            if operator == "gelu" and layer % 2:
                continue
            value, injected = 10 ** (-1 - 5 * draw.random()), draw.random() < 0.2
            cells.append(
                CellEffect(
                    layer=layer, operator=operator, evidence="injected" if injected else "predicted",
                    kl=kl(value) if injected else None, predicted_kl=kl(value * 0.8),
                    nats=value if injected else value * 0.8,
                )
            )  # fmt: skip
    rows = [LayerEffect(layer=i, evidence="predicted", predicted_kl=kl(0.01 / (i + 1))) for i in range(28)]
    return LayerAnalysis(
        operators=("gemm",), window=3, step=1, windows=tuple(windows), layers=tuple(rows), places={}, map=tuple(cells),
        avalanche_points=tuple(points), compounding=(), prediction_scale=1.0, point_rule_avalanches=(),
    )  # fmt: skip


ANALYSIS = layer_analysis()
KNOWN = {(f"layer {cell.layer}", cell.operator): cell.nats for cell in ANALYSIS.map}


def large() -> d.Document:
    why = "With errors of 5 % in its matrix products it loses 20 % of its accuracy (95 % interval 12 % to 33 %)."
    verdict = d.Verdict(d.Cell("HIGH", tone="high"), "some parts break under small numerical error", (why,))
    tag = d.Cell("HIGH", tone="high")
    finding = d.Paragraph("costs 25.1 % of the accuracy [19.0 %, 31.2 %], n = 200", "softmax:", "2 times the next", tag)
    next_step = d.Paragraph("Keep layers 8 to 10 in BF16 and look at softmax first.")
    heat = diagnosis_charts.heat_map(ANALYSIS, "accuracy")
    assert heat is not None
    findings = d.Columns((d.Panel("Where", (d.Bullets((finding,) * 3, numbered=True),)), d.Panel("", (heat,))))
    steps = d.Panel("What to do", (next_step, d.Command("noisescope plan migration 'a run'", "List the places:")))
    sure = d.Panel("How certain this is", (d.Bullets((d.Paragraph("200 samples"),)),))
    cells = (d.Cell("softmax"), d.Cell("much " * 12), d.Cell("do " * 20))
    advice = tuple((d.Cell(f"{tone} word", tone=tone), *cells) for tone in d.TONES)
    table = d.Table("advice", ("priority", "part", "issue", "action"), advice)
    tones = tuple(d.Verdict(d.Cell(f"{tone} word", tone=tone), "so", ("why",)) for tone in d.TONES)
    return d.Document(
        "noisescope report",
        (("Model", "some/model-of-a-long-name (SomeForCausalLM, 28 blocks)"), ("Data", "x.jsonl, 200 samples")),
        (
            d.Section("summary", "Summary", (verdict, findings, d.Columns((steps, sure)))),
            d.Section("pictures", "In pictures", tuple(diagnosis_charts.window_chart(ANALYSIS, "accuracy"))),
            d.Section("advice", "Recommendations", (table,)),
            *analysis_sections.layer_sections(ANALYSIS, "accuracy"),
            d.Section("tones", "Every tone", tones),
        ),
        command="noisescope diagnose some/model --samples 200 -o 'a run'",
    )


def robustness() -> d.Document:
    rows = tuple(
        LevelEffect(noise_level=x, accuracy=estimate(0.5 - x), retention=None, band="LOW", band_upper="LOW")
        for x in (0.0, 0.05, 0.2)
    )
    found = report_document.robustness(RobustnessCurve(("gemm",), rows), "accuracy")
    return d.Document("noisescope report", (), (found, *report_document.limits(["a fault"])))


def small() -> d.Document:
    """A table whose numbers have another order than their texts, and one is missing."""
    values: tuple[float | None, ...] = (10.0, 9.0, None, -1.5, 1e-7, 200.0, 3.0, 3.5, 0.0)
    rows = tuple((d.Cell(f"layer {i}"), d.Cell("" if v is None else "abcdefghi"[i], v)) for i, v in enumerate(values))
    return d.Document("d", (), (d.Section("s", "S", (d.Table("t", ("name", "value"), rows),)),))


def hostile() -> d.Document:
    cell, plain = d.Cell(HOSTILE, 1.5, "high"), d.Cell(HOSTILE)
    bars = (d.Bar(HOSTILE, cell, 1.0, 2.0, HOSTILE), d.Bar("b", d.Cell("-2", -2.0), None, -1.0))
    heat = d.HeatMap(HOSTILE, HOSTILE, HOSTILE, (HOSTILE, "r"), (HOSTILE, "c"), ((cell, None), (None, plain)),
                     ((HOSTILE, HOSTILE), (HOSTILE, HOSTILE)), HOSTILE)  # fmt: skip
    blocks = (
        d.Verdict(d.Cell(HOSTILE, tone="critical"), HOSTILE, (HOSTILE,)),
        d.Paragraph(HOSTILE, HOSTILE),
        d.Bullets((d.Paragraph(HOSTILE, HOSTILE),)),
        d.Table(HOSTILE, (HOSTILE, "b"), ((cell, plain),) * 9, HOSTILE),
        d.Chart(HOSTILE, HOSTILE, HOSTILE, bars),
        d.Curve(HOSTILE, HOSTILE, HOSTILE, HOSTILE, tuple((i / 10, bar) for i, bar in enumerate(bars))),
        heat,
        d.HeatTable(heat),
        d.Command(HOSTILE, HOSTILE),
        d.Details(HOSTILE, (d.Paragraph(HOSTILE),)),
        d.Columns((d.Panel(HOSTILE, (d.Paragraph(HOSTILE),)),)),
    )
    return d.Document(HOSTILE, ((HOSTILE, HOSTILE),), (d.Section(HOSTILE, HOSTILE, blocks),), command=HOSTILE)


DOCUMENTS: dict[str, Callable[[], d.Document]] = {
    "large": large, "robustness": robustness, "small": small, "hostile": hostile,
    "empty": lambda: d.Document("noisescope report", (), (d.Section("limits", "Limits", (d.Bullets(()),)),)),
}  # fmt: skip


# -- the browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, made: DiagnosisReport) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    report = Report(made).document()
    texts = {name: to_html(make()) for name, make in DOCUMENTS.items()}
    texts |= {"report": to_html(report), "summary": to_html(report.summary())}
    files = {name: folder / f"{name}.html" for name in texts}
    for name, file in files.items():
        file.write_text(texts[name], encoding="utf-8")
    return files


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield chrome
    chrome.quit()


class Browser:
    """A page in a window of a size, a theme and a medium."""

    def __init__(self, driver: webdriver.Chrome, pages: dict[str, Path]) -> None:
        self.driver, self.pages = driver, pages

    def open(
        self,
        name: str,
        *,
        width: int = 1366,
        theme: str = "light",
        media: str = "",
        script: bool = True,
        unfold: bool = True,
    ) -> None:
        size = {"width": width, "height": 820, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        feature = {"name": "prefers-color-scheme", "value": theme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": [feature]})
        self.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not script})
        for log in ("browser", "performance"):
            self.driver.get_log(log)  # reading it empties it
        self.driver.get(self.pages[name].as_uri())
        self.js("document.documentElement.style.scrollBehavior = 'auto'")
        if unfold:
            self.js("for (const box of document.querySelectorAll('details')) box.open = true")

    def js(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def press(self, *keys: str) -> None:
        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def column(self, selector: str) -> list[str]:
        """Texts of the visible cells that a selector finds, top to bottom."""
        seen = "[...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility())"
        return list(self.js(f"return {seen}.map(e => e.textContent)", selector))

    def hover(self, element: Any) -> list[str]:
        """Move the mouse there; the lines of the tooltip."""
        element = next(iter(element.find_elements(By.CLASS_NAME, "hit")), element)
        self.js("arguments[0].scrollIntoView({block: 'center', inline: 'center'})", element)
        ActionChains(self.driver).move_to_element(element).perform()
        return self.tip()

    def tip(self) -> list[str]:
        return list(self.js("return [...document.querySelectorAll('.tip:not([hidden]) > *')].map(e => e.textContent)"))

    def focused(self) -> str:
        """First line of what is said of the focused cell or bar."""
        return str(self.js("return document.getElementById('status-of-page').textContent")).split(";")[0]


@pytest.fixture
def browser(driver: webdriver.Chrome, pages: dict[str, Path]) -> Browser:
    return Browser(driver, pages)


# -- loading


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_page_loads_without_an_error_and_without_a_request(browser: Browser, name: str) -> None:
    """The console stays silent, and the file itself is all that is asked for."""
    browser.open(name)
    assert browser.driver.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.driver.get_log("performance")]
    asked = {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}
    assert {url for url in asked if not url.startswith("data:")} == {browser.pages[name].as_uri()}


def test_hostile_text_stays_text(browser: Browser) -> None:
    """No alert, no element, no attribute comes from a text; sorting, filters and tooltips don't change that."""
    browser.open("hostile")
    browser.one(".table th button").click()
    browser.one(".table input").send_keys("<script>")
    assert HOSTILE in browser.hover(browser.one(".heat tbody td"))[1]
    browser.hover(browser.one(".shape"))
    found = browser.js(
        "return [document.scripts.length, document.images.length, document.querySelectorAll('[onerror]').length,"
        " document.title, document.querySelectorAll('style').length]"
    )
    assert found == [1, 0, 0, f"{HOSTILE} - {HOSTILE}", 1]
    assert browser.column(".table tbody td")[0] == HOSTILE
    assert browser.driver.get_log("browser") == []


def test_without_javascript_all_can_be_read(browser: Browser) -> None:
    """Numbers, charts and maps stand in the page; no dead control shows; notes are in plain tooltips."""
    browser.open("large", script=False)
    assert not browser.column(".controls, .theme, .copy, th button")
    assert browser.column(".heat tbody th") == [f"layer {i}" for i in range(28)]
    assert "predicted" in browser.one(".heat td[title]").get_attribute("title")
    assert browser.js("return document.querySelectorAll('[data-key=windows-chart] .shape > title').length") == 60


# -- tables


def test_a_header_sorts_by_number_and_a_third_click_restores(browser: Browser) -> None:
    """By value, not by text; what is missing stays last both ways; aria-sort says which."""
    browser.open("small")
    name, head = browser.all("thead th")
    button = head.find_element(By.TAG_NAME, "button")
    layers = ".table tbody th"
    before = browser.column(layers)
    seen = []
    for _ in range(3):
        button.click()
        seen.append((head.get_attribute("aria-sort"), [text[6:] for text in browser.column(layers)]))
    assert seen == [
        ("ascending", ["3", "8", "4", "6", "7", "1", "0", "5", "2"]),
        ("descending", ["5", "0", "1", "7", "6", "4", "8", "3", "2"]),
        ("none", [text[6:] for text in before]),
    ]
    button.click()
    name.find_element(By.TAG_NAME, "button").click()
    assert (head.get_attribute("aria-sort"), name.get_attribute("aria-sort")) == ("none", "ascending")


def test_words_sort_with_their_numbers(browser: Browser) -> None:
    """L10-12 comes after L9-11, not after L1-3; the keyboard sorts as the mouse does."""
    browser.open("large")
    browser.js("document.querySelector('[data-key=windows] th button').focus()")
    browser.press(Keys.ENTER, Keys.SPACE)
    assert browser.column("[data-key=windows] tbody th") == [f"L{i}-{i + 2}" for i in range(59, -1, -1)]


def test_a_filter_keeps_rows_with_the_text(browser: Browser) -> None:
    """Any cell counts, letter case does not, the number of rows is said, and sorting keeps the filter."""
    browser.open("large")
    field = browser.one("[data-key=windows] input")
    field.send_keys("critical")
    assert browser.column("[data-key=windows] tbody th") == ["L8-10", "L9-11", "L24-26"]
    assert browser.one("[data-key=windows] output").text == "3 of 60 rows"
    for _ in range(2):
        browser.one("[data-key=windows] th button").click()
    assert browser.column("[data-key=windows] tbody th") == ["L24-26", "L9-11", "L8-10"]
    field.send_keys(" nowhere")
    assert browser.column("[data-key=windows] tbody th") == []
    field.clear()
    assert len(browser.column("[data-key=windows] tbody th")) == 60


# -- charts


def test_a_bar_shows_its_numbers_and_its_mark(browser: Browser) -> None:
    """Hover and arrow keys give label, text, mark; the bar carries the report's number."""
    browser.open("large")
    lines = ["L9-11", "25.0 % [15.0 %, 42.5 %]", "avalanche point (borderline)", "colour: critical"]
    assert browser.hover(browser.all("[data-key=windows-chart] .shape")[9]) == lines
    values = browser.js(
        "return [...document.querySelectorAll('[data-key=windows-chart] .shape')].map(e => e.dataset.value)"
    )
    assert values == [repr(row.degradation.value) for row in ANALYSIS.windows if row.degradation]
    browser.js("document.querySelector('[data-key=windows-chart] .shape').focus()")
    browser.press(*[Keys.ARROW_RIGHT] * 8)
    assert browser.focused() == "L8-10" and browser.tip()[0] == "L8-10"
    browser.press(Keys.END)
    assert browser.focused() == "L59-61"


def test_a_curve_shows_its_points(browser: Browser) -> None:
    """Each point of an accuracy curve tells its level and its accuracy."""
    browser.open("robustness")
    assert browser.hover(browser.all(".shape")[1]) == ["0.05", "45.0 % [27.0 %, 76.5 %]"]


# -- heat map

CELLS = """return [...document.querySelectorAll('.heat tbody tr')].flatMap(row => [...row.querySelectorAll('td')].map(
  (cell, i) => [row.querySelector('th').textContent, document.querySelectorAll('.heat thead th')[i].textContent,
                cell.dataset.value ?? null]))"""


def test_cells_carry_the_numbers_of_the_json(browser: Browser) -> None:
    """data-value of every cell is the report's number, digit by digit; a missing site has none."""
    browser.open("large")
    found = {(row, column): value for row, column, value in browser.js(CELLS)}
    assert len(found) == 28 * 9
    assert {where: value for where, value in found.items() if value} == {k: json.dumps(v) for k, v in KNOWN.items()}


def test_hovering_a_cell_shows_its_numbers(browser: Browser) -> None:
    """Layer, operator, the cell's text with its unit, and the note with interval and n."""
    browser.open("large")
    cells = browser.all(".heat tbody td")
    for index in (0, 5, 40, 130, 251):
        where = f"layer {index // 9}", OPERATORS[index % 9]
        title, number, note = browser.hover(cells[index])
        assert title == ", ".join(where)
        assert number == f"{cells[index].text} nats per token"
        assert float(number.split()[0].rstrip("*")) == float(f"{KNOWN[where]:.3g}")
        assert note.endswith("n = 200") and f"{KNOWN[where] * 1.7:.3g}" in note
    assert browser.hover(cells[9 + 5]) == ["layer 1, gelu", "no such site"]
    browser.hover(browser.one("h1"))
    assert browser.tip() == []


def order_of(operator: str) -> list[str]:
    return sorted((f"layer {i}" for i in range(28)), key=lambda row: -KNOWN.get((row, operator), -1))


def test_rows_sort_by_a_column_or_by_their_largest(browser: Browser) -> None:
    """Largest first, rows without the site last; model order comes back."""
    browser.open("large")
    control = Select(browser.one(".heat [name=sort]"))
    control.select_by_visible_text("softmax")
    assert browser.column(".heat tbody th") == order_of("softmax")
    control.select_by_visible_text("gelu")
    assert browser.column(".heat tbody th")[:14] == order_of("gelu")[:14]
    control.select_by_visible_text("largest of the row")
    largest = {row: max(v for (r, _), v in KNOWN.items() if r == row) for row, _ in KNOWN}
    assert browser.column(".heat tbody th") == sorted(largest, key=lambda row: -largest[row])
    control.select_by_visible_text("model order")
    assert browser.column(".heat tbody th") == [f"layer {i}" for i in range(28)]


def test_the_map_filters_by_operator_value_and_evidence(browser: Browser) -> None:
    """One operator leaves its column, a minimum and "injected only" leave what they say; reset shows all."""
    browser.open("large")
    lit = ".heat tbody td:not(.off)"
    Select(browser.one(".heat [name=column]")).select_by_visible_text("norm")
    assert browser.column(".heat thead th") == ["norm"]
    assert len(browser.column(lit)) == 28
    browser.one(".heat [name=least]").send_keys("1e-3")
    wanted = [row for row in (f"layer {i}" for i in range(28)) if KNOWN[row, "norm"] >= 1e-3]
    assert 0 < len(wanted) < 28 and browser.column(".heat tbody th") == wanted
    assert browser.one(".heat output").text == f"{len(wanted)} of {len(KNOWN)} cells"
    browser.one(".heat [type=reset]").click()
    assert len(browser.column(lit)) == len(KNOWN) and len(browser.column(".heat tbody th")) == 28
    browser.one(".heat [name=starred]").click()
    injected = sum(cell.kl is not None for cell in ANALYSIS.map)
    shown = browser.column(lit)
    assert len(shown) == injected and all(text.endswith("*") for text in shown)


def test_arrow_keys_move_in_the_map(browser: Browser) -> None:
    """One stop of the tab key; arrows, Home and End move, hidden cells are passed over, each move is announced."""
    browser.open("large")
    browser.js("document.querySelector('.heat [type=reset]').focus()")
    browser.press(Keys.TAB)
    assert browser.focused() == "layer 0, linear" and browser.tip()[0] == "layer 0, linear"
    steps = (
        (Keys.ARROW_RIGHT, "0, matmul"), (Keys.ARROW_DOWN, "1, matmul"), (Keys.END, "1, residual"),
        (Keys.ARROW_RIGHT, "1, residual"), (Keys.HOME, "1, linear"), (Keys.ARROW_UP, "0, linear"),
        (Keys.ARROW_UP, "0, linear"),
    )  # fmt: skip
    for key, where in steps:
        browser.press(key)
        assert browser.focused() == f"layer {where}"
    assert browser.js("return document.querySelectorAll('.heat [tabindex=\"0\"]').length") == 1
    ActionChains(browser.driver).key_down(Keys.CONTROL).send_keys(Keys.END).key_up(Keys.CONTROL).perform()
    assert browser.focused() == "layer 27, residual"
    browser.press(Keys.ESCAPE)
    assert browser.tip() == []
    Select(browser.one(".heat [name=column]")).select_by_visible_text("gelu")
    browser.js("document.querySelector('.heat [type=reset]').focus()")
    browser.press(Keys.TAB, Keys.ARROW_DOWN)
    assert browser.focused() == "layer 2, gelu"


# -- the page


def test_the_theme_follows_the_system_and_the_button(browser: Browser) -> None:
    """Dark where the system is dark; the button turns it by keyboard and names the other theme."""
    background = "return getComputedStyle(document.body).backgroundColor"
    browser.open("large", theme="dark")
    dark = browser.js(background)
    browser.open("large")
    light = browser.js(background)
    assert light != dark
    browser.press(Keys.TAB)
    assert browser.js("return document.activeElement.className") == "skip"
    browser.press(Keys.TAB)
    assert browser.one(".theme").text == "Dark theme"
    browser.press(Keys.ENTER)
    assert (browser.js(background), browser.one(".theme").text) == (dark, "Light theme")
    browser.press(Keys.SPACE)
    assert browser.js(background) == light


def test_the_first_screen_tells_risk_findings_and_next_step(browser: Browser) -> None:
    """On a desk and on a phone, without scrolling."""
    bottom = "return document.querySelector(arguments[0]).getBoundingClientRect().bottom"
    for width in (1366, 380):
        browser.open("large", width=width, unfold=False)
        for selector in (".badge", ".bullets li:nth-child(3)", *((".first svg", ".command") if width > 380 else ())):
            assert browser.js(bottom, selector) <= 820, (width, selector)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_phone_scrolls_no_page_sideways(browser: Browser, name: str) -> None:
    """At 380 and 390 pixels wide tables and maps scroll in boxes of their own."""
    for width in (390, 380):
        browser.open(name, width=width)
        assert browser.js("return document.documentElement.scrollWidth") <= width
    if name == "large":
        assert browser.js(
            "const box = document.querySelector('.heat .scroll'); return box.scrollWidth > box.clientWidth"
        )


def test_print_has_no_controls_and_cuts_nothing(browser: Browser) -> None:
    """On paper: no buttons, filters or contents; all rows, no inner scrolling, always light."""
    browser.open("large", width=718, theme="dark", media="print", unfold=False)
    assert browser.column(".controls, .theme, .copy, nav, .tip") == []
    boxes = browser.js(
        "return [...document.querySelectorAll('.scroll')].map(e => [e.scrollWidth <= e.clientWidth,"
        " getComputedStyle(e).overflowX, getComputedStyle(e).maxHeight])"
    )
    assert len(boxes) == 7 and all(box == [True, "visible", "none"] for box in boxes)
    assert len(browser.column("[data-key=windows] tbody th")) == 60
    assert browser.js("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


# Every text against what lies behind it: backgrounds of its ancestors painted onto a pixel, WCAG contrast.
CONTRAST = """
const pixel = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
const paint = (colour) => { pixel.fillStyle = colour; pixel.fillRect(0, 0, 1, 1); };
const light = () => { const part = [...pixel.getImageData(0, 0, 1, 1).data].slice(0, 3).map(
  c => c / 255 <= .04045 ? c / 255 / 12.92 : ((c / 255 + .055) / 1.055) ** 2.4);
  return .2126 * part[0] + .7152 * part[1] + .0722 * part[2]; };
const poor = [];
for (const element of document.querySelectorAll('body *')) {
  const own = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
  if (!own || !element.getClientRects().length || element.closest('.unseen, script, select, .skip')) continue;
  const chain = []; for (let e = element; e; e = e.parentElement) chain.unshift(e);
  chain.forEach(e => paint(getComputedStyle(e).backgroundColor));
  const back = light();
  const style = getComputedStyle(element);
  paint(element instanceof SVGElement ? style.fill : style.color);
  const pair = [back, light()].sort((a, b) => a - b);
  const ratio = (pair[1] + .05) / (pair[0] + .05);
  if (ratio < 4.5) poor.push(element.className + ' ' + element.textContent.trim() + ' ' + ratio.toFixed(2));
}
return poor;"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_stands_out(browser: Browser, theme: str) -> None:
    """At least 4.5 : 1 in both themes, for every tone, with some cells of the map filtered out."""
    browser.open("large", theme=theme)
    browser.one(".heat [name=starred]").click()
    assert browser.js(CONTRAST) == []


def test_a_command_is_copied_by_its_button(browser: Browser) -> None:
    """The button of a next step, by keyboard; what is copied is the command as it stands."""
    browser.open("large", unfold=False)
    browser.driver.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite"]})
    browser.js("document.querySelector('.command .copy').focus()")
    browser.press(Keys.ENTER)
    WebDriverWait(browser.driver, 3).until(lambda _: browser.one(".command .copy").text in ("Copied", "Selected"))
    read = "navigator.clipboard.readText().then(arguments[0], () => arguments[0](String(getSelection())))"
    assert browser.driver.execute_async_script(read) == "noisescope plan migration 'a run'"


def test_details_are_folded_until_they_are_opened(browser: Browser) -> None:
    """The first view has pictures and sentences; a click shows a table, whose box is a stop of the tab key."""
    browser.open("large", width=380, unfold=False)
    assert browser.column("[data-key=windows] tbody th") == [] and browser.all("details") != []
    browser.js("document.querySelector('[data-key=windows]').closest('details').querySelector('summary').click()")
    assert len(browser.column("[data-key=windows] tbody th")) == 60
    WebDriverWait(browser.driver, 3).until(
        lambda _: browser.one("[data-key=windows] .scroll").get_attribute("tabindex") == "0"
    )


AXE = axe_file()


@pytest.mark.skipif(
    AXE is None, reason="no axe-core: npm install --prefix .axe axe-core, or set NOISESCOPE_AXE to axe.min.js"
)
@pytest.mark.parametrize(
    ("name", "width", "theme", "unfold"),
    [
        ("report", 1366, "light", True),
        ("report", 390, "dark", True),
        ("summary", 390, "light", False),
        ("robustness", 1366, "dark", False),
    ],
)
def test_axe_finds_nothing(browser: Browser, name: str, width: int, theme: str, unfold: bool) -> None:
    """Accessibility by axe-core's own rules, of whatever impact, in a whole report."""
    assert AXE is not None
    browser.open(name, width=width, theme=theme, unfold=unfold)
    browser.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": AXE.read_text(encoding="utf-8")})
    found = browser.driver.execute_async_script("axe.run().then(arguments[0], e => arguments[0](String(e)))")
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found["violations"]] == []
    assert len(found["passes"]) > 20


def test_the_page_names_its_parts_for_screen_readers(browser: Browser) -> None:
    """Landmarks, one h1, labelled controls, a grid with headers, and a focus ring on what has the focus."""
    browser.open("large")
    roles = {role: len(browser.all(selector)) for role, selector in
             {"main": "main", "contents": "nav[aria-label]", "title": "h1", "grid": "table[role=grid][aria-label]",
              "status": "[role=status]"}.items()}  # fmt: skip
    assert roles == {"main": 1, "contents": 1, "title": 1, "grid": 1, "status": 1}
    assert not browser.js("return [...document.querySelectorAll('input, select')].filter(e => !e.labels.length).length")
    browser.press(Keys.TAB, Keys.TAB)
    assert browser.js("return getComputedStyle(document.activeElement).outlineStyle") == "solid"

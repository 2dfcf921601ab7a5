"""The page in headless Chromium: sorting, filtering, paging through rescues, no network requests, inert hostile text.
Skipped if Chromium or its driver is not installed."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import PATIENCE, Cli
from made_runs import made_run, publish, rescue, with_rescues

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="no Chromium with its driver (apt install chromium chromium-driver)"
)
HOSTILE = "</script><script>window.taken=1</script><img src=x onerror='window.taken=1'><b>bold</b>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = str(CHROMIUM)
    for flag in ("--headless", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,1600"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def open_page(browser: Any, page: Path) -> None:
    """Open a page, and wait until its script has shown the first rescues."""
    browser.get_log("performance")
    began = time.monotonic()
    browser.get(page.as_uri())
    while browser.execute_script("return document.documentElement.dataset.ready") is None:
        assert time.monotonic() - began < PATIENCE, "the page's script has not run"
        time.sleep(0.01)


def page_of(cli: Cli, *arguments: Path | str) -> Path:
    result = cli("report", *arguments, "--json")
    assert result.returncode == 0, result.stderr
    return Path(json.loads(result.stdout)["page"])


def texts(browser: Any, selector: str) -> list[str]:
    return [element.text for element in browser.find_elements("css selector", selector)]


def test_tables_sort_and_filter_by_mouse_and_keyboard(cli_here: Cli, tmp_path: Path, browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    runs = [
        made_run(tmp_path / f"{regime}-{seed}", regime, seed=seed, gain=gain)
        for regime, gain in (("grpo", 0.1), ("sgt", 0.3), ("xgrpo", 0.2))
        for seed in (0, 1)
    ]
    open_page(browser, page_of(cli_here, *runs, "--out", "page"))
    table = browser.find_element("css selector", "table[aria-labelledby=table-1-1]")

    def column(n: int) -> list[str]:
        rows = [row for row in table.find_elements("css selector", "tbody tr") if row.is_displayed()]
        return [row.find_elements("tag name", "td")[n].text for row in rows]

    assert column(0) == [run.name for run in runs]
    regime, seed = (table.find_elements("css selector", "th button")[n] for n in (2, 5))
    seed.click()
    assert column(5) == ["0", "0", "0", "1", "1", "1"]
    seed.send_keys(Keys.ENTER)
    assert column(5) == ["1", "1", "1", "0", "0", "0"]
    heads = table.find_elements("css selector", "th")
    assert [head.get_attribute("aria-sort") for head in heads] == [None] * 5 + ["descending", None, None]
    regime.click()
    assert column(2) == ["grpo", "grpo", "sgt", "sgt", "xgrpo", "xgrpo"]
    browser.find_element("css selector", "section input[type=search]").send_keys("XGRPO")
    assert column(2) == ["xgrpo", "xgrpo"]
    for figure in browser.find_elements("css selector", "figure"):
        labelled = figure.get_attribute("aria-labelledby")
        assert browser.find_element("id", labelled).text
        assert figure.find_element("css selector", ".plot svg").size["width"] >= 200
    ids = browser.execute_script("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_rescue_browser_pages_and_filters(cli_here: Cli, tmp_path: Path, browser: Any) -> None:
    from selenium.webdriver.support.select import Select

    rows = [rescue(step, f"p{step}", prompt=f"{step}+1:", answer=f" \\boxed{{{step + 1}}}") for step in range(1, 26)]
    run = with_rescues(with_rescues(made_run(tmp_path / "r", "sgt"), "ada", rows), "bob", [rescue(3, "p3", peer="ada")])
    publish(
        run,
        "ada",
        [[], *[[(f"p{step}", float(step % 2), " \\boxed{1}" if step % 2 else None)] for step in range(1, 26)]],
    )
    open_page(browser, page_of(cli_here, run))
    status = browser.find_element("id", "rescues-status")
    assert status.text == "1 to 5 of 26 rescues"
    first = texts(browser, ".rescue")[0]
    assert "ada, step 1, learned from bob" in first
    assert "1+1:" in first
    assert "Own answers (2)" in first
    assert "(empty)" in first
    assert "in round 1: 1 of 1 correct" in first
    assert "What followed a rescue?" in texts(browser, "h3")
    for _ in range(5):
        browser.find_element("id", "rescues-on").click()
    assert status.text == "26 to 26 of 26 rescues"
    assert not browser.find_element("id", "rescues-on").is_enabled()
    Select(browser.find_element("id", "rescues-policy")).select_by_visible_text("bob")
    assert status.text == "1 to 1 of 1 rescues"
    Select(browser.find_element("id", "rescues-policy")).select_by_visible_text("all")
    Select(browser.find_element("id", "rescues-outcome")).select_by_value("solved")
    assert status.text == "1 to 5 of 13 rescues"  # the odd steps
    browser.find_element("id", "rescues-search").send_keys("boxed{8}")
    assert status.text == "1 to 1 of 1 rescues"
    assert "7+1:" in texts(browser, ".rescue")[0]
    browser.find_element("id", "rescues-search").send_keys("nothing of the kind")
    assert status.text == "No rescues match these filters"


def test_hostile_text_is_inert_and_the_page_fetches_nothing(cli_here: Cli, tmp_path: Path, browser: Any) -> None:
    run = made_run(tmp_path / "r", "sgt", pool=HOSTILE, command=["mutualrl", HOSTILE])
    hostile = rescue(1, prompt=HOSTILE, answer=HOSTILE, peer=HOSTILE, own=[{"text": HOSTILE, "reward": 0.0}])
    with_rescues(run, "ada", [hostile])
    open_page(browser, page_of(cli_here, run))
    time.sleep(0.3)
    assert browser.execute_script("return window.taken") is None
    shown = texts(browser, ".rescue")[0]
    assert shown.count("<img src=x onerror='window.taken=1'><b>bold</b>") == 5
    assert not browser.find_elements("css selector", "img, main b, .rescue b")
    browser.execute_script("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=window.taken=1>')")
    browser.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.taken = 1'; document.body.append(s)"
    )
    time.sleep(0.3)
    assert browser.execute_script("return window.taken") is None  # the content security policy blocks other scripts
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requested = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert requested
    assert all(url.startswith(("file:", "data:")) for url in requested), requested


@pytest.mark.extended
def test_page_of_50000_records_opens_and_renders_only_those_in_view(
    cli_here: Cli, tmp_path: Path, browser: Any
) -> None:
    text = "Let me think about it step by step. " * 8
    own_answers = [{"text": f"{text} \\boxed{{{n}}}", "reward": 0.0} for n in range(4)]
    rows = [
        rescue(
            1 + n // 2500, f"p{n}", prompt=f"What is {n} + {n}?", answer=f"{text}\\boxed{{{2 * n}}}", own=own_answers
        )
        for n in range(50_000)
    ]
    run = with_rescues(made_run(tmp_path / "r", "sgt"), "ada", rows)
    page = page_of(cli_here, run)
    open_page(browser, page)
    assert browser.find_element("id", "rescues-status").text == "1 to 5 of 50000 rescues"
    assert browser.execute_script("return document.getElementsByTagName('*').length") < 3000
    browser.find_element("id", "rescues-search").send_keys("What is 49999 ")
    assert browser.find_element("id", "rescues-status").text == "1 to 1 of 1 rescues"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_schemes_have_enough_contrast(cli_here: Cli, tmp_path: Path, browser: Any, scheme: str) -> None:
    page = page_of(cli_here, with_rescues(made_run(tmp_path / "r", "sgt"), "ada", [rescue(1)]))
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    open_page(browser, page)
    style = "const s = getComputedStyle(document.querySelector(arguments[0])); return [s.color, s.backgroundColor]"
    ink, paper = browser.execute_script(style, "body")
    assert contrast(ink, paper) > 10
    assert (luminance(paper) < 0.2) == (scheme == "dark")
    box = browser.execute_script(style, ".rescue")[1]
    for selector in (".good", ".bad", "a[href='#made']"):
        assert contrast(browser.execute_script(style, selector)[0], box) > 4.5, selector
    label = "return getComputedStyle(document.querySelector('.plot svg text')).fill"
    assert contrast(browser.execute_script(label), paper) > 7
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def luminance(colour: str) -> float:
    """Return the relative luminance of `rgb(r, g, b)` (WCAG 2)."""
    parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio (WCAG 2)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400, pytest.param(2560, marks=pytest.mark.release)])
def test_axe_finds_no_violations_and_nothing_is_cut_off(
    cli_here: Cli, tmp_path: Path, browser: Any, width: int, scheme: str
) -> None:
    """Check axe-core's rules for WCAG and best practices on a page with every kind of content."""
    axe = pytest.importorskip("axe_core_python", reason="axe-core-python is not installed")
    runs = [
        made_run(tmp_path / f"{regime}-{seed}", regime, seed=seed, gain=gain)
        for regime, gain in (("grpo", 0.1), ("sgt", 0.3))
        for seed in (0, 1, 2)
    ]
    with_rescues(runs[-1], "ada", [rescue(step, f"p{step}") for step in range(1, 13)])
    with_samples(counted(runs[-1]))
    page = page_of(cli_here, *runs, "--out", "page")
    browser.get_log("browser")
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme_feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme_feature]})
    try:
        open_page(browser, page)
        rules = (Path(axe.__file__).parent / "axe.min.js").read_text()
        browser.execute_cdp_cmd("Runtime.evaluate", {"expression": rules})  # not blocked by the page's own policy
        violations = browser.execute_async_script(
            "const done = arguments[0]; axe.run().then((r) => done(r.violations));"
        )
        assert [(violation["id"], violation["nodes"][0]["html"]) for violation in violations] == []
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        columns = browser.execute_script(
            "return getComputedStyle(document.querySelector('.figures')).gridTemplateColumns.split(' ').length"
        )
        assert (columns > 1) == (width > 1300)
        assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_rescue_by_a_hint_shows_three_texts(cli_here: Cli, tmp_path: Path, browser: Any) -> None:
    """The own failure, the hint, and the own answer to it; what differs between the last two is marked."""
    own = [{"text": " 9 \\boxed{9}", "reward": 0.0}]
    rows = [{**rescue(1, own=own, answer=" 4+3=7 \\boxed{7}"), "hint": f" 3+4=7 \\boxed{{7}} {HOSTILE}"}]
    open_page(browser, page_of(cli_here, with_rescues(made_run(tmp_path / "r", "sgt"), "ada", rows)))
    failure, hint, answer = browser.find_elements("css selector", ".rescue .pair.three > div")
    assert failure.text.split("\n") == ["Own answers (1)", " 9 \\boxed{9}"]
    assert hint.text.startswith("bob's success, shown as a hint\n 3+4=7 \\boxed{7} </script>")
    assert answer.text.split("\n") == ["Own answer to the hint, confirmed", " 4+3=7 \\boxed{7}"]
    assert [mark.text for mark in answer.find_elements("css selector", "mark")] == ["4+3=7"]
    assert browser.execute_script("return window.taken") is None


def test_result_comes_first_and_a_rescue_marks_where_its_texts_differ(
    cli_here: Cli, tmp_path: Path, browser: Any
) -> None:
    own_answers = [{"text": " 12 then \\boxed{20}", "reward": 0.0}, {"text": "", "reward": 0.0}]
    run = made_run(tmp_path / "r", "sgt")
    with_rescues(run, "ada", [rescue(1, own=own_answers, answer=" 15 then \\boxed{15}"), rescue(2, own=[], answer="4")])
    open_page(browser, page_of(cli_here, run))
    heads = texts(browser, "h2")
    assert (heads[0], heads[-3:]) == ("No baseline yet", ["What was rescued?", "Tables", "How it was made"])
    places = [
        element.rect["y"]
        for element in browser.find_elements("css selector", ".verdict, figure, .rescue, table.sortable")
    ]
    assert places == sorted(places)
    assert texts(browser, ".pair .bad mark") == ["12", "\\boxed{20}"]
    assert texts(browser, ".pair .good mark") == ["15", "\\boxed{15}"]
    left, right = browser.find_elements("css selector", ".rescue:first-child .pair > div")
    assert left.rect["y"] == right.rect["y"]
    assert left.rect["x"] < right.rect["x"]
    (recipe,) = (link for link in browser.find_elements("css selector", "#main p a") if link.text == "r")
    assert recipe.get_attribute("href") == (run / "recipe.yaml").as_uri()
    assert "underline" in browser.execute_script(
        "return getComputedStyle(document.querySelector('mark')).textDecorationLine"
    )


def test_long_answers_are_compared_and_empty_ones_are_labelled(cli_here: Cli, tmp_path: Path, browser: Any) -> None:
    long_text = " ".join(f"w{number}" for number in range(600))
    rows = [
        rescue(1, own=[{"text": f"{long_text} \\boxed{{1}}", "reward": 0.0}], answer=f"{long_text} \\boxed{{2}}"),
        rescue(2, own=[{"text": "a " * 3000, "reward": 0.0}], answer="b " * 3000),
        rescue(3, own=[{"text": "a", "reward": 0.0}], answer=""),
    ]
    open_page(browser, page_of(cli_here, with_rescues(made_run(tmp_path / "r", "sgt"), "ada", rows)))
    first, second, third = browser.find_elements("css selector", ".rescue")
    marks = [mark.text for mark in first.find_elements("css selector", "mark")]
    assert len(marks) == 2
    assert len(second.find_elements("css selector", "mark")) == 4000
    assert "(empty)" in third.text


def test_page_is_usable_by_keyboard_alone(cli_here: Cli, tmp_path: Path, browser: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    run = with_rescues(made_run(tmp_path / "r", "sgt"), "ada", [rescue(step, f"p{step}") for step in range(1, 26)])
    open_page(browser, page_of(cli_here, run))
    reached = []
    for _ in range(200):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        active = browser.switch_to.active_element
        name = active.get_attribute("id") or active.tag_name
        reached.append(name)
        assert browser.execute_script("return getComputedStyle(arguments[0]).outlineStyle", active) != "none", name
        if name == "rescues-on":
            break
    assert reached[0] == "a"  # the link that skips to the content
    assert {"summary", "rescues-policy", "rescues-outcome", "rescues-search"} <= set(reached)
    ActionChains(browser).send_keys(Keys.ENTER).perform()
    assert browser.find_element("id", "rescues-status").text == "6 to 10 of 25 rescues"


def test_phone_sees_whole_figures_and_scrolls_tables(cli_here: Cli, tmp_path: Path, browser: Any) -> None:
    long = "a-name-of-a-run-that-is-rather-long"
    runs = [made_run(tmp_path / f"{long}-{regime}", regime, seed=0, gain=0.2) for regime in ("grpo", "sgt")]
    with_rescues(runs[-1], "ada", [rescue(1)])
    page = page_of(cli_here, *runs, "--out", "page")
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        open_page(browser, page)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
        narrowest = "return Math.min(...[...document.querySelectorAll('.sortable td')].map(e => e.clientWidth))"
        assert browser.execute_script(narrowest) >= 24
        lines = (
            "return [...document.querySelectorAll('.sortable td, .sortable th')].map(e => {"
            " const words = e.textContent.split(/[^A-Za-z]+/).filter(w => w.length <= 12);"
            " const longest = Math.max(0, ...words.map(w => w.length));"
            " return e.clientWidth / Math.max(1, longest); })"
        )
        assert min(browser.execute_script(lines)) > 6  # pixels per letter: no word of a column name is broken
        inside = "const w = innerWidth; return [...document.querySelectorAll('.plot svg text')].map(e => e.getBoundingClientRect()).every(r => r.left >= 0 && r.right <= w)"
        assert browser.execute_script(inside)  # the whole figure is in view
        intro = browser.find_element("css selector", "#rescues > p").text
        assert "own answers (above)" in intro and "trained on (below)" in intro
        own, peer = browser.find_elements("css selector", ".rescue .pair > div")
        assert own.rect["y"] + own.rect["height"] <= peer.rect["y"]
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    open_page(browser, page)
    assert "own answers (left)" in browser.find_element("css selector", "#rescues > p").text


# ---- charts


def noisy(run: Path) -> Path:
    """Put a spike of the KL loss at step 7, and values of five digits, into a run's metrics."""
    for policy in ("ada", "bob"):
        path = run / "policies" / policy / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row["entropy"] = round(0.5 + 0.123457 * (row["step"] % 7), 6)
            row["kl"] = 900.0 if row["step"] == 7 and policy == "ada" else 0.01 * row["step"]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def panel_of(browser: Any, title: str) -> Any:
    return browser.find_element("xpath", f"//div[@class='panel'][h4[text()='{title}']]")


def test_values_by_pointer_and_by_keyboard_are_those_of_the_data(cli_here: Cli, tmp_path: Path, browser: Any) -> None:
    """All line charts show the same step; a value is the data's, to five significant digits."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    run = noisy(made_run(tmp_path / "r", "sgt"))
    rows = [json.loads(line) for line in (run / "policies" / "ada" / "metrics.jsonl").read_text().splitlines()]
    open_page(browser, page_of(cli_here, run))
    entropy, reward = panel_of(browser, "entropy"), panel_of(browser, "training reward")
    plot = entropy.find_element("css selector", ".plot")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    ActionChains(browser).move_to_element_with_offset(plot, plot.size["width"] // 4, 0).perform()
    readout = entropy.find_element("css selector", ".readout").text
    step = int(readout.split("optimizer step ")[1].split(":")[0])
    assert 10 < step < 20
    assert f"ada {rows[step - 1]['entropy']:.5g}" in readout
    assert f"optimizer step {step}:" in reward.find_element("css selector", ".readout").text
    assert f"ada {rows[step - 1]['reward']:.5g}" in reward.find_element("css selector", ".readout").text
    plot.send_keys(Keys.HOME)
    shown = []
    for _ in range(20):
        shown.append((plot.get_attribute("aria-valuenow"), plot.get_attribute("aria-valuetext")))
        plot.send_keys(Keys.ARROW_RIGHT)
    expected = [f"{row['entropy']:.5g}" for row in rows]
    assert [now for now, _ in shown] == [str(row["step"]) for row in rows]
    assert [text.split(": ada ")[1].split(",")[0] for _, text in shown] == expected
    assert plot.get_attribute("role") == "slider"
    assert plot.get_attribute("aria-label") == "entropy, optimizer step"


def test_a_spike_does_not_flatten_its_axis_and_is_marked(cli_here: Cli, tmp_path: Path, browser: Any) -> None:
    open_page(browser, page_of(cli_here, noisy(made_run(tmp_path / "r", "sgt"))))
    panel = panel_of(browser, "KL loss")
    (mark,) = panel.find_elements("css selector", ".outlier title")
    assert mark.get_attribute("textContent") == "ada, 7: 900"
    ticks = [float(each.text) for each in panel.find_elements("css selector", "text[text-anchor=end]")]
    assert max(ticks[:-1]) < 1
    panel.find_element("css selector", ".plot").send_keys("\ue011", *["\ue014"] * 6)  # Home, six steps on
    assert "ada 900" in panel.find_element("css selector", ".readout").text


def test_steps_are_whole_and_constant_metrics_are_in_a_table(cli_here: Cli, tmp_path: Path, browser: Any) -> None:
    run = made_run(tmp_path / "r", "sgt", steps=3)
    open_page(browser, page_of(cli_here, run))
    axis = panel_of(browser, "training reward").find_elements("css selector", "text:not([text-anchor=end])")
    assert {each.text for each in axis} <= {"1", "2", "3"}
    titles = texts(browser, ".panel h4")
    assert "waiting for other members" not in titles  # 0.1 at every step
    table = browser.find_element("xpath", "//table[.//th[.//text()='metric']]")
    rows = [
        [cell.text for cell in row.find_elements("tag name", "td")]
        for row in table.find_elements("xpath", ".//tbody/tr")
    ]
    assert ["waiting for other members", "ada", "0.1", "seconds per step", "1 to 3"] in rows
    assert not [
        each
        for each in browser.find_elements("css selector", ".plot")
        if not each.find_elements("css selector", "path, rect")
    ]


def test_one_colour_per_name_and_arms_are_switched_everywhere(cli_here: Cli, tmp_path: Path, browser: Any) -> None:
    runs = [
        made_run(tmp_path / f"{regime}-{seed}", regime, seed=seed, gain=gain + 0.05 * seed)
        for regime, gain in (("grpo", 0.1), ("sgt", 0.3))
        for seed in (0, 1)
    ]
    open_page(browser, page_of(cli_here, *runs, "--out", "page"))
    colours = "return [...document.querySelectorAll('.legend button[data-label]')].map(b => [b.dataset.label, b.querySelector('line').getAttribute('stroke'), b.querySelector('line').getAttribute('stroke-dasharray')])"
    by_name: dict[str, set[tuple[str, str]]] = {}
    for name, colour, dash in browser.execute_script(colours):
        by_name.setdefault(name, set()).add((colour, dash))
    assert all(len(signs) == 1 for signs in by_name.values())  # the same in bars and in curves
    assert len({sign for signs in by_name.values() for sign in signs}) == len(by_name)
    drawn = "return [...document.querySelectorAll('.plot path.line')].map(p => p.getAttribute('stroke'))"
    (sgt,) = by_name["sgt"]
    assert sgt[0] in browser.execute_script(drawn)
    button = next(each for each in browser.find_elements("css selector", ".legend button") if each.text == "sgt")
    button.send_keys("\n")
    assert sgt[0] not in browser.execute_script(drawn)
    pressed = {
        each.get_attribute("aria-pressed") for each in browser.find_elements("css selector", "button[data-label=sgt]")
    }
    assert pressed == {"false"}
    assert not browser.find_elements("css selector", ".plot path.run")
    browser.find_element("css selector", "button[data-runs]").click()
    named = {
        each.get_attribute("textContent") for each in browser.find_elements("css selector", ".plot path.run title")
    }
    assert named == {"grpo-0", "grpo-1"}  # those of the arm that is shown


@pytest.fixture
def phone(browser: Any) -> Iterator[Any]:
    """Return the browser as a phone of 390 pixels."""
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    yield browser
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_results_of_several_arms_show_their_intervals_on_a_phone(cli_here: Cli, tmp_path: Path, phone: Any) -> None:
    runs = [
        made_run(tmp_path / f"{regime}-{seed}", regime, seed=seed, gain=gain + 0.01 * seed)
        for regime, gain in (("grpo", 0.1), ("sgt", 0.3), ("xgrpo", 0.2))
        for seed in (0, 1, 2)
    ]
    open_page(phone, page_of(cli_here, *runs, "--out", "page"))
    cells = phone.find_elements("css selector", ".results td")
    assert len([cell for cell in cells if "95 % interval" in cell.text]) == 2
    assert all(cell.rect["x"] >= 0 and cell.rect["x"] + cell.rect["width"] <= 390 for cell in cells if cell.text)
    assert (
        phone.execute_script(
            "const s = document.querySelector('.verdict .scroll'); return s.scrollWidth - s.clientWidth"
        )
        == 0
    )


def test_a_long_address_in_the_command_does_not_widen_the_page(cli_here: Cli, tmp_path: Path, phone: Any) -> None:
    address = "teacher=served:http://gpu-box-17.cluster.example.org:38795/v1/models/qwen3-235b-a22b"
    run = made_run(tmp_path / "r", "sgt", command=["mutualrl", "train", "--model", "tiny:ada", "--source", address])
    open_page(phone, page_of(cli_here, run))
    assert phone.execute_script("return document.documentElement.scrollWidth") <= 390


def test_a_phone_unfolds_what_a_screen_shows(cli_here: Cli, tmp_path: Path, browser: Any, phone: Any) -> None:
    """All figures but the first, and conversations to their last turn; unfolded, a chart has the page's width."""
    run = with_samples(counted(made_run(tmp_path / "r", "sgt")))
    page = page_of(cli_here, run)
    open_page(phone, page)
    folded = phone.find_elements("css selector", "figure details.folded")
    assert len(folded) == len(phone.find_elements("css selector", "figure")) - 1 > 1
    short = phone.execute_script("return document.documentElement.scrollHeight")
    phone.execute_script("for (const each of document.querySelectorAll('details.folded')) each.open = true")
    wait_for = "return Math.min(...[...document.querySelectorAll('.plot svg')].map(e => e.clientWidth))"
    began = time.monotonic()
    while phone.execute_script(wait_for) < 300:
        assert time.monotonic() - began < PATIENCE
    assert phone.execute_script("return document.documentElement.scrollHeight") > 1.2 * short
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    open_page(browser, page)
    assert not browser.find_elements("css selector", "details.folded")


@pytest.mark.parametrize("width", [320, 390, 1400])
def test_text_has_twelve_pixels_and_the_box_fits_a_phone(
    cli_here: Cli, tmp_path: Path, browser: Any, width: int
) -> None:
    rows = [rescue(1)]
    page = page_of(cli_here, with_samples(with_rescues(counted(made_run(tmp_path / "r", "sgt")), "ada", rows)))
    size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        open_page(browser, page)
        small = (
            "return [...document.querySelectorAll('main *')].filter(e => e.checkVisibility() && [...e.childNodes]"
            ".some(n => n.nodeType === 3 && n.textContent.trim()) && parseFloat(getComputedStyle(e).fontSize) < 12)"
            ".map(e => e.outerHTML)"
        )
        assert browser.execute_script(small) == []
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        if width == 390:
            box = browser.find_element("css selector", ".verdict").rect
            assert box["y"] + box["height"] <= 844
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def counted(run: Path) -> Path:
    """Write dead prompts into the metrics of a run."""
    for policy in ("ada", "bob"):
        path = run / "policies" / policy / "metrics.jsonl"
        rows = [
            json.loads(line) | {"prompts/dead": 9.0 - n % 5, "prompts/revived": 1.0}
            for n, line in enumerate(path.read_text().splitlines())
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


# ---- samples and links


def with_samples(run: Path, policies: tuple[str, ...] = ("ada", "bob"), text: str = " \\boxed{5}") -> Path:
    """Write samples of every second step: a prompt with a success, and one that was taught."""
    for policy in policies:
        lines = []
        for step in range(1, 20, 2):
            rollouts = [
                {"prompt_id": f"p{step}", "prompt": f"{step}+1:", "text": f" \\boxed{{{step + 1}}}", "reward": 1.0},
                {"prompt_id": f"p{step}", "prompt": f"{step}+1:", "text": text, "reward": 0.0},
                {"prompt_id": f"q{step}", "prompt": f"{step}*2:", "text": text, "reward": 0.0},
            ]
            taught = [{"prompt_id": f"q{step}", "peer": "bob", "answer": f" \\boxed{{{2 * step}}}"}]
            lines.append(json.dumps({"step": step, "round": step - 1, "rollouts": rollouts, "taught": taught}) + "\n")
        (run / "policies" / policy / "samples.jsonl").write_text("".join(lines))
    return run


def test_a_click_on_a_step_shows_its_samples(cli_here: Cli, tmp_path: Path, browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.select import Select

    open_page(browser, page_of(cli_here, with_samples(made_run(tmp_path / "r", "sgt"))))
    status = browser.find_element("id", "samples-status")
    assert status.text == "1 to 4 of 40 samples"
    plot = panel_of(browser, "training reward").find_element("css selector", ".plot")
    plot.send_keys(Keys.HOME, *[Keys.ARROW_RIGHT] * 5, Keys.ENTER)  # step 6
    assert status.text == "1 to 4 of 4 samples"  # of the round that began at step 5
    cards = texts(browser, "#samples-list .card")
    assert [card.split("\n")[0] for card in cards] == [f"{name}, step 5 link" for name in ("ada", "ada", "bob", "bob")]
    assert "5+1:" in cards[0] and "Reward 1" in cards[0] and "Reward 0" in cards[0]
    assert "Taught: bob's text" in cards[1] and "\\boxed{10}" in cards[1]
    Select(browser.find_element("id", "samples-policy")).select_by_visible_text("ada")
    Select(browser.find_element("id", "samples-outcome")).select_by_value("taught")
    assert status.text == "1 to 1 of 1 samples"
    Select(browser.find_element("id", "samples-outcome")).select_by_value("solved")
    assert "5+1:" in texts(browser, "#samples-list .card")[0]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    plot.click()
    assert browser.find_element("id", "samples-step").get_attribute("value") not in ("", "6")


def test_samples_of_a_step_are_the_nearest_before_it_of_every_run(cli_here: Cli, tmp_path: Path, browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    runs = []
    for name, steps in (("grpo", (1, 5, 9)), ("sgt", (1, 4, 7, 10))):
        runs.append(made_run(tmp_path / name, name))
        rollouts = [{"prompt_id": "p", "prompt": "1+1:", "text": "2", "reward": 1.0}]
        lines = [json.dumps({"step": step, "round": step, "rollouts": rollouts, "taught": []}) for step in steps]
        (runs[-1] / "policies" / "ada" / "samples.jsonl").write_text("\n".join(lines) + "\n")
    open_page(browser, page_of(cli_here, *runs, "--out", "page"))
    plot = panel_of(browser, "ada: training reward").find_element("css selector", ".plot")
    plot.send_keys(Keys.HOME, *[Keys.ARROW_RIGHT] * 9, Keys.ENTER)  # step 10
    heads = [card.split("\n")[0] for card in texts(browser, "#samples-list .card")]
    assert heads == ["ada, step 9 (grpo) link", "ada, step 10 (sgt) link"]


def test_two_rescues_of_a_prompt_in_a_step_have_links_of_their_own(cli_here: Cli, tmp_path: Path, browser: Any) -> None:
    rows = [rescue(1, peer="bob"), rescue(1, peer="(gold)")]
    page = page_of(cli_here, with_rescues(made_run(tmp_path / "r", "sgt"), "ada", rows))
    open_page(browser, page)
    links = [each.get_attribute("href") for each in browser.find_elements("css selector", "a.link")]
    assert len(set(links)) == 2
    browser.get("about:blank")
    browser.get(links[1])
    assert "learned from (gold)" in browser.find_element("css selector", ".card.target").text


def test_damaged_samples_are_noted_on_a_page_without_rescues(cli_here: Cli, tmp_path: Path, browser: Any) -> None:
    run = made_run(tmp_path / "r")
    (run / "policies" / "ada" / "samples.jsonl").write_text("garbage\n")
    open_page(browser, page_of(cli_here, run))
    assert any("samples.jsonl: 1 lines are not valid records" in note for note in texts(browser, ".note"))


def test_a_link_to_a_card_works_from_outside(cli_here: Cli, tmp_path: Path, browser: Any) -> None:
    rows = [rescue(step, f"p{step}/'\u00e9", prompt=f"{step}+1:") for step in range(1, 26)]
    page = page_of(cli_here, with_samples(with_rescues(made_run(tmp_path / "r", "sgt"), "ada", rows)))
    open_page(browser, page)
    for name, place in (("rescues", 3), ("samples", 2)):
        if name == "rescues":
            browser.find_element("id", "rescues-on").click()
        links = browser.find_elements("css selector", f"#{name}-list .card a.link")
        address = links[place].get_attribute("href")
        wanted = texts(browser, f"#{name}-list .card")[place]
        browser.get("about:blank")
        browser.get(address)
        (target,) = browser.find_elements("css selector", ".card.target")
        assert target.text == wanted
        assert browser.execute_script(
            "const r = arguments[0].getBoundingClientRect(); return r.top < innerHeight && r.bottom > 0", target
        )
        open_page(browser, page)
    browser.get(page.as_uri() + "#rescues:none/ada/1/p")
    assert browser.find_element("id", "rescues-status").text == "No rescues have this link"


def test_conversations_are_shown_by_role_and_are_inert(cli_here: Cli, tmp_path: Path, browser: Any) -> None:
    said = [{"role": "user", "content": "2*3?"}, {"role": "assistant", "content": HOSTILE}]
    own = [{"text": [{"role": "assistant", "content": "5"}, {"role": "tool", "content": ""}], "reward": 0.0}]
    row = rescue(1, prompt=said, own=own, answer=[{"role": "assistant", "content": "6"}])
    run = with_samples(with_rescues(made_run(tmp_path / "r", "sgt"), "ada", [row]), text=HOSTILE)
    open_page(browser, page_of(cli_here, run))
    (card,) = browser.find_elements("css selector", "#rescues-list .card")
    assert [each.text for each in card.find_elements("css selector", ".role")] == [
        "user",
        "assistant",
        "assistant",
        "tool",
        "assistant",
    ]
    assert "(empty)" in card.text and "window.taken=1" in card.text
    assert browser.execute_script("return window.taken") is None
    assert not browser.find_elements("css selector", "main img, main b:not(.readout b)")
    browser.find_element("id", "rescues-search").send_keys("assistant: 6")
    assert browser.find_element("id", "rescues-status").text == "1 to 1 of 1 rescues"


def test_commands_are_copied(cli_here: Cli, tmp_path: Path, browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    command = ["mutualrl", "train", "--pool", "tiny"]
    open_page(browser, page_of(cli_here, made_run(tmp_path / "r", "sgt", command=command)))
    buttons = browser.find_elements("css selector", "button.copy")
    codes = texts(browser, ".command code")
    assert len(buttons) == len(codes) == 2
    for button, code in zip(buttons, codes, strict=True):
        button.click()
        deadline = time.monotonic() + PATIENCE
        while not button.text.startswith("Copied"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        field = browser.find_element("css selector", "section input[type=search]")
        field.clear()
        field.send_keys(Keys.CONTROL, "v")
        assert field.get_attribute("value") == code


def test_several_comparisons_are_rows_of_a_table(cli_here: Cli, tmp_path: Path, browser: Any) -> None:
    runs = [
        made_run(tmp_path / f"{name}-{seed}", name, seed=seed, gain=gain + 0.01 * seed * (name == "sgt"))
        for name, gain in (("grpo", 0.2), ("sgt", 0.3), ("xgrpo", 0.1))
        for seed in range(3)
    ]
    open_page(browser, page_of(cli_here, *runs, "--out", "page"))
    box = browser.find_element("css selector", ".verdict")
    heads = [each.text.split("\n") for each in box.find_elements("css selector", "tbody th")]
    assert [head[0] for head in heads] == ["Hurt", "Helped"]
    assert "xgrpo against grpo" in heads[0][1]
    assert "+0.110" in box.find_elements("css selector", "tbody tr")[1].text

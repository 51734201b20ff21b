"""The report and the MLflow UI in a real browser; skipped where there is none."""

import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from analysis import report
from fl_lightning.runs.plotting import palette
from fl_lightning.runs.tracking import ui_view
from tests.support.servers import free_port, serving, wait_for

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        not (BROWSER and DRIVER),
        reason="no browser: apt-get install chromium chromium-driver, to see the pages as a user does",
    ),
]
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1366,900"
)
SECONDS = 90


@contextmanager
def browser(profile):
    """Chromium with a fresh profile, which writes down its requests."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in [*FLAGS.split(), f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def requests(driver):
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


@pytest.fixture(scope="module")
def page(smoke_store, tmp_path_factory):
    out = tmp_path_factory.mktemp("page")
    for part in ("demo", "laplace"):
        report.write(out / part, smoke_store, study=part)
    return out


def test_the_report_loads_without_a_network_and_shows_every_figure(page, tmp_path):
    with browser(tmp_path / "profile") as driver:
        for part in ("demo", "laplace"):
            driver.get("about:blank")
            requests(driver)  # of the browser's own first page
            index = page / part / "index.html"
            driver.get(index.as_uri())
            asked = requests(driver)
            assert index.as_uri() in asked
            assert all(url == index.as_uri() or url.startswith("data:") for url in asked), asked
            assert not [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
            sizes = driver.execute_script(
                "return [...document.querySelectorAll('figure')].map(f => {"
                " const b = f.querySelector('svg').getBoundingClientRect(); return [f.id, b.width, b.height]; })"
            )
            drawn = {path.stem for path in (page / part / "figures").glob("*.png")}
            assert {name for name, _, _ in sizes} == drawn
            assert all(width > 250 and height > 150 for _, width, height in sizes), sizes
            too_wide = "return document.documentElement.scrollWidth > document.documentElement.clientWidth"
            assert not driver.execute_script(too_wide)
        driver.save_screenshot(str(tmp_path / "report.png"))


def test_figures_of_a_page_with_one_column_are_not_blown_up(page, tmp_path):
    with browser(tmp_path / "profile") as driver:
        driver.set_window_size(860, 900)
        driver.get((page / "demo" / "index.html").as_uri())
        widths = driver.execute_script(
            "return [...document.querySelectorAll('figure svg')].map(f => f.getBoundingClientRect().width)"
        )
        left = driver.execute_script(
            "return [...new Set([...document.querySelectorAll('.figures figure')].map(f => f.offsetLeft))]"
        )
        assert len(left) == 1  # one column
        # Drawn for 3.5 inches, which a browser takes for 336 pixels.
        assert all(300 < width < 1.6 * 336 for width in widths), widths


def test_the_report_follows_light_and_dark(page, tmp_path):
    def rgb(colour):
        return "rgb({}, {}, {})".format(*(int(colour[i : i + 2], 16) for i in (1, 3, 5)))

    with browser(tmp_path / "profile") as driver:
        driver.get((page / "demo" / "index.html").as_uri())
        for name, theme in palette.THEMES.items():
            media = {"features": [{"name": "prefers-color-scheme", "value": name}]}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
            ground, lines = driver.execute_script(
                "return [getComputedStyle(document.body).backgroundColor,"
                " [...document.querySelectorAll('figure svg path')].map(p => getComputedStyle(p).stroke)]"
            )
            assert ground == rgb(theme.paper)
            place = 0 if name == "light" else 1
            for method in ("FedAvg", "FOLA"):
                assert rgb(palette.METHODS[method][place]) in lines


def test_links_of_the_table_of_contents_lead_to_something_visible(page, tmp_path):
    with browser(tmp_path / "profile") as driver:
        driver.get((page / "demo" / "index.html").as_uri())
        seen = driver.execute_script(
            "return [...document.querySelectorAll('nav a')].map(a => {"
            " const t = document.querySelector(a.getAttribute('href'));"
            " return t && t.getBoundingClientRect().height; })"
        )
        assert len(seen) > 8
        assert all(height and height > 0 for height in seen)


def test_the_runs_table_of_mlflow_shows_ga_and_la(smoke_store, tmp_path):
    from mlflow import MlflowClient
    from selenium.webdriver.support.ui import WebDriverWait

    shutil.copytree(smoke_store, tmp_path / "runs")
    client = MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("fl_lightning").experiment_id
    for name, value in ui_view.tags().items():
        client.set_experiment_tag(experiment, name, value)
    port = free_port()
    server = f"http://127.0.0.1:{port}"
    with serving("fl_lightning", "ui", "--runs", str(tmp_path / "runs"), "--port", str(port)):
        wait_for(f"{server}/health")
        with browser(tmp_path / "profile") as driver:
            driver.set_window_size(1900, 1000)
            driver.get(f"{server}/{ui_view.address(experiment)}")
            texts = "c => [c.getAttribute('col-id'), c.innerText]"
            cells = f"return [...document.querySelectorAll('[role=gridcell]')].map({texts})"

            def filled(driver):
                found = [text for name, text in driver.execute_script(cells) if name and "GA" in name]
                return found if any(text.startswith("0.") for text in found) else False

            values = WebDriverWait(driver, SECONDS).until(filled)
            headers = driver.execute_script(
                "return [...document.querySelectorAll('[role=columnheader]')].map(e => e.innerText)"
            )
            driver.save_screenshot(str(Path(tmp_path) / "mlflow.png"))
            asked = [url for url in requests(driver) if url.startswith("http")]
    assert {"GA", "LA"} <= set(headers)  # further columns are made when one scrolls to them
    numbers = [float(text) for text in values if text.startswith("0.")]
    assert len(numbers) > 5
    assert numbers == sorted(numbers, reverse=True)
    assert all(url.startswith(server) for url in asked), [url for url in asked if not url.startswith(server)]

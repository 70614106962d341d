"""Debian's Chromium without a window, and the page of a trace in it."""
from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

LIMIT = 60  # seconds that the browser may take for a page or a script
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--window-size=1440,1500",
)
BINARY, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = None if BINARY and DRIVER else (
    "no browser: install the packages chromium and chromium-driver")


@contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """A browser with a profile of its own, which ends with the block."""
    with TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = BINARY
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        try:
            driver.set_page_load_timeout(LIMIT)
            driver.set_script_timeout(LIMIT)
            yield driver
        finally:
            driver.quit()


class Page:
    """A page that ``generate_html`` wrote, opened from its file.

    It fails where the console shows an error or where the page asks for anything but itself.
    """

    def __init__(self, driver: webdriver.Chrome, file: Path) -> None:
        self._driver = driver
        self.url = file.as_uri()
        driver.get("about:blank")
        driver.get_log("browser")
        driver.get_log("performance")
        driver.get(self.url)
        self.requests: list[str] = []

    def check(self) -> None:
        """That nothing went wrong and nothing was loaded so far."""
        for entry in self._driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
        others = [url for url in self.requests
                  if url != self.url and not url.startswith("data:")]
        assert others == [], f"the page asks for {others}"
        assert self.url in self.requests, "requests are not seen"
        errors = self._driver.get_log("browser")
        assert errors == [], f"the console shows {errors}"

    def run(self, script: str, *arguments: Any) -> Any:
        """The result of JavaScript in the page."""
        return self._driver.execute_script(script, *arguments)

    def find(self, selector: str) -> WebElement:
        """The first element."""
        return self._driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """What the first element shows."""
        return self.find(selector).text

    def texts(self, selector: str) -> list[str]:
        """The text of every element, in one call."""
        return self.run("return [...document.querySelectorAll(arguments[0])]"
                        ".map((one) => one.textContent.toWellFormed())", selector)

    def press(self, *keys: str) -> None:
        """Keys, given to whatever has the focus."""
        for key in keys:
            self._driver.switch_to.active_element.send_keys(getattr(Keys, key, key))

    def rows(self) -> list[str]:
        """The names in the rows of the tree that are in sight, each behind two spaces a level."""
        return self.run(
            "return [...document.querySelectorAll('#tree .row')].map((row) => "
            "'  '.repeat(row.getAttribute('aria-level') - 1)"
            " + row.querySelector('.what').textContent)")

    def fold(self, name: str) -> None:
        """Click on the triangle of the first row of this name."""
        rows = [row.strip() for row in self.rows()]
        self._driver.find_elements(By.CSS_SELECTOR, "#tree .row")[rows.index(name)].find_element(
            By.CSS_SELECTOR, ".fold").click()

    def chip(self, name: str, value: str) -> WebElement:
        """The button of a filter."""
        return self.find(f'.chip[data-filter="{name}"][data-value="{value}"]')

    def bars(self, key: str) -> dict[str, tuple[int, int]]:
        """Bytes and calls by name, as a chart tells."""
        found = self.run(
            "return [...document.querySelectorAll(arguments[0])].map((bar) => "
            "[bar.dataset.value, bar.title.split('\\n')[0]])", f"#by-{key} .bar")
        values = {}
        for name, title in found:
            assert title.startswith(f"{name}: "), title
            size, calls = title.removeprefix(f"{name}: ").split(" bytes in ")
            values[name] = (int(size.replace(",", "")),
                            int(calls.removesuffix(" calls").replace(",", "")))
        return values

"""A picture of a trace's page: ``python -m tests.browser.picture PAGE.html PICTURE.png``."""
import sys
from pathlib import Path

from tests.browser.browser import Page, chromium

WIDTH, HEIGHT = 1440, 1370
CHOOSE = """
document.querySelectorAll("#tree .row")[3].querySelector(".fold").click();
const names = [...document.querySelectorAll("#tree .row .what")];
names.find((name) => name.textContent === "blocks.0.attention.query")
  .closest(".row").querySelector(".fold").click();
for (const kind of ["op", "redistribute"]) {
  document.querySelector(`#tree .row.${kind} .fold`).click();
}
document.querySelector("#tree .row.collective .what").click();
document.activeElement.blur();
"""


def main(page: str, picture: str) -> None:
    """Unfolds one collective of the page and takes its picture."""
    with chromium() as driver:
        driver.set_window_size(WIDTH, HEIGHT)
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
            "width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False})
        opened = Page(driver, Path(page).resolve())
        opened.run(CHOOSE)
        # The timeline is drawn in the frame after this one.
        driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))")
        opened.check()
        driver.save_screenshot(picture)


if __name__ == "__main__":
    main(*sys.argv[1:])

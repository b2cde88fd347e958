"""The page of ``hf-bayes demo``: the command in a process, and Debian's chromium without a window."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def serving(command: Sequence[str], *, folder: Path | None = None, environment: Mapping[str, str]) -> Iterator[str]:
    """Start ``hf-bayes demo`` with these words in a process and yield the address of its page."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.PIPE, text=True, cwd=folder, env=dict(environment)
    )
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("http://")), "")
        assert line.startswith(f"http://127.0.0.1:{port} "), f"the command ended with {process.poll()}"
        yield line.split()[0]
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def browser(width: int, height: int) -> Iterator[Any]:
    """Yield Debian's chromium, without a window."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    try:
        yield driver
    finally:
        driver.quit()


def wait(found: Any, seconds: float = 120) -> Any:
    """Return what ``found`` returns as soon as it is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.2)
    raise AssertionError(f"nothing after {seconds} s")


def require_browser() -> None:
    for module in ("gradio", "selenium"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install 'gradio>=6' selenium")
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: apt-get install chromium chromium-driver")


def elements(page: Any, selector: str) -> list[Any]:
    """Return the elements of a page that a CSS selector selects."""
    found: list[Any] = page.find_elements("css selector", selector)
    return found


def columns(page: Any) -> list[list[str]]:
    """Return the epistemic uncertainties that the page shows, of each posterior."""
    shown = [part.find_elements("css selector", "td[data-part=epistemic]") for part in elements(page, ".hfb")]
    return [[cell.get_attribute("textContent") for cell in cells] for cells in shown]


def set_number(page: Any, box: Any, value: int) -> None:
    """Write a number into a box, as typing does."""
    page.execute_script(
        "arguments[0].value = arguments[1]; for (const kind of ['input', 'change', 'blur'])"
        "arguments[0].dispatchEvent(new Event(kind, {bubbles: true}))",
        box,
        value,
    )


def generate(page: Any, address: str, prompt: str, *, length: int) -> None:
    """Open the page, type a prompt and press the button."""
    page.get(address)
    (box,) = wait(lambda: elements(page, "#prompt textarea"))
    box.clear()
    box.send_keys(prompt)
    elements(page, ".label-wrap")[0].click()  # the accordion with the number of tokens
    (number,) = wait(lambda: elements(page, "#length input[type=number]"))
    set_number(page, number, length)
    elements(page, "#generate")[0].click()

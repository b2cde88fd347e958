from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hf_bayes.cli.commands.demo import _names, require_address
from hf_bayes.pipelines.factory import pipeline
from tests.cli.commands.running import run

ROOT = Path(__file__).parents[3]
PROMPT = "The mito"
CELL = re.compile(r"<td[^>]*data-part=[\"']?epistemic[^>]*>([^<]*)</td>")


def test_a_port_that_is_none_is_refused(posterior: str) -> None:
    with pytest.raises(ValueError, match="--port must be 1 to 65535, got 0"):
        run("demo", posterior, "--port", "0")


def test_a_host_elsewhere_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--host must be an address of this computer, got '999\.1\.1\.1'"):
        require_address("999.1.1.1", 7860)


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match=r"cannot be served at 127.0.0.1:\d+ \(.*in use\): end what is there"):
            require_address("127.0.0.1", taken.getsockname()[1])
    require_address("127.0.0.1", 0)  # any port that is free


def test_posteriors_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [tmp_path / name / "out" for name in ("a", "b")]
    for folder in folders:
        folder.mkdir(parents=True)
    assert _names([str(folders[0])]) == ["out"]
    assert _names(list(map(str, folders))) == list(map(str, folders))
    assert _names([str(folders[0])] * 2) == [f"{folders[0]} (1)", f"{folders[0]} (2)"]


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """Start the command in a process and yield the address of its page."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "hf_bayes", "demo", *arguments, "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
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


def test_the_server_streams_the_uncertainty_of_a_prompt(posterior: str) -> None:
    client = pytest.importorskip("gradio_client", reason="gradio is not installed: pip install 'gradio>=6'")
    expected = pipeline(model=posterior)(PROMPT, max_new_tokens=5, do_sample=False)[0]["tokens"]
    with serving(posterior) as address:
        page = client.Client(address, verbose=False)
        job = page.submit(PROMPT, "epistemic", 0.5, 5, False, 1.0, api_name="/generate")
        last = job.result(timeout=120)
        steps = job.outputs()
        page.close()
    assert CELL.findall(str(last)) == [f"{token['epistemic']:.3f}" for token in expected]
    assert [len(CELL.findall(str(step))) for step in steps][: len(expected)] == list(range(1, len(expected) + 1))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "count"), [((1280, 1000), 2), ((390, 844), 1)], ids=["two-desktop", "one-phone"])
def test_a_browser_reads_the_uncertainty_of_a_prompt(posterior: str, size: tuple[int, int], count: int) -> None:
    require_browser()
    expected = pipeline(model=posterior)(PROMPT, max_new_tokens=5, do_sample=False)[0]["tokens"]
    compared = ["--compare", posterior] if count == 2 else []
    with serving(posterior, *compared) as address, browser(*size) as page:
        page.get(address)

        def all_of(selector: str) -> list[Any]:
            found: list[Any] = page.find_elements("css selector", selector)
            return found

        def columns() -> list[list[str]]:
            shown = [part.find_elements("css selector", "td[data-part=epistemic]") for part in all_of(".hfb")]
            return [[cell.get_attribute("textContent") for cell in cells] for cells in shown]

        (box,) = wait(lambda: all_of("#prompt textarea"))
        box.clear()
        box.send_keys(PROMPT)
        all_of(".label-wrap")[0].click()  # the accordion with the number of tokens
        (length,) = wait(lambda: all_of("#length input[type=number]"))
        page.execute_script(
            "arguments[0].value = 5; for (const kind of ['input', 'change', 'blur'])"
            "arguments[0].dispatchEvent(new Event(kind, {bubbles: true}))",
            length,
        )
        all_of("#generate")[0].click()
        wait(lambda: [len(column) for column in columns()] == [len(expected)] * count)
        assert columns() == [[f"{token['epistemic']:.3f}" for token in expected]] * count
        wait(lambda: all(part.get_attribute("data-running") == "false" for part in all_of(".hfb")))
        assert page.execute_script("return document.documentElement.scrollWidth <= innerWidth")  # no sideways scrolling
        before = len(all_of(".hfb .t.marked"))
        (number,) = all_of("#threshold input[type=number]")
        page.execute_script(
            "arguments[0].value = 0; for (const kind of ['input', 'change', 'blur'])"
            "arguments[0].dispatchEvent(new Event(kind, {bubbles: true}))",
            number,
        )
        wait(lambda: len(all_of(".hfb .t.marked")) == count * len(expected))
        assert before < count * len(expected)

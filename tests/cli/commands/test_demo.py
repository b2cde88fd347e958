from __future__ import annotations

import os
import re
import socket
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from hf_bayes.cli.commands.demo import _names, require_address
from hf_bayes.pipelines.factory import pipeline
from tests.cli.commands.demo_page import (
    browser,
    columns,
    elements,
    generate,
    require_browser,
    serving,
    set_number,
    wait,
)
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


def demo(*arguments: str) -> AbstractContextManager[str]:
    """Return ``serving`` for the command of this checkout."""
    command = [sys.executable, "-m", "hf_bayes.cli", "demo", *arguments]
    return serving(command, environment=os.environ | {"PYTHONPATH": str(ROOT)})


def test_the_server_streams_the_uncertainty_of_a_prompt(posterior: str) -> None:
    client = pytest.importorskip("gradio_client", reason="gradio is not installed: pip install 'gradio>=6'")
    expected = pipeline(model=posterior)(PROMPT, max_new_tokens=5, do_sample=False)[0]["tokens"]
    with demo(posterior) as address:
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
    with demo(posterior, *compared) as address, browser(*size) as page:
        generate(page, address, PROMPT, length=5)
        wait(lambda: [len(column) for column in columns(page)] == [len(expected)] * count)
        assert columns(page) == [[f"{token['epistemic']:.3f}" for token in expected]] * count
        wait(lambda: all(part.get_attribute("data-running") == "false" for part in elements(page, ".hfb")))
        assert page.execute_script("return document.documentElement.scrollWidth <= innerWidth")  # no sideways scrolling
        before = len(elements(page, ".hfb .t.marked"))
        (number,) = elements(page, "#threshold input[type=number]")
        set_number(page, number, 0)
        wait(lambda: len(elements(page, ".hfb .t.marked")) == count * len(expected))
        assert before < count * len(expected)

"""``hf-bayes demo``: a page in the browser that streams text and shows the uncertainty of each token."""

from __future__ import annotations

import dataclasses
import socket
from dataclasses import dataclass, field
from pathlib import Path

from hf_bayes.cli.command import Command
from hf_bayes.cli.posterior_arguments import PosteriorArguments
from hf_bayes.pipelines.demo_page import demo_page, launch_options, require_gradio


@dataclass
class PageArguments:
    """The posteriors that the page shows, and its address."""

    _argument_group_name = "page"

    compare: str | None = field(
        default=None, metadata={"help": "A second posterior to show beside the first, on the same prompts."}
    )
    host: str = field(
        default="127.0.0.1", metadata={"help": "Address of the page. With 0.0.0.0, other computers can open the page."}
    )
    port: int = field(default=7860, metadata={"help": "Port of the page."})

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise ValueError(f"--port must be 1 to 65535, got {self.port}")


def require_address(host: str, port: int) -> None:
    """Check that a page can be served at an address. gradio reports every reason as a port in use.

    Raises:
        ValueError: for a host that is not this computer.
        OSError: if the port is in use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(f"--host must be an address of this computer, got {host!r}: 127.0.0.1 is one") from error
    with socket.socket(family, kind, protocol) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(address)
        except OSError as error:
            raise OSError(
                f"the page cannot be served at {host}:{port} ({error.strerror}): end what is there, or give another "
                "--port or --host"
            ) from error


def demo(posterior: PosteriorArguments, page: PageArguments) -> None:
    """Start a page in the browser: type a prompt, and watch the tokens with their uncertainty as they are generated.

    The command runs until Ctrl-C. It needs gradio: pip install 'hf-bayes[demo]'.

    Raises:
        ImportError: if gradio is not installed.
        ValueError: for a posterior of another task, and a host that is not this computer.
        OSError: if the port is in use.
    """
    require_gradio()  # before a model is loaded
    require_address(page.host, page.port)
    asked = [posterior]
    if page.compare is not None:
        asked.append(dataclasses.replace(posterior, posterior=page.compare, base_model=None))
    names = _names([each.posterior for each in asked])
    app = demo_page({name: each.text_pipeline("demo") for name, each in zip(names, asked, strict=True)})
    app.launch(
        server_name=page.host, server_port=page.port, quiet=True, prevent_thread_lock=True, ssr_mode=False,
        show_error=True, **launch_options(),
    )  # fmt: skip
    print(f"http://{page.host}:{page.port} (Ctrl-C ends it)", flush=True)
    app.block_thread()


def _names(posteriors: list[str]) -> list[str]:
    """Return the names in the page: of directories their last part alone, if that is enough to tell them apart."""
    short = [Path(each).resolve().name if Path(each).is_dir() else each for each in posteriors]
    if len(set(short)) == len(short):
        return short
    return [each if posteriors.count(each) == 1 else f"{each} ({i})" for i, each in enumerate(posteriors, 1)]


COMMAND = Command(
    run=demo, arguments=(PosteriorArguments, PageArguments), example="demo posterior --compare other", first="posterior"
)

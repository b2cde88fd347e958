"""The built wheel in an environment of its own, as a user installs it, and programs that run there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


class Installed:
    """A fresh environment with the wheel. It sees the dependencies that are installed here, but not the checkout.

    Args:
        wheel: None leaves the package out, as for people who have transformers alone.
    Attributes:
        folder: the folder in which programs run, outside the repository.
    """

    def __init__(self, wheel: Path | None, folder: Path) -> None:
        self.folder, self.environment = folder, folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self.environment)], check=True)
        # A .pth line is not followed into .pth files, so an editable install of the checkout stays out.
        site = self.python("import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        folders = [path for path in sys.path if path.endswith("site-packages")]
        (Path(site) / "dependencies.pth").write_text("\n".join(folders) + "\n")
        if wheel is None:
            return
        pip = [sys.executable, "-m", "pip", "--python", str(self.environment / "bin" / "python"), "install", "-q"]
        # with a checkout on PYTHONPATH, pip would take its metadata for an installed package
        subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, env=_without_checkout())

    def run(self, *command: str, **settings: str) -> str:
        """Run a program of the environment, with these environment variables, and return what it prints."""
        clean = self.variables | settings
        done = subprocess.run(
            self.command(*command), cwd=self.folder, env=clean, capture_output=True, text=True, timeout=1000
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def command(self, program: str, *words: str) -> list[str]:
        """Return the words that start a program of the environment."""
        return [str(self.environment / "bin" / program), *words]

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of its programs."""
        return _without_checkout() | {"OMP_NUM_THREADS": "1"}

    def python(self, program: str, **settings: str) -> str:
        """Run a program in Python."""
        return self.run("python", "-c", program, **settings)


def _without_checkout() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

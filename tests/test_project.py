from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import hf_bayes
from hf_bayes import METHODS
from tests.installed import Installed

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no build folder appears in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "hf_bayes", source / "hf_bayes", ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(target.glob("*.whl"))


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"hf_bayes", f"hf_bayes-{PYPROJECT['project']['version']}.dist-info"}
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "hf_bayes").rglob("*.py")}
    assert files <= set(names)
    assert "hf_bayes/py.typed" in names


def test_installed_wheel_works_outside_the_repository(wheel: Path, tmp_path: Path) -> None:
    installed = Installed(wheel, tmp_path)
    program = """
import hf_bayes, importlib.metadata, importlib.resources, sys
print(hf_bayes.__file__)
print(importlib.metadata.version("hf-bayes"))
folder = importlib.resources.files("hf_bayes").joinpath("pipelines", "templates")
print(len([t for t in folder.iterdir() if t.read_text().strip()]))
(command,) = importlib.metadata.distribution("hf-bayes").entry_points.select(group="console_scripts")
print(command.name, command.load()(["--version"]))
"""
    file, version, templates, *command = installed.python(program).split()
    assert Path(file).is_relative_to(installed.environment)
    assert version == PYPROJECT["project"]["version"]
    assert int(templates) >= 1
    assert command == [version, "hf-bayes", "0"]


def test_constraints_pin_every_dependency() -> None:
    pinned = re.findall(r"^([\w.-]+)==[\w.]+$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    names = {name.lower().replace("_", "-") for name in pinned}
    project = PYPROJECT["project"]
    wanted = [
        *project["dependencies"],
        *project["optional-dependencies"]["test"],
        *project["optional-dependencies"]["dev"],
        *project["optional-dependencies"]["demo"],
    ]
    missing = {re.split(r"[<>=\[]", line)[0].lower().replace("_", "-") for line in wanted} - names - {project["name"]}
    assert not missing


def imports_for_editors() -> dict[str, str]:
    """Return {name: module} of the imports under ``TYPE_CHECKING`` in ``hf_bayes/__init__.py``."""
    tree = ast.parse((ROOT / "hf_bayes" / "__init__.py").read_text("utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert len(imports) == len(block.body)
    return {alias.name: str(node.module) for node in imports for alias in node.names if alias.asname is None}


def test_editors_and_python_see_the_same_public_names() -> None:
    at_run_time = {name: f"hf_bayes.{module}" for name, module in hf_bayes._MODULES.items()} | {"metrics": "hf_bayes"}
    assert imports_for_editors() == at_run_time
    assert sorted(hf_bayes.__all__) == sorted(at_run_time)  # sorted lists: a name may not stand there twice
    assert set(hf_bayes.__all__) <= set(dir(hf_bayes))


@pytest.mark.parametrize("name", sorted(hf_bayes._MODULES))
def test_a_public_name_is_found_in_the_module_that_defines_it(name: str) -> None:
    value = getattr(hf_bayes, name)
    assert value is getattr(importlib.import_module(f"hf_bayes.{hf_bayes._MODULES[name]}"), name)
    if isinstance(value, type):
        assert value.__module__ == f"hf_bayes.{hf_bayes._MODULES[name]}"


def test_metrics_is_public_without_an_import_of_its_own() -> None:
    program = "import hf_bayes, sys; print('hf_bayes.metrics' in sys.modules, hf_bayes.metrics.load.__module__)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "hf_bayes.metrics"]


ARGUMENT_WITHOUT_NOUN = re.compile(r"^ +[a-z_][\w, ]*: of ", flags=re.MULTILINE)


def test_a_docstring_names_an_argument_by_a_noun() -> None:
    """``seed: the seed of the draws``, and not ``seed: of the draws``."""
    sources = {path: path.read_text("utf-8") for path in (ROOT / "hf_bayes").rglob("*.py")}
    assert {str(path): found for path, text in sources.items() if (found := ARGUMENT_WITHOUT_NOUN.findall(text))} == {}
    assert ARGUMENT_WITHOUT_NOUN.search("    Args:\n        seed: of the draws.\n")


def test_pages_for_users_import_public_names_only() -> None:
    """Pages import names from ``hf_bayes`` and ``hf_bayes.metrics``; a new method also uses internal modules."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.py")]
    imports = {
        (page.name, module)
        for page in pages
        for module in re.findall(r"^from (hf_bayes[\w.]*) import", page.read_text("utf-8"), flags=re.MULTILINE)
        if page.name not in ("add_a_method.md", "architecture.md")
    }
    assert {page for page in imports if page[1] not in ("hf_bayes", "hf_bayes.metrics")} == set()
    assert {module for _, module in imports} == {"hf_bayes", "hf_bayes.metrics"}


def test_the_glossary_has_at_most_40_lines() -> None:
    glossary = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("## Glossary\n")[1]
    assert 0 < len(re.findall(r"^\|", glossary, flags=re.MULTILINE)) <= 40


def test_the_config_of_every_method_is_public() -> None:
    assert {config.__name__ for config in METHODS.values()} <= set(hf_bayes.__all__)
    for config in METHODS.values():
        assert getattr(hf_bayes, config.__name__) is config


@pytest.mark.parametrize("name", ["UnknownConfig", "MethodConfig", "nothing"])
def test_a_name_outside_the_public_ones_is_refused(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'hf_bayes' has no attribute '{name}'"):
        getattr(hf_bayes, name)


def test_importing_the_types_needs_no_transformers() -> None:
    program = (
        "import hf_bayes.core.types, hf_bayes.core.rng, sys\n"
        "print([m for m in ('transformers', 'peft') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("line", ["import hf_bayes.models.base", "import transformers"], ids=["upwards", "outside"])
def test_import_linter_catches_a_forbidden_import(line: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "hf_bayes", tmp_path / "hf_bayes", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    program = (
        "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(config_filename='pyproject.toml'))"
    )

    def lint() -> int:
        return subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
        ).returncode

    assert lint() == 0
    with (tmp_path / "hf_bayes" / "core" / "rng.py").open("a") as file:
        file.write(line + "\n")
    assert lint() != 0


def test_pre_commit_runs_the_linters_of_make_lint() -> None:
    (recipe,) = re.findall(r"^lint: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE)
    linters = {Path(line.split()[0]).name for line in recipe.splitlines()}
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    assert repository["repo"] == "local"
    assert {hook["entry"].split()[0] for hook in repository["hooks"]} == {f".venv/bin/{linter}" for linter in linters}
    assert all({"id", "name", "entry", "language"} <= hook.keys() for hook in repository["hooks"])


def test_the_citation_names_this_version_and_five_papers() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # required by CFF 1.2.0
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == PYPROJECT["project"]["version"] == hf_bayes.__version__
    assert citation["license"] == PYPROJECT["project"]["license"]
    assert citation["authors"] == [{"name": "The hf_bayes authors"}]
    assert len(citation["references"]) == 5
    for paper in citation["references"]:
        assert {"type", "title", "authors"} <= paper.keys()
        assert all(author.keys() in ({"name"}, {"given-names", "family-names"}) for author in paper["authors"])


@pytest.mark.parametrize("form", ["bug_report", "feature_request"])
def test_an_issue_form_is_well_formed(form: str) -> None:
    content = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{form}.yml").read_text("utf-8"))
    assert content["name"]
    assert content["description"]
    identifiers = [question["id"] for question in content["body"]]
    assert len(set(identifiers)) == len(identifiers)
    for question in content["body"]:
        assert question["type"] in {"textarea", "input", "dropdown"}
        assert question["attributes"]["label"]
        assert bool(question["attributes"].get("options")) == (question["type"] == "dropdown")


@pytest.mark.parametrize("target", ["test-fast", "test-oldest", "test-newest"])
def test_the_folders_that_make_names_are_there(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8").replace("\\\n", " ")
    assert re.search(rf"^[\w -]*\b{target}\b[\w -]*:", makefile, flags=re.MULTILINE)
    folders = re.findall(r":= \$\(addprefix tests/,([^)]*)\)", makefile)
    assert len(folders) == 2
    assert all((ROOT / "tests" / name).exists() for line in folders for name in line.split())


def test_hosted_ci_runs_the_suite_and_both_ends_of_versions() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))["jobs"]
    steps = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert steps == {
        "suite": [".ci/run"],
        "hosts": ["make ${{ matrix.target }}"],
        "long": ["make ${{ matrix.target }}"],
    }
    targets = [target for name in ("hosts", "long") for target in jobs[name]["strategy"]["matrix"]["target"]]
    (line,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE)
    assert set(targets) <= set(line.split())
    assert {"test-oldest", "test-newest"} <= set(targets)

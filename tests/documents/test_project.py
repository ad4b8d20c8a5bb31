"""The project around the package: workflows, pre-commit tools, citation and release."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import tarfile
import tomllib
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

import meshcomm
from tests.documents import copy_of_the_repository, done, tool
from tests.documents.commands import read

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
# Exact versions of the tools.
PINS = dict(each.split("==") for each in PROJECT["optional-dependencies"]["dev"] if "==" in each)
WORKFLOWS: dict[str, Any] = {
    path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / ".github/workflows").glob("*.yml"))
}


# -- workflows ---------------------------------------------------------------------------------------


def wrong_commands(lines: list[str]) -> list[str]:
    """The lines of a job that cannot run, because of their program, module, script or options."""
    wrong, installed, written = [], set(), set()
    for line in lines:
        program, *words = shlex.split(line)
        written |= {after for word, after in pairwise(words) if word == ">"}
        paths = [after for word, after in pairwise(words) if word == "-c"]
        if program == "pip":
            installed |= set(words[1:])
            extras = [name for word in words for name in re.findall(r"^\.\[(\w+)\]$", word)]
            bad = not set(extras) <= set(PROJECT["optional-dependencies"]) or not all(
                path in written or (ROOT / path).is_file() for path in paths
            )
        elif program == "python":
            module = words[1] if words[0] == "-m" else ""
            script = "" if words[0].startswith("-") else words[0]
            bad = bool(module and module not in installed and not find_spec(module)) or bool(
                script and not (ROOT / script).is_file()
            )
        elif program == "meshcomm":
            try:
                bad = read(line) is None
            except (ValueError, SystemExit):
                bad = True
        else:
            found = shutil.which(program, path=f"{Path(sys.executable).parent}:/usr/bin:/bin")
            bad = not (found or program in installed or program == "cd" or (ROOT / program).is_file())
        wrong += [line] * bad
    return wrong


@pytest.mark.parametrize("name", WORKFLOWS)
def test_the_commands_of_a_workflow_exist(name: str) -> None:
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}
    for job in WORKFLOWS[name]["jobs"].values():
        runs = [step["run"] for step in job["steps"] if "run" in step]
        assert runs or all("uses" in step for step in job["steps"])
        assert wrong_commands([line for run in runs for line in run.splitlines()]) == []


@pytest.mark.parametrize(
    "line",
    [
        "properdox build",
        ".ci/runs",
        "python docs/tools/nothing.py",
        "python -m nothing",
        "pip install -e '.[nothing]'",
        "pip install -c nothing.txt build",
        "meshcomm trian config.toml",
        "twine check dist/x.whl",
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    assert wrong_commands(["pip install build", line]) == [line]


def test_the_workflow_tests_every_python_and_every_torch() -> None:
    jobs = WORKFLOWS["tests"]["jobs"]
    (pinned,) = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)
    pythons = [step["with"]["python-version"] for step in jobs["gate"]["steps"] if "with" in step]
    pairs = [(each["python"], each["torch"]) for each in jobs["versions"]["strategy"]["matrix"]["include"]]
    pairs += [(python, pinned) for python in pythons]
    assert len(set(pairs)) == len(pairs)
    known = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert {python for python, _ in pairs} == set(known) and PROJECT["requires-python"] == f">={known[0]}"
    torches = tool("torch_versions").VERSIONS
    assert {torch for _, torch in pairs} == set(torches) and torches[-1] == pinned
    (least,) = [each for each in PROJECT["dependencies"] if each.startswith("torch>")]
    assert torches[0].startswith(least.removeprefix("torch>="))


def test_the_site_is_published_by_its_version_after_it_was_built() -> None:
    site = yaml.load((ROOT / "properdocs.yml").read_text(), yaml.BaseLoader)
    jobs = WORKFLOWS["docs"]["jobs"]
    assert site["extra"]["version"]["provider"] == "mike"
    assert [name for name, job in jobs.items() if "permissions" in job] == ["publish"]
    assert jobs["publish"]["needs"] == "build" and jobs["publish"]["if"] == "github.event_name == 'push'"
    runs = "\n".join(step.get("run", "") for step in jobs["publish"]["steps"])
    assert re.findall(r"^mike deploy .*", runs, re.M)
    assert f"cp {site['site_dir']}/404.html pages" in runs


def test_only_the_job_that_publishes_may_do_so() -> None:
    jobs = WORKFLOWS["release"]["jobs"]
    assert WORKFLOWS["release"][True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads "on" as true
    assert [name for name, job in jobs.items() if "permissions" in job] == ["publish"]
    assert jobs["publish"]["needs"] == "build" and not any("run" in step for step in jobs["publish"]["steps"])


# -- tools and pages ---------------------------------------------------------------------------------


def test_the_tools_before_a_commit_have_the_versions_of_the_project() -> None:
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {hook["id"]: (repo, hook) for repo in repos for hook in repo["hooks"]}
    assert set(hooks) == {"ruff-check", "ruff-format", "mypy"}
    assert hooks["ruff-check"][0]["rev"] == hooks["ruff-format"][0]["rev"] == f"v{PINS['ruff']}"
    # mypy runs in the environment, at the pinned version and with the packages whose types it reads.
    assert hooks["mypy"][1]["language"] == "system" and "mypy" in PINS
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    assert [f"{name}=={version}" for name, version in PINS.items()] == [
        f"{name}=={version}" for name, version in PINS.items() if f"{name}=={version}" in constraints
    ]


def test_the_address_the_version_and_the_license_are_the_same_everywhere() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    address = PROJECT["urls"]["Repository"]
    assert cited["version"] == meshcomm.__version__ and cited["license"] == PROJECT["license"]
    assert cited["repository-code"] == address and cited["cff-version"] == "1.2.0" and cited["authors"]
    for url in PROJECT["urls"].values():
        assert url.startswith(address)
        inside = re.findall(r"/blob/main/(.+)", url)
        assert all((ROOT / path).is_file() for path in inside), url


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", ".github/pull_request_template.md"])
def test_what_a_page_of_the_project_names_is_there(page: str) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(r"\]\(([^)\s#]+)", text) + re.findall(r"[.\w]+(?:/\w+)+\.(?:py|yml)|\.ci/run", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_a_form_for_an_issue_has_what_the_host_shows() -> None:
    forms = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.md"))
    assert forms
    for form in forms:
        _, head, body = form.read_text().split("---\n", 2)
        assert set(yaml.safe_load(head)) == {"name", "about"} and body.strip()


# -- a release ---------------------------------------------------------------------------------------


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = copy_of_the_repository(tmp_path / "clone")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        done(["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *words], folder)
    return folder


@pytest.mark.deep
def test_a_release_is_checked_and_prepared(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    release = tool("release")
    assert release.main(["7.8.9", "--check"], clone) == 0
    checked = capsys.readouterr().out
    assert "7.8.9: meshcomm-7.8.9-py3-none-any.whl and meshcomm-7.8.9.tar.gz\n" in checked
    assert "git " not in checked and done(["git", "status", "--porcelain"], clone) == ""
    assert not (clone / "dist").exists()

    assert release.main(["7.8.9"], clone) == 0
    assert "git tag v7.8.9" in capsys.readouterr().out
    changed = done(["git", "status", "--porcelain"], clone).split("\n")
    assert changed == [" M CHANGELOG.md", " M CITATION.cff", " M meshcomm/__init__.py", ""]
    assert '__version__ = "7.8.9"' in (clone / "meshcomm/__init__.py").read_text()
    cited = yaml.safe_load((clone / "CITATION.cff").read_text())
    day = cited["date-released"].isoformat()
    assert cited["version"] == "7.8.9" and len(day) == 10
    before, after = ((folder / "CHANGELOG.md").read_text() for folder in (ROOT, clone))
    assert after.replace(f"\n## 7.8.9 - {day}\n", "") == before and "## Unreleased\n\n## 7.8.9" in after
    with tarfile.open(clone / "dist/meshcomm-7.8.9.tar.gz") as packed:
        inside = packed.extractfile("meshcomm-7.8.9/CHANGELOG.md")
        assert inside is not None and inside.read().decode() == after
    assert done(["git", "log", "--format=%s"], clone) == "all\n"

    with pytest.raises(SystemExit, match=r"the tree is not clean.*\n M CHANGELOG"):
        release.main(["7.9.0"], clone)


def test_what_cannot_be_released_is_refused(clone: Path) -> None:
    release = tool("release")
    done(["git", "tag", "v9.0.0"], clone)
    for version, said in (
        ("9.0.0", "the tag v9.0.0 exists"),
        ("0.0.1", "0.0.1 is older than"),
        ("1.0", "not a version of three numbers"),
    ):
        with pytest.raises(SystemExit, match=said):
            release.main([version, "--check"], clone)
    for text, said in (
        ("# Changelog\n\n## Unreleased\n\n## 0.1.0 - 2026-01-01\n- old\n", "nothing under Unreleased"),
        ("## Unreleased\n- new\n\n## 0.1.0 - 2026-01-01\n", "has a section 0.1.0"),
        ("", "nothing under Unreleased"),
    ):
        with pytest.raises(SystemExit, match=said):
            release.in_changelog(text, "0.1.0", "2026-11-27")


def test_a_script_beside_a_clone_imports_the_package(tmp_path: Path) -> None:
    """Python would take a folder with the package's name for an empty package, if an editable install let it."""
    (tmp_path / meshcomm.__name__ / "meshcomm").mkdir(parents=True)
    (tmp_path / "script.py").write_text("import meshcomm; print(meshcomm.init.__name__)")
    assert done([sys.executable, "script.py"], tmp_path) == "init\n"

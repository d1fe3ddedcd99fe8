"""README and docs: code blocks run, commands parse, links and figures hold."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import oases
from benchmarks import ratios
from oases.cli import _parser, main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def in_one_group(code: str) -> str:
    """Code with its first start and its last end of the default group alone.

    A rank that starts it again may find the store of the group before, if rank 0 is slower to end that.
    """
    start, end = 'dist.init_process_group("gloo")\n', "dist.destroy_process_group()\n"
    before, _, after = code.partition(start)
    code = before + start + after.replace(start, "") if after else code
    before, _, after = code.rpartition(end)
    return before.replace(end, "") + end + after if before else code


def scripts() -> list[object]:
    """One script per page of docs/howto and for the tutorial: all its Python blocks; one per block of README."""
    found = [("README.md", str(number), block) for number, block in enumerate(blocks(ROOT / "README.md", "python"))]
    for page in [ROOT / "docs" / "tutorial.md", *sorted((ROOT / "docs" / "howto").glob("*.md"))]:
        if page.exists() and (code := blocks(page, "python")):
            found.append((str(page.relative_to(ROOT)), "all", in_one_group("\n\n".join(code))))
    return [pytest.param(code, id=f"{page} {which}") for page, which, code in found]


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize("code", scripts())
def test_code_blocks_run_on_two_ranks(code, script_ranks, tmp_path):
    (tmp_path / "page.py").write_text(code)
    script_ranks.run(tmp_path / "page.py", folder=tmp_path)


def commands() -> Iterator[tuple[str, str]]:
    """Indented lines of all pages that run `oases COMMAND`, and their page."""
    for page in PAGES:
        text = re.sub(r"\\\n +", "", page.read_text())
        for line in re.findall(r"^    (?:\$ )?(?:\S.* -m )?oases (\w.*)$", text, re.MULTILINE):
            yield str(page.relative_to(ROOT)), line


def test_commands_on_pages_are_commands():
    wrong, found = [], list(commands())
    assert len(found) > 20
    for page, line in found:
        given = shlex.split(line.partition(" > ")[0], comments=True)
        try:
            _parser(given).parse_args(given)
        except SystemExit as ended:
            wrong += [f"{page}: oases {line}"] if ended.code else []
    assert not wrong


@pytest.mark.long
def test_a_plan_on_a_page_is_what_the_command_prints(capsys):
    page = (ROOT / "docs" / "howto" / "plan.md").read_text()
    line, text = re.search(r"^    \$ oases (plan .*?) --explain.*\n((?:    .*\n)+)", page, re.MULTILINE).groups()
    main(line.split())
    printed = [each.strip() for each in capsys.readouterr().out.splitlines()]
    assert [each.strip() for each in text.splitlines()] == [each for each in printed if each]


@pytest.mark.parametrize("name", ratios.MODELS)
def test_the_figures_of_readme_and_of_the_pages_by_ratio_are_those_of_their_runs(name):
    model = ratios.MODELS[name]
    found, page = ratios.results(model.folder), model.folder.with_suffix(".md").read_text()
    assert len(found) >= 7
    assert ratios.steps(found, model.schedules) in page
    if name == "first":
        assert ratios.summary(found) in page
        assert ratios.front(found) in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", ["design.md", "internals.md"])
def test_classes_and_files_that_a_page_names_exist(page):
    files = [
        path
        for folder in ("oases", "oases_sparse", "oases_staged", "oases_svm", "oases_train", "csrc")
        for path in (ROOT / folder).rglob("*.*")
    ]
    sources = (path.read_text() for path in files if path.suffix in (".py", ".cpp", ".h", ".cu"))
    words = {word for source in sources for word in re.findall(r"\w+", source)}
    missing = [
        name
        for name in re.findall(r"`([\w./]+)`", (ROOT / "docs" / page).read_text())
        if not (ROOT / name).exists() and not (ROOT / "oases" / name).exists()
        if "/" in name or name.rpartition(".")[2] not in words
    ]
    assert not missing


def test_the_reference_has_every_public_name():
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    assert set(re.findall(r":: oases\.(\w+)$", page, re.MULTILINE)) == set(oases.__all__) - {"__version__"}

"""What README and docs say to type works as typed, with the installed wheel, in an empty folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from paged_ops.cli import app

pytest.importorskip("transformers", reason="transformers is the extra 'hf'")

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def programs() -> dict[str, str]:
    """The Python of each page as one program, from top to bottom; README's two examples are one each."""
    found = {page: "\n".join(blocks(page, "python")) for page in PAGES if blocks(page, "python")}
    del found["README.md"]
    return found | {f"README.md, example {i}": text for i, text in enumerate(blocks("README.md", "python"), 1)}


def commands() -> list[tuple[str, str]]:
    """(page, command) of each command line in a block without a language, and in backticks within the text."""
    found = []
    for page in PAGES:
        lines = [line for block in blocks(page, "") for line in block.splitlines()]
        prose = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
        inline = re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)
        for text in (*lines, *(" ".join(each.split()) for each in inline)):
            command = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", text.partition("  #")[0].strip())
            if re.match(r"(make|paged-ops|python|pip|torchrun|vllm|pytest|ncu) \S", command):
                found.append((page, command))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", programs())
def test_program_of_a_page_runs(user, name):
    (user.folder / "page.py").write_text(programs()[name])
    printed = user.run("python", "page.py").stdout
    if name == "README.md, example 1":
        assert printed == "torch.Size([5, 8, 64])\n"
    if name == "README.md, example 2":
        lines = printed.splitlines()
        assert lines[0].startswith("She had never been to the | ") and lines[-1].startswith("GraphStats(")


def test_readme_s_examples_are_short():
    first, second = blocks("README.md", "python")
    assert len([line for line in first.splitlines() if line.strip()]) <= 12
    assert len(second.splitlines()) < 32


def test_imports_of_fragments_work(user):
    """Fragments (```py) are not whole programs, or need a GPU. What they import exists."""
    fragments = "\n".join(block for page in PAGES for block in blocks(page, "py"))
    imports = sorted(set(re.findall(r"^(?:from paged_ops\S* import .*|import paged_ops\S*)$", fragments, re.MULTILINE)))
    assert len(imports) > 5
    user.run("python", "-W", "error::DeprecationWarning:paged_ops", "-c", "\n".join(imports))


def test_documented_options_of_the_command_exist():
    """Each documented ``paged-ops`` command line is parsed; nothing is run."""
    lines = [re.sub(r"^.*?paged-ops ", "", command) for _, command in commands() if "paged-ops " in command]
    lines += [command.partition("paged_ops.cli ")[2] for _, command in commands() if "paged_ops.cli " in command]
    assert len(lines) > 8
    group = typer.main.get_command(app)
    for line in lines:
        name, *options = shlex.split(line.partition(" > ")[0])
        if name != "--version":
            group.commands[name].make_context(name, options)  # raises for an unknown option or a wrong value


def test_documented_files_and_targets_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    missing = []
    for page, command in commands():
        words = shlex.split(command)
        missing += [
            (page, word)
            for word in words
            if word.startswith(("benchmarks/", "tests/", "examples/", "scripts/")) and not (ROOT / word).exists()
        ]
        if words[0] == "make":
            missing += [(page, word) for word in words[1:] if "=" not in word and word not in targets]
    assert missing == []


def test_the_package_is_installed_from_a_checkout():
    """It is on no index: no page may say ``pip install paged-ops``."""
    wrong = [
        (page, line) for page in PAGES for line in (ROOT / page).read_text().splitlines() if "install paged-ops" in line
    ]
    assert wrong == []


def test_generate_writes_text_to_stdout_and_statistics_to_stderr(user):
    done = user.run("paged-ops", "generate", "--prompt", "She had never", "--max-new-tokens", "8", "--eager")
    assert done.stdout.startswith("She had never ")
    assert "tokens/s" not in done.stdout and "tokens/s" in done.stderr
    assert "Warning" not in done.stderr


def test_version_and_support(user):
    assert re.fullmatch(r"paged-ops \S+, torch \S+\n", user.run("paged-ops", "--version").stdout)
    assert user.run("paged-ops", "support", "--markdown").stdout == (ROOT / "docs/support.md").read_text()


@pytest.mark.slow
def test_the_command_of_two_processes_runs(user):
    """As docs/parallel.md says, with the extras of README alone."""
    (line,) = [each for page, each in commands() if page == "docs/parallel.md" and each.startswith("torchrun")]
    words = shlex.split(line.replace("MODEL", "demo"))[1:]
    done = user.run("python", "-m", "torch.distributed.run", *words, "--max-new-tokens", "4", "--eager")
    assert done.stdout.startswith("Once upon a time")

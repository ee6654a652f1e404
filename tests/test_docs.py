"""Names, links and anchors of the documents exist, and the support table is the generated one. Their programs and
commands run in tests/user."""

import importlib
import json
import operator
import re
from pathlib import Path

import pytest

import paged_ops
from paged_ops import cli, features, layouts, masks, metadata, moved
from paged_ops.cache import kv_cache as cache
from paged_ops.registry import OPS

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/notes/*.md")]
)
MOST_PAGES = 15  # docs/*.md, and docs/api as one


def test_there_are_few_pages():
    assert len(list(ROOT.glob("docs/*.md"))) + 1 <= MOST_PAGES


def test_the_reference_shows_the_public_names():
    """What docs/api shows as names of paged_ops is ``__all__``, each name once."""
    shown = []
    for page in (ROOT / "docs/api").glob("*.rst"):
        module = "paged_ops"
        for directive, name in re.findall(r"^\.\. (\w+):: (\S+)$", page.read_text(), re.MULTILINE):
            if directive in ("currentmodule", "automodule"):
                module = name
            elif directive in ("autofunction", "autoclass", "autoexception") and module == "paged_ops":
                shown.append(name)
    assert sorted(shown) == sorted(paged_ops.__all__)


@pytest.mark.parametrize(("name", "module"), moved.NAMES.items())
def test_names_that_moved_work_for_one_release(name, module):
    with pytest.warns(DeprecationWarning, match=re.escape(f"paged_ops.{name} is {module}.{name} now")):
        assert getattr(paged_ops, name) is getattr(importlib.import_module(module), name)
    assert name not in paged_ops.__all__


@pytest.mark.parametrize("document", DOCUMENTS)
def test_relative_links_exist(document):
    text = without_code((ROOT / document).read_text())
    targets = re.findall(r"\]\(([^)\s]+)", text) + re.findall(r"^\[[^]]+\]: (\S+)", text, re.MULTILINE)
    missing = []
    for target in targets:
        if "://" not in target:
            name, _, anchor = target.partition("#")
            page = (ROOT / document).parent / name if name else ROOT / document
            if not page.exists() or (anchor and anchor not in anchors(page)):
                missing.append(target)
    assert missing == []


def without_code(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("folder", ["benchmarks/data", "benchmarks/notes", "docs"])
def test_every_file_is_named(folder):
    """Each record, note and plot is named by a page, a script or a test."""
    readers = [ROOT / document for document in DOCUMENTS]
    readers += [
        path for place in ("benchmarks", "scripts", "tests", "paged_ops") for path in (ROOT / place).rglob("*.py")
    ]
    text = "\n".join(path.read_text() for path in readers)
    files = [path.name for path in (ROOT / folder).iterdir() if path.is_file()]
    by_program = r"(bench|targets)_\w+\.jsonl?"  # paged-ops bench reads these of each device
    unnamed = [name for name in files if name not in text and not re.fullmatch(by_program, name)]
    assert unnamed == []


RECORDS = sorted(path.name for path in (ROOT / "benchmarks/data").glob("*.json*"))


@pytest.mark.parametrize("record", RECORDS)
def test_records_are_json(record):
    """Each line of a .jsonl file is one object: no marker of a merge conflict is left."""
    text = (ROOT / "benchmarks/data" / record).read_text()
    for line in text.splitlines() if record.endswith(".jsonl") else [text]:
        assert not line.strip() or json.loads(line)


@pytest.mark.parametrize("document", ["docs/design.md", "CONTRIBUTING.md"])
def test_named_files_exist(document):
    named = re.findall(r"`((?:paged_ops|tests|docs|scripts)/[\w./]+)`", (ROOT / document).read_text())
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_pages_named_in_the_code_exist():
    sources = [
        path for place in ("paged_ops", "benchmarks", "examples", "scripts") for path in (ROOT / place).rglob("*.py")
    ]
    pattern = r"\b(?:docs|benchmarks/notes)/[\w-]+\.md\b"
    named = {(path.name, page) for path in sources for page in re.findall(pattern, path.read_text())}
    assert len(named) > 5
    assert [(name, page) for name, page in sorted(named) if not (ROOT / page).exists()] == []


def test_folder_listing_is_complete():
    """The listing of docs/design.md names each module and package of paged_ops, and nothing else."""
    listing = re.search(r"\npaged_ops/\n(.*?)\nexamples/", (ROOT / "docs/design.md").read_text(), re.DOTALL)[1]
    listed = {line.split()[0].rstrip("/") for line in listing.splitlines()}
    present = {
        path.name
        for path in (ROOT / "paged_ops").iterdir()
        if not path.name.startswith("__pycache__") and (path.suffix == ".py" or path.is_dir())
    }
    assert listed == present


@pytest.mark.parametrize("folder", ["cache", "metadata", "graphs", "generation", "parallel"])
def test_folder_lines_name_every_module(folder):
    line = re.search(rf"^  {folder}/ .*$", (ROOT / "docs/design.md").read_text(), re.MULTILINE)[0]
    modules = {path.stem for path in (ROOT / "paged_ops" / folder).glob("*.py")} - {"__init__"}
    assert modules - set(re.findall(r"\w+", line)) == set()


def equivalents() -> list[str]:
    """The identifiers in the second columns of docs/comparison.md, without their arguments."""
    tables = (ROOT / "docs/comparison.md").read_text().partition("### PagedAttention")[2]
    rows = [line.strip("|").split(" | ") for line in tables.splitlines() if line.startswith("| ")]
    code = [name for row in rows if row[1] != "paged_ops" for name in re.findall(r"`([^`]+)`", row[1])]
    return sorted({re.split(r"[(=]", name)[0].removeprefix("paged_ops.") for name in code})


def test_equivalents_of_vllm_exist():
    modules = [paged_ops, metadata, layouts, masks, cache]
    fields = {
        *metadata.AttentionMetadata.__dataclass_fields__,
        *masks.SparsePattern._fields,
        *features.Features._fields,
    }
    methods = set(dir(metadata.AttentionMetadataBuilder))

    def exists(name: str) -> bool:
        if name.partition(".")[0] in fields | methods | {"dtype"}:
            return True
        return any(operator.attrgetter(name)(module) for module in modules if hasattr(module, name.partition(".")[0]))

    names = equivalents()
    assert len(names) > 30
    assert [name for name in names if not exists(name)] == []


def test_support_table_is_the_generated_one():
    page = cli.support.support_page()
    assert (ROOT / "docs/support.md").read_text() == page, "run: paged-ops support --markdown > docs/support.md"
    table = page.partition("## Ops\n\n")[2].partition("\n\n")[0]
    assert table.count("\n") > len(OPS)
    assert f"\n{table}\n" in (ROOT / "README.md").read_text(), "copy the table of ops into README.md"

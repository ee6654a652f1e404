"""What the documents say is true: names and links exist, the support table is the generated one. Their programs and
commands run in tests/user."""

import operator
import re
from pathlib import Path

import pytest

import paged_ops
from paged_ops import cli, features, layouts, masks, metadata
from paged_ops.cache import kv_cache as cache
from paged_ops.registry import OPS

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def test_every_public_name_is_in_the_reference():
    pages = "\n".join(page.read_text() for page in sorted((ROOT / "docs/api").glob("*.rst")))
    named = re.findall(r"^\.\. auto(?:function|class|exception):: (?:paged_ops\.)?(\w+)$", pages, re.MULTILINE)
    assert sorted(name for name in named if name in paged_ops.__all__) == sorted(paged_ops.__all__)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_relative_links_exist(document):
    text = (ROOT / document).read_text()
    targets = re.findall(r"\]\(([^)#]+)", text) + re.findall(r"^\[[^]]+\]: (\S+)", text, re.MULTILINE)
    missing = [t for t in targets if "://" not in t and not (ROOT / document).parent.joinpath(t).exists()]
    assert missing == []


@pytest.mark.parametrize("document", ["docs/design.md", "CONTRIBUTING.md"])
def test_named_files_exist(document):
    named = re.findall(r"`((?:paged_ops|tests|docs|scripts)/[\w./]+)`", (ROOT / document).read_text())
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


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


def equivalents() -> list[str]:
    """What the second columns of docs/coming-from-vllm.md name: identifiers in backticks, without their arguments."""
    tables = (ROOT / "docs/coming-from-vllm.md").read_text().partition("## PagedAttention")[2]
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

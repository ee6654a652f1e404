"""Every causal decoder of the installed transformers is served with the tokens of ``generate()``, or refused."""

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is the extra 'hf'")

import torch  # noqa: E402

from tests.integrations.transformers import model_table  # noqa: E402
from tests.integrations.transformers.model_families import (  # noqa: E402
    FAMILIES,
    LEFT_OUT,
    UNBUILT,
    layer_types,
    layer_types_of_family,
    text_family,
    tiny_config,
)

DATA = model_table.load()
OF_THIS_RELEASE = DATA["versions"].get("transformers") == transformers.__version__
OWN = [family for family in FAMILIES if text_family(family) == family]
# A norm of torch's own, layers under another name, heads that differ and are shared, values of another head size. All
# but one are traced and made functional alone: C++ compilers would take two minutes of them.
COMPILED = {"starcoder2": "aot_eager", "gpt2": "inductor", "gemma4_text": "aot_eager", "deepseek_v3": "aot_eager"}


@pytest.fixture(autouse=True)
def _quiet():
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


@pytest.mark.parametrize("family", OWN)
def test_served_with_equal_tokens_or_refused(family):
    row = model_table.check(family)  # no error but our own, when the model is wrapped
    assert not row["served"] or row["equal"], "wrong tokens"
    assert row["served"] or row["reason"]
    if OF_THIS_RELEASE:
        recorded = DATA["families"][family]
        keys = ("served", "equal", "keeps") if row["served"] else ("served", "reason")
        assert {key: recorded.get(key) for key in keys} == {key: row[key] for key in keys}, (
            f"out of date: python -m tests.integrations.transformers.model_table {family}"
        )


def test_tiny_models_have_every_kind_of_layer_of_the_released_ones():
    built = [family for family in OWN if family not in UNBUILT]
    missing = {f: sorted(layer_types_of_family(f) - layer_types(tiny_config(f))) for f in built}
    assert {f: kinds for f, kinds in missing.items() if kinds and f not in LEFT_OUT} == {}
    assert all(missing[f] for f in LEFT_OUT), "no longer left out"


@pytest.mark.parametrize("family", ["gemma4_text", "mimo_v2_flash", "deepseek_v3", "llama", "mamba", "zamba"])
def test_released_head_sizes_and_who_serves_them(family):
    assert model_table.released(family) == DATA["families"][family]["released"]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "backend"), COMPILED.items())
def test_compiled_with_equal_tokens(family, backend):
    torch._dynamo.reset()
    row = model_table.check(family, compiled=True, backend=backend)
    assert row["served"] and row["equal"]


def test_the_page_is_the_data():
    page = model_table.PAGE.read_text()
    table = page.split(model_table.BEGIN)[1].split(model_table.END)[0]
    assert table.strip() == model_table.render(DATA).strip(), "python -m tests.integrations.transformers.model_table"


@pytest.mark.skipif(not OF_THIS_RELEASE, reason="the table is of another release of transformers")
def test_every_family_is_in_the_table():
    assert set(DATA["families"]) == set(FAMILIES)
    for family, row in DATA["families"].items():
        assert (row.get("within") or family) == text_family(family)


def test_no_row_is_wrong_and_45_families_are_equal_in_both_forms():
    rows = DATA["families"].values()
    assert not [row for row in rows if row.get("equal") is False or row.get("compiled") is False]
    assert sum(row.get("equal") is True and row.get("compiled") is True for row in rows) >= 45

"""Tuned tables: whose a device reads, where the user's own are, and what ``paged-ops tune`` says and writes."""

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton")

from paged_ops import cli
from paged_ops.bench import tune
from paged_ops.lowerings.gpu import target

CUDA = torch.device("cuda", 0)


def made(name, arch=90, backend="cuda"):
    return target.Target(CUDA, name, backend, arch, 132, 227 << 10)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The user's folder."""
    monkeypatch.setenv("PAGED_OPS_CONFIGS", str(tmp_path / "mine"))
    return tmp_path / "mine"


def tiles_in(name):
    return json.loads((target.CONFIGS / f"attention_{name}.json").read_text())["split"]


def test_devices_without_tables_have_those_of_their_architecture(folder):
    hopper, oldest = tiles_in("nvidia_h200"), tiles_in("default")
    assert hopper != oldest
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB", "NVIDIA H200 MIG 1g.18gb", "NVIDIA H20"):
        assert made(name).tiles["split"].keys() == hopper.keys()
        assert made(name).tiles["split"]["16bit"] == hopper["16bit"]
        assert made(name).tiles["slices"]
        assert made(name).numbers == made("NVIDIA H200").numbers != made("Some GPU", 80).numbers
    for other in (made("Some GPU", 80), made("Some GPU", 120), made("Some GPU", "gfx942", "hip")):
        assert other.tiles["split"] == oldest


def test_the_users_tables_come_first(folder):
    folder.mkdir()
    (folder / "attention_some_gpu.json").write_text('{"split": {"16bit": {"128": [1, 2, 3, 4]}}}')
    (folder / "cache_some_gpu.json").write_text('{"copy_blocks": {"chunk_bytes": 16}}')
    own, plain = made("Some GPU"), made("NVIDIA H200")
    assert own.tiles["split"]["16bit"].pop("128") == [1, 2, 3, 4]
    want = dict(plain.tiles["split"]["16bit"])
    del want["128"]
    assert own.tiles["split"]["16bit"] == want  # what the file lacks is the package's
    assert own.tiles["prefill"] == plain.tiles["prefill"]
    assert own.numbers["copy_blocks"] == {**plain.numbers["copy_blocks"], "chunk_bytes": 16}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"splits": {}}', r"attention_some_gpu\.json: expected some of \['latent'.*got \['splits'\]"),
        ('{"split": ', r"attention_some_gpu\.json: expected JSON"),
        ("[1]", r"attention_some_gpu\.json: expected a JSON object"),
    ],
)
def test_a_bad_table_of_the_user_is_named(folder, text, message):
    folder.mkdir()
    (folder / "attention_some_gpu.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        _ = made("Some GPU").tiles


def test_where_the_users_tables_are(monkeypatch, tmp_path):
    monkeypatch.setenv("PAGED_OPS_CONFIGS", str(tmp_path))
    assert target.user_configs() == tmp_path
    monkeypatch.delenv("PAGED_OPS_CONFIGS")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert target.user_configs() == tmp_path / "config" / "paged_ops"
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert target.user_configs() == tmp_path / ".config" / "paged_ops"


def test_tune_writes_to_the_users_folder_and_says_so_first(monkeypatch, folder):
    device = made("Some GPU")
    package = {path: path.read_bytes() for path in target.CONFIGS.iterdir()}
    monkeypatch.setattr(target, "target_of", {CUDA: device}.get)
    monkeypatch.setattr(cli.bench, "choose_device", lambda name: CUDA)
    monkeypatch.setattr(tune.measure, "cache_bytes", lambda device: 60 << 20)

    class Fake(tune.Workload):
        def us(self, device_, repeats):
            keys, *_ = device.tiles["split"]["16bit"]["128"]
            return 1024 / min(keys, 256)

    monkeypatch.setattr(tune, "attention_workloads", lambda _: [Fake("decode", list, 3 << 30)])
    result = CliRunner().invoke(cli.app, ["tune", "--only", "attention"])
    assert result.exit_code == 0, result.output
    first, second, *rest = result.output.splitlines()
    assert re.search(r"Some GPU: 1 workloads.*roughly \d+ minutes, and up to 3\.\d GiB", first)
    path = folder / "attention_some_gpu.json"
    assert second == f"Writes {path} after each improvement."
    assert any(re.search(r"4 numbers are read.*minutes at", line) for line in rest)
    assert made("Some GPU").tiles["split"]["16bit"]["128"][0] == 256
    written = json.loads(path.read_text())
    source = json.loads((target.CONFIGS / "attention_nvidia_h200.json").read_text())
    assert written["triton"].keys() == {each for each in source["triton"] if target._version(each) > target.TRITON}
    assert [each.name for each in folder.iterdir()] == [path.name]
    assert package == {path: path.read_bytes() for path in target.CONFIGS.iterdir()}


def test_tune_tries_the_numbers_of_the_cache_ops(monkeypatch, folder):
    device = made("Some GPU")
    monkeypatch.setattr(target, "target_of", {CUDA: device}.get)
    monkeypatch.setattr(cli.bench, "choose_device", lambda name: CUDA)
    monkeypatch.setattr(tune.measure, "cache_bytes", lambda device: 60 << 20)
    before = dict(device.numbers["copy_blocks"])

    class Fake(tune.Workload):
        def us(self, device_, repeats):
            return 1e6 / min(device.numbers["copy_blocks"]["chunk_bytes"], 2 * before["chunk_bytes"])

    monkeypatch.setattr(tune, "cache_workloads", lambda _: {"copy_blocks": [Fake("copy", list)]})
    result = CliRunner().invoke(cli.app, ["tune", "--only", "cache"])
    assert result.exit_code == 0, result.output
    assert "1 numbers are read" in result.output
    assert json.loads((folder / "cache_some_gpu.json").read_text())["copy_blocks"] == {
        **before,
        "chunk_bytes": 2 * before["chunk_bytes"],
    }
    assert made("Some GPU").numbers["copy_blocks"]["chunk_bytes"] == 2 * before["chunk_bytes"]


def test_no_test_reads_the_tables_of_this_machine():
    assert not Path(target.user_configs()).exists()

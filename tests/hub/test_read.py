"""Reading from a Hub on loopback: which files, at which commit, and what without a connection."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.hub.names import HubPath, parse_hub_path
from gemma_convert.convert.readers import open_base, open_checkpoint
from gemma_convert.convert.readers.remote import remote_path
from gemma_convert.convert.writers.journal import Journal
from gemma_convert.convert.writers.staging import AGAIN
from tests.checkpoints import (
    ALPHA,
    GEMMA3,
    arrays,
    assert_same_bits,
    base_arrays,
    factor_arrays,
    read_hf,
    run_cli,
    snapshot,
    tunix_arrays,
    write_base,
    write_run,
)
from tests.hub_server import Fault, Hub

# As in test_push.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<:DeprecationWarning")

REPO = "google/gemma-3-tiny"
EXTRAS = {
    "tokenizer.json": "{}",
    "additional_chat_templates/tool.jinja": "x",
    "README.md": "---\nlicense: gemma\n---\n",
}
NOT_NEEDED = {
    "gemma.gguf": b"GGUF",
    "pytorch_model.bin": b"pickle",
    "onnx/model.onnx": b"onnx",
    "old-00001-of-00001.safetensors": b"a leftover that the index does not name",
    ".gitattributes": b"",
}


def files_of(directory: Path) -> dict[str, bytes]:
    return {name: data for name, data in snapshot(directory).items() if data is not None}


@pytest.fixture
def base(hub: Hub, tmp_path: Path) -> Path:
    """A model of three shards, local and on the Hub, there among what no conversion needs."""
    weights = base_arrays(GEMMA3, "model.")
    directory = write_base(tmp_path / "local" / "base", GEMMA3, weights, shards=3, files=EXTRAS)
    hub.add(REPO, files_of(directory) | NOT_NEEDED, private=False)
    return directory


def fetched(hub: Hub) -> set[str]:
    return {path.split("/main/")[-1].split("/", 5)[-1] for path in hub.sent("GET", "/resolve/")}


@pytest.mark.parametrize("name", [f"hf://{REPO}", REPO, f"hf:/{REPO}", f"{REPO}@main"])
def test_the_same_as_a_local_base(hub: Hub, base: Path, tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", factor_arrays(GEMMA3))
    words = ["orbax-to-hf", run, "--alpha", ALPHA, "--quiet"]
    assert run_cli(*words, "--base", base, "--out", tmp_path / "one") == 0
    assert run_cli(*words, "--base", name, "--out", tmp_path / "two") == 0
    assert_same_bits(read_hf(tmp_path / "two"), read_hf(tmp_path / "one"))
    one, two = (files_of(tmp_path / x) for x in ("one", "two"))
    assert {n: d for n, d in two.items() if n != "conversion.json"} == {
        n: d for n, d in one.items() if n != "conversion.json"
    }
    commit = hub.repos[REPO].head
    inputs = json.loads(two["conversion.json"])["inputs"]
    assert inputs[1]["path"] == f"hf://{REPO}@{commit}"
    needed = {"config.json", "model.safetensors.index.json", *EXTRAS} - {"README.md"}
    shards = {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
    assert fetched(hub) == needed | shards


def test_weights_that_nothing_reads_are_not_fetched(hub: Hub, base: Path, tmp_path: Path) -> None:
    """A base gives config, tokenizer and spelling to a tree that has all weights."""
    tree = tmp_path / "tree"
    words = ["hf-to-orbax", base, "--layout", "tunix", "--out", tree, "--quiet"]
    assert run_cli(*words) == 0
    assert run_cli("orbax-to-hf", tree, "--base", REPO, "--out", tmp_path / "out", "--quiet") == 0
    assert_same_bits(read_hf(tmp_path / "out"), read_hf(base))
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not list((tmp_path / "hf").rglob("*.safetensors"))
    spans = [span for name, span in hub.ranges if name.endswith(".safetensors")]
    assert len(spans) == 3  # a header of each


def test_a_shard_is_fetched_with_the_first_value_read(hub: Hub, base: Path) -> None:
    opened = open_base(Path(REPO))
    index = json.loads((base / "model.safetensors.index.json").read_text())["weight_map"]
    name = next(name for name, file in index.items() if file == "model-00002-of-00003.safetensors")
    assert not list((base.parents[1] / "hf").rglob("*.safetensors"))
    hub.requests.clear()
    assert_same_bits({name: opened[name].numpy()}, {name: read_hf(base)[name]})
    assert fetched(hub) == {"model-00002-of-00003.safetensors"}


@pytest.mark.parametrize("fault", ["dtype", "name", "transposed", "rows"])
def test_a_cached_shard_that_is_another_file(hub: Hub, base: Path, fault: str) -> None:
    """Each tensor is compared with the header by which the output was planned."""
    from safetensors.numpy import load_file, save_file

    opened = open_base(Path(REPO))
    index = json.loads((base / "model.safetensors.index.json").read_text())["weight_map"]
    file = "model-00002-of-00003.safetensors"
    values = load_file(base / file)
    name = next(name for name in index if index[name] == file and values[name].ndim == 2)
    opened[name].numpy()
    [cached] = (base.parents[1] / "hf").rglob(file)
    changed = {
        "dtype": {n: v.astype(np.float16) for n, v in values.items()},
        "name": {n: v for n, v in values.items() if n != name},
        "transposed": {**values, name: np.ascontiguousarray(values[name].T)},
        "rows": {**values, name: np.concatenate([values[name]] * 2)},
    }[fault]
    cached.resolve().unlink()
    save_file(changed, cached.resolve())
    with pytest.raises(InputError, match=f"{name}.* is not the file whose header came first"):
        open_base(Path(REPO))[name].numpy()


@contextmanager
def interrupted_after(pieces: int) -> Iterator[None]:
    """Ctrl-C once so many shards are finished."""
    finish = Journal.finish

    def interrupted(journal: Journal, piece: str, record: Any) -> None:
        finish(journal, piece, record)
        if len(journal.pieces) == pieces:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "finish", interrupted)
        yield


def test_an_interrupted_run_goes_on_with_what_has_come(
    hub: Hub,
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whether the base's shards are here, there or out of reach does not make it another run."""
    run = write_run(tmp_path / "run", factor_arrays(GEMMA3))
    out = tmp_path / "out"
    words = ["orbax-to-hf", run, "--alpha", ALPHA, "--quiet", "--base", REPO, "--out", out]
    words += ["--max-shard-size", "900"]
    with interrupted_after(3):
        assert run_cli(*words) == 130
    place = tmp_path / ".out.partial" / "output"
    kept = {path.name: path.stat().st_ino for path in place.glob("*.safetensors")}
    assert len(kept) == 3
    for shard in (tmp_path / "hf").rglob("*.safetensors"):
        shard.resolve().unlink()
    capsys.readouterr()
    hub.faults.append(Fault("GET", r"/resolve/.*00002-of", 404, times=99))
    assert run_cli(*words) == 1
    assert capsys.readouterr().err.endswith(f": what is finished is kept; {AGAIN}\n")
    hub.faults.clear()
    assert run_cli(*words) == 0
    assert {name: (out / name).stat().st_ino for name in kept} == kept


def test_a_branch_that_moved_meanwhile(
    hub: Hub,
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = write_run(tmp_path / "run", factor_arrays(GEMMA3))
    words = ["orbax-to-hf", run, "--alpha", ALPHA, "--base", REPO, "--out", tmp_path / "out"]
    words += ["--max-shard-size", "900"]
    with interrupted_after(3):
        assert run_cli(*words) == 130
    repo = hub.repos[REPO]
    old = repo.head
    new = repo.commit(repo.files | {"tokenizer.json": b"{} "})
    capsys.readouterr()
    assert run_cli(*words) == 0
    told = f"is thrown away: what was hf://{REPO}@{old} then is hf://{REPO}@{new} now\n"
    assert told in capsys.readouterr().err
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b"{} "


def test_a_shard_that_does_not_come(
    hub: Hub, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.faults.append(Fault("GET", r"/resolve/.*00002-of", 404, times=99))
    run = write_run(tmp_path / "run", factor_arrays(GEMMA3))
    words = ["orbax-to-hf", run, "--alpha", ALPHA, "--quiet", "--base", REPO]
    assert run_cli(*words, "--out", tmp_path / "out") == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: hf://{REPO}@")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_revision_is_kept_and_recorded(hub: Hub, base: Path, tmp_path: Path) -> None:
    repo = hub.repos[REPO]
    old = repo.head
    repo.commit(repo.files | {"config.json": json.dumps({**GEMMA3, "head_dim": 9}).encode()})
    opened = open_base(Path(f"hf://{REPO}@{old}"))
    assert opened.source == f"hf://{REPO}@{old}"
    assert opened.config == GEMMA3
    assert open_base(Path(f"hf://{REPO}")).config["head_dim"] == 9


def test_a_second_run_fetches_nothing(hub: Hub, base: Path) -> None:
    assert_same_bits(arrays(open_base(Path(REPO))), read_hf(base))
    hub.requests.clear()
    assert_same_bits(arrays(open_base(Path(REPO))), read_hf(base))
    assert not hub.sent("GET", "/resolve/")


@pytest.fixture
def unplug(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Takes the Hub away, in one of two ways."""
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    def now(how: str) -> None:
        if how == "network":
            monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        else:
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        close_session()

    yield now
    close_session()


@pytest.mark.parametrize("offline", ["environment", "network"])
def test_without_a_connection_the_cache_serves(
    hub: Hub,
    base: Path,
    offline: str,
    unplug: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    arrays(open_base(Path(REPO)))
    unplug(offline)
    opened = open_base(Path(REPO))
    assert_same_bits(arrays(opened), read_hf(base))
    assert opened.source == f"hf://{REPO}@{hub.repos[REPO].head}"
    note = f"hf://{REPO}: the Hub is out of reach, what the cache has of it is used"
    assert opened.notes == (note,)
    assert run_cli("inspect", "hf://google/never-fetched") == 1
    err = capsys.readouterr().err
    why = "HF_HUB_OFFLINE" if offline == "environment" else "the Hub cannot be reached"
    assert err.startswith(f"error: hf://google/never-fetched: {why}")


@pytest.mark.parametrize("offline", ["environment", "network"])
def test_without_a_connection_headers_serve_too(
    hub: Hub,
    base: Path,
    tmp_path: Path,
    offline: str,
    unplug: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What needs the base's headers alone runs, once any command has read them."""
    tree = tmp_path / "tree"
    words = ["hf-to-orbax", base, "--layout", "tunix", "--out", tree, "--quiet"]
    assert run_cli(*words) == 0
    assert run_cli("inspect", f"hf://{REPO}", "--json", "--tensors") == 0
    online = json.loads(capsys.readouterr().out)
    unplug(offline)
    assert run_cli("inspect", f"hf://{REPO}", "--json", "--tensors") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["notes"].pop(0).endswith("out of reach, what the cache has of it is used")
    assert report == online
    words = ["orbax-to-hf", tree, "--base", REPO, "--quiet", "--out", tmp_path / "out"]
    assert run_cli(*words, "--dry-run") == 0
    assert run_cli(*words) == 0
    assert_same_bits(read_hf(tmp_path / "out"), read_hf(base))
    run = write_run(tmp_path / "run", factor_arrays(GEMMA3))
    words = ["orbax-to-hf", run, "--base", REPO, "--alpha", ALPHA, "--out", tmp_path / "merged"]
    assert run_cli(*words, "--quiet") == 1
    why = {"environment": "it is not in the cache, and HF_HUB_OFFLINE", "network": "the Hub cannot"}
    shard = rf"hf://{REPO}@\w+/model-0000\d-of-00003\.safetensors"
    assert re.fullmatch(rf"error: {shard}: {why[offline]}.*\n", capsys.readouterr().err)
    assert not list((tmp_path / "hf").rglob("*.safetensors"))


def test_headers_that_are_none_are_not_kept(hub: Hub, base: Path) -> None:
    """What a proxy answered once does not stay."""
    hub.faults.append(Fault("GET", r"/resolve/.*00002-of", 206))
    with pytest.raises(InputError, match=r"00002-of-00003\.safetensors"):
        open_base(Path(REPO))
    assert_same_bits(arrays(open_base(Path(REPO))), read_hf(base))


def test_a_cache_that_cannot_keep_headers(hub: Hub, base: Path, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "assets").write_text("in the way")
    assert_same_bits(arrays(open_base(Path(REPO))), read_hf(base))


def test_a_local_directory_of_that_name_wins(
    hub: Hub, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_base(base.parent / REPO, GEMMA3, base_arrays(GEMMA3, "model.", seed=9))
    monkeypatch.chdir(base.parent)
    assert remote_path(REPO) is None
    assert_same_bits(arrays(open_base(Path(REPO))), base_arrays(GEMMA3, "model.", seed=9))
    assert hub.requests == []
    assert_same_bits(arrays(open_base(Path(f"hf://{REPO}"))), read_hf(base))


def test_a_name_that_is_nowhere(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """What looks like ORG/NAME may be a mistyped directory."""
    assert run_cli("inspect", "runs/nothere") == 1
    err = capsys.readouterr().err
    assert err.startswith(
        "error: there is no runs/nothere on this disk, and as hf://runs/nothere: "
    )
    assert run_cli("inspect", "hf://runs/nothere") == 1
    assert capsys.readouterr().err.startswith("error: hf://runs/nothere: ")


@pytest.mark.parametrize("folder", ["", "jax/flat"])
@pytest.mark.parametrize("step", [None, 0])
def test_an_orbax_checkpoint(hub: Hub, tmp_path: Path, folder: str, step: int | None) -> None:
    """The one tree that is read: no older step, no newer one that is unfinished."""
    run = files_of(write_run(tmp_path / "run", tunix_arrays(GEMMA3)))
    other = files_of(write_run(tmp_path / "new", tunix_arrays(GEMMA3, seed=5)))
    if step is None:
        run |= {name.replace("0/", "3/", 1): data for name, data in other.items()}
    run |= {"7.orbax-checkpoint-tmp/model_params/_METADATA": b"{}"}
    run |= {"adapter_config.json": b'{"r": 2}'}
    prefix = f"{folder}/" if folder else ""
    files = {prefix + name: data for name, data in run.items()} | {"README.md": b"x"}
    hub.add(REPO, files)
    url = f"hf://{REPO}" + (f"/{folder}" if folder else "")
    opened = open_checkpoint(url, step)
    assert_same_bits(arrays(opened), tunix_arrays(GEMMA3, seed=5 if step is None else 0))
    assert opened.source == f"hf://{REPO}@{hub.repos[REPO].head}" + (f"/{folder}" * bool(folder))
    assert opened.metadata["beside"] == {"r": 2}
    chosen = f"{prefix}{3 if step is None else 0}/model_params/"
    heads = (
        "_METADATA",
        "_CHECKPOINT_METADATA",
        "manifest.ocdbt",
        "commit_success.txt",
        "adapter_config.json",
    )
    for path in hub.sent("GET", "/resolve/"):
        name = path.split("/resolve/")[1].split("/", 1)[1]
        assert name.startswith(chosen) or name.endswith(heads), name


def test_inspect_fetches_headers_alone(
    hub: Hub, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a file made large by one tensor of 3 MB."""
    wide = {**GEMMA3, "vocab_size": 150_001}
    large = write_base(tmp_path / "large", wide, base_arrays(wide, "model."))
    hub.add("google/large", files_of(large))
    assert run_cli("inspect", large, "--json", "--tensors") == 0
    local = json.loads(capsys.readouterr().out)
    assert run_cli("inspect", "hf://google/large", "--json", "--tensors") == 0
    remote = json.loads(capsys.readouterr().out)
    assert remote.pop("path") == f"hf://google/large@{hub.repos['google/large'].head}"
    local.pop("path")
    assert remote == local
    shards = [span for name, span in hub.ranges if name.endswith(".safetensors")]
    assert shards == ["bytes=0-262143"]
    assert not list((tmp_path / "hf").rglob("*.safetensors"))


def test_a_header_longer_than_the_first_bytes(hub: Hub, tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save

    from gemma_convert.convert.readers import open_headers

    values = {f"model.layers.{i}.{'x' * 200}": np.full(1, i, np.float32) for i in range(1200)}
    hub.add("org/long", {"model.safetensors": save(values), "config.json": b"{}"})
    assert list(open_headers("hf://org/long")) == list(values)
    assert len(hub.ranges) == 2  # first bytes, the rest of the header


@pytest.mark.parametrize("length", [0, 5, 2**40, 10**7])
def test_a_header_that_is_none(hub: Hub, capsys: pytest.CaptureFixture[str], length: int) -> None:
    data = length.to_bytes(8, "little") + b"{}" + b"\0" * 100
    hub.add("org/bad", {"model.safetensors": data, "config.json": b"{}"})
    assert run_cli("inspect", "hf://org/bad") == 1
    err = capsys.readouterr().err
    assert "model.safetensors" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("hf://org/none", "hf://org/none: there is no such repository or revision"),
        (f"hf://{REPO}@v9", f"hf://{REPO}@v9: there is no such repository or revision"),
        (f"hf://{REPO}/nothing/here", f"hf://{REPO}/nothing/here holds no files; check the path"),
        (f"hf://{REPO}/onnx", "holds neither safetensors nor an Orbax checkpoint, but model.onnx"),
        ("hf://org", "'hf://org' is not a path on the Hub; write it as hf://ORG/NAME or"),
        ("hf://org/../x", "is not a path on the Hub"),
        ("runs/nowhere", "hf://runs/nowhere: there is no such repository or revision, or the"),
        ("s3://bucket/x", "s3://bucket/x: paths of s3:// are not read; copy it to a local disk"),
    ],
)
def test_refusals(
    hub: Hub, base: Path, capsys: pytest.CaptureFixture[str], url: str, message: str
) -> None:
    assert run_cli("inspect", url) == 1
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_file_that_breaks_off_is_fetched_to_its_end(hub: Hub, base: Path) -> None:
    hub.faults.append(Fault("GET", r"/resolve/.*00002-of", 503, times=2))
    assert_same_bits(arrays(open_base(Path(REPO))), read_hf(base))


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("hf://a/b", HubPath("a/b")),
        ("hf://a/b@v1.0", HubPath("a/b", "v1.0")),
        ("hf://a/b@refs%2Fpr%2F1/c/d/", HubPath("a/b", "refs/pr/1", "c/d")),
        ("hf://horses/hf", HubPath("horses/hf")),
    ],
)
def test_paths(text: str, path: HubPath) -> None:
    assert parse_hub_path(text) == path


@pytest.mark.parametrize("text", ["a", "a/b/c", "./a/b", "/a/b", "a/b.", "../a", "~/a", "a//b"])
def test_local_paths_are_no_hub_ids(text: str) -> None:
    assert remote_path(text) is None


def test_the_ledger_names_the_base_for_the_card(hub: Hub, base: Path, tmp_path: Path) -> None:
    hub.cards[REPO] = {"license": "gemma"}
    run = write_run(tmp_path / "run", factor_arrays(GEMMA3))
    words: list[Any] = ["orbax-to-hf", run, "--base", REPO, "--alpha", ALPHA, "--quiet"]
    assert run_cli(*words, "--out", tmp_path / "out", "--push-to-hub", "org/tuned") == 0
    card = hub.repos["org/tuned"].files["README.md"].decode()
    assert f"base_model: {REPO}\n" in card
    assert "license: gemma\n" in card
    ledger = json.loads(hub.repos["org/tuned"].files["conversion.json"])
    assert ledger["inputs"][1]["path"] == f"hf://{REPO}@{hub.repos[REPO].head}"
    assert f"--base {REPO} " in ledger["command"]

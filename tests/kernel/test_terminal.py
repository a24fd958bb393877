"""IPython in a pseudo-terminal."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest
from kernel_session import ENGINE

pytestmark = pytest.mark.kernel


@pytest.fixture
def terminal(tmp_path: object) -> Iterator[pexpect.spawn]:
    """An IPython with the extension and a fake engine, at its second prompt."""
    started = "get_ipython().run_line_magic('load_ext', 'mlx_nb')\n" + ENGINE
    arguments = ["-m", "IPython", "--simple-prompt", "--no-banner", "--colors=nocolor", "-i", "-c", started]
    child = pexpect.spawn(
        sys.executable,
        arguments,
        env={"IPYTHONDIR": str(tmp_path), "PATH": "/usr/bin:/bin", "TERM": "dumb"},
        encoding="utf-8",
        timeout=30,
        echo=False,
    )
    child.expect(r"In \[\d+\]: ")
    yield child
    child.close(force=True)


def test_a_terminal_prints_the_answer_as_it_comes_and_exits_cleanly(terminal: pexpect.spawn) -> None:
    terminal.sendline("%mlx_generate -n 9 --raw Why so?")
    terminal.expect_exact("Why so?Wh")
    terminal.expect(r"\(9 tokens · .*\)")
    terminal.expect(r"Out\[\d+\]: <Result 'Why so\?Wh', 9 tokens, length>")

    terminal.sendline("_.upper()")
    terminal.expect_exact("'WHY SO?WH'")

    terminal.sendline("exit")
    terminal.expect(pexpect.EOF)
    terminal.wait()
    assert terminal.exitstatus == 0


def test_control_c_in_a_terminal_keeps_the_partial_answer(terminal: pexpect.spawn) -> None:
    terminal.sendline("%mlx_generate -n 100000 --raw abc")
    terminal.expect_exact("abcabcabc")

    terminal.sendintr()

    terminal.expect_exact("KeyboardInterrupt: generation interrupted", timeout=2)
    terminal.expect(r"In \[\d+\]: ")
    terminal.sendline("print(_.finish_reason, _.text.startswith('abcabcabc'))")
    terminal.expect_exact("abort True")
    terminal.sendline("%mlx_generate -n 3 --raw xyz")
    terminal.expect_exact("xyz")


def test_chats_background_answers_and_errors_in_a_terminal(terminal: pexpect.spawn) -> None:
    terminal.sendline("get_ipython().run_cell_magic('mlx_chat', 'talk -n 8', 'abc')")
    terminal.expect(r"user: ab\r?\n\(8 tokens · ")
    terminal.sendline("%mlx_chat talk --show")
    terminal.expect(r"user: abc\s+assistant: user: ab")

    terminal.sendline("%mlx_generate --bg -n 5 --raw -o handle xyz")
    terminal.expect(r"In \[\d+\]: ")
    terminal.sendline("handle.result(10).text")
    terminal.expect_exact("'xyzxy'")

    terminal.sendline("%mlx_generate --bogus")
    terminal.expect_exact("UsageError: unknown option --bogus: did you mean --bg?")


def test_a_token_view_in_a_terminal_is_a_table_of_what_was_uncertain(terminal: pexpect.spawn) -> None:
    stand_ins = str(Path(__file__).parents[1] / "widgets")
    terminal.sendline(f"import sys; sys.path.insert(0, {stand_ins!r}); from word_engine import adopt_words")
    terminal.expect(r"In \[\d+\]: ")
    terminal.sendline("words = adopt_words('words', step_s=0.001)")
    terminal.expect(r"In \[\d+\]: ")
    terminal.sendline("%mlx_generate -e words --logprobs 5 -o answer Tides?")
    terminal.expect(r"In \[\d+\]: ")

    terminal.sendline("answer.tokens_view()")

    terminal.expect_exact("Tides are the slow breathing of the sea")
    terminal.expect(r"' breathing' +8\.0 % +likelier: ' which' 50\.6 %")

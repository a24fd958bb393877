"""The fake backend answers as it is told, through the same seam as a real one."""

import pytest

from mlx_nb import EngineCore, SamplingParams
from mlx_nb.backends.fake import EOS, FakeCodec, fake_backend, text_tokens


@pytest.mark.parametrize("text", ["", "plain", "é€😀"])
def test_its_codec_reads_what_it_writes(text: str) -> None:
    codec = FakeCodec()
    assert codec.decode(codec.encode(text)) == text
    assert codec.encode(text) == text_tokens(text)
    detokenizer = codec.detokenizer()
    assert "".join([*map(detokenizer.add, codec.encode(text)), detokenizer.finish()]) == text


def test_its_end_token_is_its_own() -> None:
    codec = FakeCodec()
    assert codec.eos_token_ids == {EOS}
    assert codec.vocabulary_size > EOS


def test_it_repeats_the_prompt_unless_told_otherwise() -> None:
    engine = EngineCore(None, None, backend=fake_backend())
    engine.launch()
    assert engine.generate_sync("abc", SamplingParams(max_tokens=7)).output_text == "abcabca"
    assert engine.generate_sync("abc", SamplingParams(max_tokens=7)).cached_tokens == 2
    assert engine.get_cache_stats()["hits"] == 1
    engine.close()


def test_an_answer_that_runs_out_ends_by_itself() -> None:
    engine = EngineCore(None, None, backend=fake_backend(lambda request: text_tokens("done")))
    engine.launch()
    output = engine.generate_sync("abc")
    assert (output.output_text, output.finish_reason) == ("done", "stop")
    engine.close()

"""GGUF files, written here with the gguf library from tiny random models, come back as the same models."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import sentencepiece
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import gemma3_text, llama, qwen2, qwen3
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from mlx_nb.backends import gguf, loader, sources
from mlx_nb.errors import ModelLoadError
from mlx_nb.outputs import LoadProgress

FAMILIES = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3, "gemma3": gemma3_text}
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "I've got 12345 cafés, it's true!",
    "x = 3  # y\n\n",
] * 20

TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_TENSORS = TENSORS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


# Models and files


def random_model(family: str, **changes: Any) -> Any:
    module = FAMILIES[family]
    fields = {
        "model_type": {"gemma3": "gemma3_text"}.get(family, family),
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "intermediate_size": 256,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "vocab_size": 288,
        "max_position_embeddings": 512,
        "rope_theta": 5000.0,
        "tie_word_embeddings": True,
    }
    if family == "gemma3":
        fields |= {"query_pre_attn_scalar": HEAD_DIM, "sliding_window": 8, "sliding_window_pattern": 6}
        fields |= {"num_hidden_layers": 6}
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(fields | changes))
    if family == "gemma3":
        model.sanitize({})  # ties the head to the embeddings
    weights = [
        (name, 0.3 * mx.random.normal(value.shape)) for name, value in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(weights))
    return model


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head as llama.cpp wants them: first half and second half taking turns."""
    halves = np.split(rows, heads)
    return np.concatenate([np.stack(np.split(head, 2), axis=1).reshape(head.shape) for head in halves])


def gguf_name(family: str, name: str) -> str:
    module, _, leaf = name.rpartition(".")
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if module in whole:
        return f"{whole[module]}.{leaf}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{(GEMMA_TENSORS if family == 'gemma3' else TENSORS)[part]}.{leaf}"


def gguf_values(family: str, name: str, value: mx.array) -> np.ndarray:
    rows = np.array(value)
    if family == "llama" and "q_proj" in name:
        return interleaved(rows, HEADS)
    if family == "llama" and "k_proj" in name:
        return interleaved(rows, KV_HEADS)
    return rows + 1 if family == "gemma3" and "norm" in name else rows


def write_metadata(writer: GGUFWriter, family: str, layers: int) -> None:
    writer.add_block_count(layers)
    writer.add_context_length(512)
    writer.add_embedding_length(128)
    writer.add_feed_forward_length(256)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    if family == "gemma3":
        writer.add_sliding_window(8)


def byte_level_vocabulary() -> tuple[list[str], list[str]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=288, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    content = json.loads(tokenizer.to_str())["model"]
    return sorted(content["vocab"], key=content["vocab"].get), [
        " ".join(merge) for merge in content["merges"]
    ]


def write_byte_level_tokenizer(writer: GGUFWriter, pre: str = "smollm") -> None:
    tokens, merges = byte_level_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")


class Draft:
    """A GGUF file in the making; `written` is its path once everything is in."""

    def __init__(self, path: Path, family: str) -> None:
        self.path = path
        self.family = family
        self.writer = GGUFWriter(path, family)

    def add_model(self, model: Any, kind: str = "F32", **kinds: str) -> dict[str, np.ndarray]:
        """Add weights, matrices as `kind` or as `kinds` says; returns what a reader gets back, by mlx-lm's names."""
        stored = {}
        for name, value in tree_flatten(model.parameters()):
            rows = gguf_values(self.family, name, value)
            stored_name = gguf_name(self.family, name)
            matrix_kind = kinds.get(stored_name.split(".")[-2], kind)
            qtype = GGMLQuantizationType[matrix_kind if rows.ndim == 2 else "F32"]
            data = quantize(rows, qtype)
            self.writer.add_tensor(stored_name, data, raw_dtype=qtype)
            stored[name] = np.array(value) if qtype.name == "F32" else dequantize(data, qtype)
        return stored

    @property
    def written(self) -> Path:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path


@pytest.fixture
def draft(tmp_path: Path) -> Callable[..., Draft]:
    def make(family: str = "llama", layers: int = 2, *, tokenizer: bool = True) -> Draft:
        made = Draft(tmp_path / f"{family}.gguf", family)
        write_metadata(made.writer, family, layers)
        if tokenizer:
            write_byte_level_tokenizer(made.writer)
        return made

    return make


def logits(model: Any) -> np.ndarray:
    return np.array(model(mx.array([[5, 17, 130, 42, 7, 99, 250, 1, 3, 8, 77, 12]])))


# Weights


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_model_computes_what_the_original_does(
    family: str, draft: Callable[..., Draft], tmp_path: Path
) -> None:
    original = random_model(family)
    file = draft(family, layers=len(original.layers))
    file.add_model(original)
    out = gguf.convert(file.written, tmp_path / "out", keep_quantized=False, dtype="float32")
    converted, _ = mlx_lm.load(str(out))
    np.testing.assert_allclose(logits(converted), logits(original), rtol=1e-4, atol=1e-3)


def test_an_output_head_of_its_own_is_kept(draft: Callable[..., Draft], tmp_path: Path) -> None:
    original = random_model("qwen3", tie_word_embeddings=False)
    file = draft("qwen3")
    file.add_model(original)
    out = gguf.convert(file.written, tmp_path / "out", keep_quantized=False, dtype="float32")
    converted, _ = mlx_lm.load(str(out))
    np.testing.assert_allclose(logits(converted), logits(original), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q8_0", 8)])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_kept_quantisation_is_the_same_numbers_in_fewer_bytes(
    family: str, kind: str, bits: int, draft: Callable[..., Draft], tmp_path: Path
) -> None:
    original = random_model(family)
    file = draft(family)
    file.add_model(original, kind)
    path = file.written
    kept, _ = mlx_lm.load(str(gguf.convert(path, tmp_path / "kept", keep_quantized=True, dtype="float32")))
    plain, _ = mlx_lm.load(str(gguf.convert(path, tmp_path / "plain", keep_quantized=False, dtype="float32")))
    assert kept.layers[0].mlp.up_proj.bits == bits
    assert kept.model.embed_tokens.bits == bits
    for name in ("q_proj", "v_proj"):
        module = kept.layers[1].self_attn[name]
        restored = mx.dequantize(module.weight, module.scales, module.biases, group_size=32, bits=bits)
        np.testing.assert_allclose(
            np.array(restored), np.array(plain.layers[1].self_attn[name].weight), atol=1e-6
        )
    np.testing.assert_allclose(logits(kept), logits(plain), rtol=1e-3, atol=1e-2)


def test_layers_quantised_differently_from_most_are_listed(
    draft: Callable[..., Draft], tmp_path: Path
) -> None:
    original = random_model("qwen3")
    file = draft("qwen3")
    file.add_model(original, "Q4_1", token_embd="Q8_0")
    out = gguf.convert(file.written, tmp_path / "out", keep_quantized=True, dtype="float32")
    quantization = json.loads((out / "config.json").read_text())["quantization"]
    eight_bits = {"group_size": 32, "bits": 8}
    assert quantization == {"group_size": 32, "bits": 4, "model.embed_tokens": eight_bits}
    assert mlx_lm.load(str(out))[0].model.embed_tokens.bits == 8


def test_dequantised_weights_are_those_the_gguf_library_reads(
    draft: Callable[..., Draft], tmp_path: Path
) -> None:
    original = random_model("qwen3")
    file = draft("qwen3")
    stored = file.add_model(original, "Q5_0")
    out = gguf.convert(file.written, tmp_path / "out", keep_quantized=True, dtype="float32")
    converted, _ = mlx_lm.load(str(out))
    for name, value in tree_flatten(converted.parameters()):
        np.testing.assert_array_equal(np.array(value), stored[name], err_msg=name)


@pytest.mark.parametrize(("kind", "block_bytes", "scale_at"), [("Q4_K", 144, 0), ("Q6_K", 210, 208)])
def test_k_quants_are_dequantised(
    kind: str, block_bytes: int, scale_at: int, draft: Callable[..., Draft], tmp_path: Path
) -> None:
    original = random_model("qwen3")
    file = draft("qwen3")
    stored = file.add_model(original)
    # The library reads K-quants but doesn't make them, so these are random blocks with sane scales.
    blocks = np.random.default_rng(1).integers(0, 256, (128, block_bytes), dtype=np.uint8)
    blocks[:, scale_at : scale_at + 2] = np.full((128, 1), 0.01, np.float16).view(np.uint8)
    if kind == "Q4_K":
        blocks[:, 2:4] = np.full((128, 1), 0.02, np.float16).view(np.uint8)
    qtype = GGMLQuantizationType[kind]
    tensors = file.writer.tensors[0]
    name = "blk.1.ffn_down.weight"
    del tensors[name]
    file.writer.add_tensor(name, blocks, raw_dtype=qtype)
    out = gguf.convert(file.written, tmp_path / "out", keep_quantized=True, dtype="float32")
    converted, _ = mlx_lm.load(str(out))
    stored["model.layers.1.mlp.down_proj.weight"] = dequantize(blocks, qtype)
    for name, value in tree_flatten(converted.parameters()):
        np.testing.assert_array_equal(np.array(value), stored[name], err_msg=name)


def test_without_a_dtype_a_file_keeps_the_precision_it_needs(
    draft: Callable[..., Draft], tmp_path: Path
) -> None:
    for family, kind, dtype in [
        ("llama", "F16", "float16"),
        ("qwen3", "BF16", "bfloat16"),
        ("gemma3", "F16", "bfloat16"),
    ]:
        original = random_model(family)
        file = draft(family, layers=len(original.layers))
        file.add_model(original, kind)
        out = gguf.convert(file.written, tmp_path / f"out-{family}", keep_quantized=True)
        weights = mx.load(str(next(out.glob("model*.safetensors"))))
        assert {str(value.dtype) for value in weights.values()} == {f"mlx.core.{dtype}"}


# Rotary embeddings


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rotary_scaling_is_carried_over(kind: str, draft: Callable[..., Draft], tmp_path: Path) -> None:
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 128}
    original = random_model("qwen3", rope_scaling=scaling)
    file = draft("qwen3")
    file.add_model(original)
    file.writer.add_string("qwen3.rope.scaling.type", kind)
    file.writer.add_float32("qwen3.rope.scaling.factor", 4.0)
    file.writer.add_uint32("qwen3.rope.scaling.original_context_length", 128)
    out = gguf.convert(file.written, tmp_path / "out", keep_quantized=False, dtype="float32")
    converted, _ = mlx_lm.load(str(out))
    np.testing.assert_allclose(logits(converted), logits(original), rtol=1e-4, atol=1e-3)


def llama3_scaling(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_llama_3_frequency_factors_become_its_rule(draft: Callable[..., Draft], tmp_path: Path) -> None:
    original = random_model("llama", rope_scaling=llama3_scaling(32.0), rope_theta=500_000.0)
    plain = 500_000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    factors = np.array(original.layers[0].self_attn.rope._freqs) / plain
    file = draft("llama")
    file.add_model(original)
    file.writer.kv_data[0].pop("llama.rope.freq_base")
    file.writer.add_rope_freq_base(500_000.0)
    file.writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    out = gguf.convert(file.written, tmp_path / "out", keep_quantized=False, dtype="float32")
    converted, _ = mlx_lm.load(str(out))
    np.testing.assert_allclose(logits(converted), logits(original), rtol=1e-4, atol=1e-3)


def test_other_frequency_factors_are_refused(draft: Callable[..., Draft], tmp_path: Path) -> None:
    file = draft("llama")
    file.add_model(random_model("llama"))
    file.writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32))
    with pytest.raises(ModelLoadError, match="rotary frequency factors"):
        gguf.convert(file.written, tmp_path / "out", keep_quantized=False)


# Refusals


def test_another_architecture_is_refused_by_name(draft: Callable[..., Draft], tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="architecture 'mamba'"):
        gguf.convert(draft("mamba").written, tmp_path / "out", keep_quantized=False)
    assert not (tmp_path / "out").exists()


def test_a_tensor_without_a_place_is_refused_by_name_and_leaves_nothing(
    draft: Callable[..., Draft], tmp_path: Path
) -> None:
    file = draft("llama")
    file.add_model(random_model("llama"))
    file.writer.add_tensor("blk.0.ssm_conv1d.weight", np.zeros((4, 4), np.float32))
    with pytest.raises(ModelLoadError, match=r"ssm_conv1d\.weight"):
        gguf.convert(file.written, tmp_path / "out", keep_quantized=False)
    assert [path.name for path in tmp_path.iterdir()] == ["llama.gguf"]


def test_mixtures_of_experts_and_parts_of_files_are_refused(
    draft: Callable[..., Draft], tmp_path: Path
) -> None:
    experts = draft("llama")
    experts.add_model(random_model("llama"))
    experts.writer.add_expert_count(8)
    with pytest.raises(ModelLoadError, match="mixture of experts"):
        gguf.convert(experts.written, tmp_path / "out", keep_quantized=False)
    part = draft("qwen3")
    part.add_model(random_model("qwen3"))
    part.writer.add_uint16("split.count", 3)
    with pytest.raises(ModelLoadError, match="one of 3 parts"):
        gguf.convert(part.written, tmp_path / "out", keep_quantized=False)


@pytest.mark.parametrize("content", [b"", b"not a model", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64])
def test_what_is_no_gguf_file_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"x\.gguf is no GGUF file"):
        gguf.convert(file, tmp_path / "out", keep_quantized=False)


def test_a_file_that_is_cut_short_is_refused(draft: Callable[..., Draft], tmp_path: Path) -> None:
    file = draft("llama")
    file.add_model(random_model("llama"))
    whole = file.written.read_bytes()
    file.path.write_bytes(whole[:-1000])
    with pytest.raises(ModelLoadError, match="fetch it again"):
        gguf.convert(file.path, tmp_path / "out", keep_quantized=False)


def test_progress_runs_from_nought_to_one(draft: Callable[..., Draft], tmp_path: Path) -> None:
    file = draft("llama")
    file.add_model(random_model("llama"))
    seen: list[LoadProgress] = []
    gguf.convert(file.written, tmp_path / "out", keep_quantized=False, progress=seen.append)
    fractions = [progress.fraction for progress in seen]
    assert fractions == sorted(fractions)
    assert fractions[-1] == pytest.approx(1.0)
    assert {progress.stage for progress in seen} == {"convert"}


def test_the_one_who_comes_second_leaves_a_finished_folder_alone(
    draft: Callable[..., Draft], tmp_path: Path
) -> None:
    file = draft("llama")
    file.add_model(random_model("llama"))
    out = gguf.convert(file.written, tmp_path / "out", keep_quantized=False)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert gguf.convert(file.path, out, keep_quantized=False) == out
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before


# Tokenizers

TEXTS = [
    "The quick brown fox",
    "I've got 12345 cafés, it's true!",
    "  two  spaces\n\n\tand a tab ",
    "日本語 and 🦊",
    "",
    "x",
]


@pytest.fixture
def convert_tokenizer(
    draft: Callable[..., Draft], tmp_path: Path
) -> Callable[[Callable[[GGUFWriter], None]], Any]:
    """Convert a small model with the tokenizer that a function writes, and load it with mlx-lm."""

    def make(write: Callable[[GGUFWriter], None], family: str = "llama") -> Any:
        model = random_model(family)
        file = draft(family, layers=len(model.layers), tokenizer=False)
        file.add_model(model)
        write(file.writer)
        return mlx_lm.load(str(gguf.convert(file.written, tmp_path / "out", keep_quantized=False)))[1]

    return make


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["I", "'ve", " ", "1", "2", "3", "4", "5", " cats", "!!"]),
        ("gpt-2", ["I", "'ve", " 12345", " cats", "!!"]),
        ("llama-bpe", ["I", "'ve", " ", "123", "45", " cats", "!!"]),
        ("qwen2", ["I", "'ve", " ", "1", "2", "3", "4", "5", " cats", "!!"]),
        ("default", ["I", "'", "ve", " ", "123", "45", " cats", "!!"]),
    ],
)
def test_text_is_cut_by_the_rule_the_file_names(
    pre: str, pieces: list[str], convert_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = convert_tokenizer(lambda writer: write_byte_level_tokenizer(writer, pre))
    cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("I've 12345 cats!!")
    assert [text.replace("Ġ", " ") for text, _ in cut] == pieces


def test_byte_level_text_survives_the_round_trip(convert_tokenizer: Callable[..., Any]) -> None:
    tokenizer = convert_tokenizer(write_byte_level_tokenizer)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|im_start|>x<|im_end|>")[::2] == [1, 2]
    assert tokenizer.eos_token_ids == {0, 2}
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert prompt == "<|im_start|>x<|im_end|>"


def test_an_unknown_way_to_cut_text_is_refused_by_name(convert_tokenizer: Callable[..., Any]) -> None:
    with pytest.raises(ModelLoadError, match="pre-tokenizer 'superbpe'"):
        convert_tokenizer(lambda writer: write_byte_level_tokenizer(writer, "superbpe"))


@pytest.fixture(scope="module")
def sentencepiece_model() -> sentencepiece.SentencePieceProcessor:
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=trained,
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())


def write_sentencepiece(
    writer: GGUFWriter, model: sentencepiece.SentencePieceProcessor, ids: Sequence[int] = ()
) -> None:
    ids = ids or range(model.get_piece_size())
    writer.add_tokenizer_model("llama")
    writer.add_token_list([model.id_to_piece(i) for i in ids])
    writer.add_token_scores([model.get_score(i) for i in ids])
    writer.add_token_types(
        [
            2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1
            for i in ids
        ]
    )
    writer.add_bos_token_id(model.bos_id())
    writer.add_eos_token_id(model.eos_id())
    writer.add_unk_token_id(model.unk_id())


def test_sentencepiece_tokens_are_sentencepieces_own(
    convert_tokenizer: Callable[..., Any], sentencepiece_model: sentencepiece.SentencePieceProcessor
) -> None:
    tokenizer = convert_tokenizer(lambda writer: write_sentencepiece(writer, sentencepiece_model))
    for text in TEXTS:
        assert tokenizer.encode(text) == [sentencepiece_model.bos_id(), *sentencepiece_model.encode(text)], (
            text
        )
        assert tokenizer.decode(sentencepiece_model.encode(text)) == text


def test_scores_and_not_ids_say_what_merges_first(
    convert_tokenizer: Callable[..., Any], sentencepiece_model: sentencepiece.SentencePieceProcessor
) -> None:
    # Unknown, BOS, EOS and the bytes stay; the pieces go in backwards.
    ids = [*range(259), *reversed(range(259, sentencepiece_model.get_piece_size()))]
    tokenizer = convert_tokenizer(lambda writer: write_sentencepiece(writer, sentencepiece_model, ids))
    # Letters at random, in which merges compete for them.
    random = np.random.default_rng(0)
    jumbles = [
        "".join(random.choice(list("The quick brown fox jumps over the lazy dog"), 80)) for _ in range(20)
    ]
    for text in [*TEXTS, *jumbles]:
        pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode(text))
        assert pieces[1:] == sentencepiece_model.encode(text, out_type=str), text


def test_a_file_says_whether_a_space_and_a_bos_go_first(
    convert_tokenizer: Callable[..., Any], sentencepiece_model: sentencepiece.SentencePieceProcessor
) -> None:
    def write(writer: GGUFWriter) -> None:
        write_sentencepiece(writer, sentencepiece_model)
        writer.add_add_space_prefix(value=False)
        writer.add_add_bos_token(value=False)

    tokenizer = convert_tokenizer(write, "gemma3")
    assert tokenizer.decode(tokenizer.encode("The fox")) == "The fox"
    assert tokenizer.encode(" The fox") == sentencepiece_model.encode("The fox")


# The real thing


@pytest.mark.model
def test_the_demo_model_knows_the_capital_of_france() -> None:
    loaded = loader.load(sources.fetch(sources.resolve("demo")))
    prompt = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    assert "Paris" in mlx_lm.generate(loaded.model, loaded.tokenizer, prompt, max_tokens=16)

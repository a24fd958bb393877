"""The tokenizer inside a GGUF file, as the files that transformers reads.

Two kinds exist in the supported families: byte-level byte pairs ("gpt2", cut beforehand by the rule that
``tokenizer.ggml.pre`` names) and SentencePiece byte pairs with byte fallback ("llama": Llama 2, Mistral,
Gemma). A rule whose name isn't known here is refused: text cut another way gives a model that only seems to
work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelLoadError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["write_tokenizer"]

Metadata = Mapping[str, Any]

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token types
_SPACE = "\u2581"  # SentencePiece's space
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")

# How text is cut before byte-pair merging, by `tokenizer.ggml.pre`. The patterns are part of the models:
# GPT-2's, GPT-4's with one limit or another on digits, and the chain that llama.cpp calls "default".
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_PRETOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_GPT4 % "{1,3}",),
    "qwen2": (_GPT4 % "",),
    "deepseek-r1-qwen": (_GPT4 % "",),
}
_ADD_BOS = {"llama-bpe"}  # what a file that doesn't say means


def write_tokenizer(name: str, metadata: Metadata, max_length: int, folder: Path) -> dict[str, Any]:
    """Write tokenizer.json and tokenizer_config.json.

    Returns
    -------
    dict
        What config.json says of the tokenizer: ``bos_token_id`` and ``eos_token_id`` (a list).
    """
    tokens: list[str] | None = metadata.get("tokenizer.ggml.tokens")
    model = metadata.get("tokenizer.ggml.model")
    if not tokens or model not in {"gpt2", "llama"}:
        raise ModelLoadError(
            f"{name} has tokenizer {model!r}, which can't be converted (gpt2 and llama can)."
        )
    make = _byte_level if model == "gpt2" else _sentencepiece
    tokenizer = make(name, metadata, tokens)
    _add_special(metadata, tokenizer, tokens)

    def token(key: str) -> str | None:
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return tokens[index] if index is not None and index < len(tokens) else None

    bos, eos = token("bos"), token("eos")
    usual = model == "llama" or metadata.get("tokenizer.ggml.pre") in _ADD_BOS
    if bos and metadata.get("tokenizer.ggml.add_bos_token", usual):
        _prepend(tokenizer, bos)
    tokenizer.save(str(folder / "tokenizer.json"))

    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": token("unknown"),
        "pad_token": token("padding") or eos,
        "chat_template": metadata.get("tokenizer.chat_template"),
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    known = {key: value for key, value in settings.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(known, indent=1), encoding="utf-8")
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_ids(metadata, tokens),
    }


def _end_ids(metadata: Metadata, tokens: list[str]) -> list[int]:
    """Tokens that end an answer: those the file names, and control tokens with the usual names."""
    named = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    types = metadata.get("tokenizer.ggml.token_type", ())
    kinds = enumerate(zip(tokens, types, strict=False))
    usual = (i for i, (text, kind) in kinds if kind == _CONTROL and text in _END_OF_TURN)
    return list(dict.fromkeys([*(i for i in named if i is not None), *usual]))


def _byte_level(name: str, metadata: Metadata, tokens: list[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre", "default")
    patterns = _PRETOKENIZERS.get(pre)
    if patterns is None:
        known = ", ".join(_PRETOKENIZERS)
        raise ModelLoadError(f"{name} has pre-tokenizer {pre!r}, which isn't known ({known}).")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    vocabulary = {text: i for i, text in enumerate(tokens)}
    # Llama 3 looks a whole piece up in the vocabulary before it merges.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(name: str, metadata: Metadata, tokens: list[str]) -> Tokenizer:
    """SentencePiece's byte-pair model: a piece's score says when it is merged."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise ModelLoadError(f"{name} has no scores for its tokens: it is incomplete.")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    vocabulary = {text: i for i, text in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(vocabulary, scores),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score first."""
    ways = []
    for text, index in vocabulary.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocabulary and right in vocabulary:
                ways.append((-scores[index], index, vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(ways)]


def _add_special(metadata: Metadata, tokenizer: Tokenizer, tokens: list[str]) -> None:
    from tokenizers import AddedToken

    spm = metadata.get("tokenizer.ggml.model") == "llama"
    types = metadata.get("tokenizer.ggml.token_type", ())
    special = {_CONTROL, _UNKNOWN} if spm else {_CONTROL}
    for text, kind in zip(tokens, types, strict=False):
        if kind in special:
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            # SentencePiece's own are found in normalised text: runs of spaces are among them.
            tokenizer.add_tokens([AddedToken(text, special=False, normalized=spm)])


def _prepend(tokenizer: Tokenizer, bos: str) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )

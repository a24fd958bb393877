"""Tiny random models that see: one for each way in which mlx-vlm takes pictures, a processor included.

Built offline and without torch; each loads through ``mlx_vlm.load`` and through the engine.
"""

import atexit
import functools
import json
import math
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from models import make_tokenizer

_EOS, _PAD = "<|im_end|>", "<|endoftext|>"
_GAIN = 1.5  # as in models.py: greedy answers stay varied
_HALF = [0.5, 0.5, 0.5]
_GRID = [[56, 112], [112, 56], [112, 112]]
Ids = Callable[[str], int]


@dataclass(frozen=True)
class Family:
    """What a family's files are made of.

    Attributes
    ----------
    image, video : str
        What the chat template writes for one.
    special : tuple of str
        Tokens beside those of every tiny model.
    config : callable
        (ids by text, fields of the text part) to config.json.
    pixels : dict
        preprocessor_config.json.
    processor, tokenizer : dict
        processor_config.json (None for none) and more of tokenizer_config.json.
    """

    image: str
    special: tuple[str, ...]
    config: Callable[[Ids, dict[str, Any]], dict[str, Any]]
    pixels: dict[str, Any]
    video: str = ""
    processor: dict[str, Any] | None = None
    tokenizer: dict[str, Any] = field(default_factory=dict)
    clips: dict[str, Any] | None = None


def _composed(name: str, text: dict[str, Any], vision: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "architectures": [name],
        "eos_token_id": text["eos_token_id"],
        "vocab_size": text["vocab_size"],
        "text_config": text,
        "vision_config": vision,
        **more,
    }


def _vit(kind: str, **more: Any) -> dict[str, Any]:
    """A tower over 4 x 4 patches of 14 pixels."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {"model_type": kind, "image_size": 56, "patch_size": 14, "num_channels": 3, **sizes, **more}


def _normalised(kind: str, owner: str, size: dict[str, int], **more: Any) -> dict[str, Any]:
    steps = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}
    scale = {"rescale_factor": 1 / 255, "image_mean": _HALF, "image_std": _HALF, "resample": 3}
    return {"image_processor_type": kind, "processor_class": owner, "size": size, **steps, **scale, **more}


# Qwen


def _qwen_vit(kind: str, patch: int, **more: Any) -> dict[str, Any]:
    patches = {
        "patch_size": patch,
        "spatial_patch_size": patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    return {"model_type": kind, "num_heads": 2, "in_channels": 3, **patches, **more}


def _qwen_pixels(kind: str, owner: str, patch: int, side: int) -> dict[str, Any]:
    """Pictures of 2 x 2 to `side` x `side` patches."""
    return {
        "image_processor_type": kind,
        "processor_class": owner,
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": (2 * patch) ** 2,
        "max_pixels": (side * patch) ** 2,
        "image_mean": _HALF,
        "image_std": _HALF,
        "fps": 2,
        "min_frames": 2,
        "max_frames": 8,
    }


def _qwen(
    config: Callable[[Ids, dict[str, Any]], dict[str, Any]], pixels: dict[str, Any], **more: Any
) -> Family:
    def whole(ids: Ids, text: dict[str, Any]) -> dict[str, Any]:
        return config(ids, text) | {
            "image_token_id": ids("<|image_pad|>"),
            "video_token_id": ids("<|video_pad|>"),
            "vision_start_token_id": ids("<|vision_start|>"),
            "vision_end_token_id": ids("<|vision_end|>"),
        }

    return Family(
        image="<|vision_start|><|image_pad|><|vision_end|>",
        video="<|vision_start|><|video_pad|><|vision_end|>",
        special=("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        config=whole,
        pixels=pixels,
        **more,
    )


def _flat(kind: str, name: str, vision: dict[str, Any]) -> Callable[[Ids, dict[str, Any]], dict[str, Any]]:
    """The text part's fields lie at the top of config.json."""
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}

    def config(_: Ids, text: dict[str, Any]) -> dict[str, Any]:
        flat = _composed(name, text, vision)
        del flat["text_config"]
        return {**text, **flat, **rope, "model_type": kind}

    return config


def _qwen3_vl(_: Ids, text: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = {**text, "model_type": "qwen3_vl_text", "num_hidden_layers": 3, "rope_scaling": rope}
    # Two levels of the tower are added into the first two layers of the text part.
    levels = {"depth": 3, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
    vision = _qwen_vit("qwen3_vl", 16, hidden_size=32, intermediate_size=64, out_hidden_size=64, **levels)
    name = "Qwen3VLForConditionalGeneration"
    return _composed(name, text, vision, model_type="qwen3_vl", tie_word_embeddings=True)


def _qwen3_5(_: Ids, text: dict[str, Any]) -> dict[str, Any]:
    linear = {
        "full_attention_interval": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
    }
    rope = {
        "type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
    }
    text = {**text, **linear, "model_type": "qwen3_5_text", "num_hidden_layers": 4, "head_dim": 32}
    text["rope_parameters"] = rope
    levels = {"depth": 1, "deepstack_visual_indexes": [], "num_position_embeddings": 64}
    vision = _qwen_vit("qwen3_5", 16, hidden_size=32, intermediate_size=64, out_hidden_size=64, **levels)
    name = "Qwen3_5ForConditionalGeneration"
    return _composed(name, text, vision, model_type="qwen3_5", tie_word_embeddings=True)


_QWEN2_VIT = _qwen_vit("qwen2_vl", 14, depth=1, embed_dim=32, hidden_size=64, mlp_ratio=2)
# One block looks at windows of 4 x 4 patches, the other at all.
_QWEN2_5_VIT = _qwen_vit(
    "qwen2_5_vl", 14, depth=2, hidden_size=32, intermediate_size=64, out_hidden_size=64, window_size=56,
    fullatt_block_indexes=[1],
)  # fmt: skip
_QWEN3_PIXELS = _qwen_pixels("Qwen2VLImageProcessorFast", "Qwen3VLProcessor", 16, 4)


# Gemma


def _gemma3(ids: Ids, text: dict[str, Any]) -> dict[str, Any]:
    sliding = {"sliding_window": 16, "sliding_window_pattern": 2, "num_hidden_layers": 4}
    text = {
        **text,
        **sliding,
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 16,
        "mm_tokens_per_image": 4,
    }
    text["rope_global_base_freq"] = 1e6
    ends = {"image_token_index": ids("<image_soft_token>"), "pad_token_id": ids(_PAD)}
    vision = _vit("siglip_vision_model")
    return _composed(
        "Gemma3ForConditionalGeneration", text, vision, model_type="gemma3", hidden_size=64, **ends
    )


_GEMMA4_TOKENS = {
    "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>",
    "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>",
}  # fmt: skip
_GEMMA4_PIXELS = {
    "image_processor_type": "Gemma4ImageProcessor", "processor_class": "Gemma4Processor",
    "patch_size": 8, "max_soft_tokens": 70, "pooling_kernel_size": 3,
}  # fmt: skip


def _gemma4(ids: Ids, text: dict[str, Any]) -> dict[str, Any]:
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
    by_layer = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": text["vocab_size"]}
    text = {**text, **kinds, **by_layer, "model_type": "gemma4_text", "num_hidden_layers": 4}
    text |= {"sliding_window": 16, "global_head_dim": 32}
    vision = _vit("gemma4_vision", patch_size=8, num_key_value_heads=2, head_dim=16, global_head_dim=16)
    vision |= {"position_embedding_size": 64, "pooling_kernel_size": 3, "default_output_length": 70}
    tokens = {f"{name}_id": ids(token) for name, token in _GEMMA4_TOKENS.items()}
    return _composed(
        "Gemma4ForConditionalGeneration", text, vision, model_type="gemma4", hidden_size=64,
        audio_config=None,  # else a tower of full size is set up
        video_token_id=ids("<|video|>"), pad_token_id=ids(_PAD), vision_soft_tokens_per_image=70, **tokens,
    )  # fmt: skip


def _gemma4_both_ways(ids: Ids, text: dict[str, Any]) -> dict[str, Any]:
    """The tokens of a picture look at each other."""
    config = _gemma4(ids, text)
    config["text_config"]["use_bidirectional_attention"] = "vision"
    return config


def _paligemma(ids: Ids, text: dict[str, Any]) -> dict[str, Any]:
    text = {**text, "model_type": "gemma", "num_image_tokens": 16}
    vision = _vit("siglip_vision_model", projection_dim=64)
    ends = {"image_token_index": ids("<image>"), "pad_token_id": ids(_PAD)}
    return _composed(
        "PaliGemmaForConditionalGeneration", text, vision, model_type="paligemma", hidden_size=64,
        projection_dim=64, **ends,
    )  # fmt: skip


# The others: a llama-like text part behind a tower


def _behind(
    kind: str, name: str, text_kind: str, vision: dict[str, Any], token: str, key: str, **more: Any
) -> Callable[[Ids, dict[str, Any]], dict[str, Any]]:
    """`token` stands for a patch; config.json calls its id `key`."""

    def config(ids: Ids, text: dict[str, Any]) -> dict[str, Any]:
        text = {**text, "model_type": text_kind}
        return _composed(name, text, vision, model_type=kind, **{key: ids(token)}, **more)

    return config


def _idefics(kind: str, name: str, *, tiles: bool) -> Family:
    vision = _vit("idefics3_vision")

    def config(ids: Ids, text: dict[str, Any]) -> dict[str, Any]:
        text = {**text, "model_type": "llama", "tie_word_embeddings": False}
        ends = {"image_token_id": ids("<image>"), "scale_factor": 2}
        return _composed(f"{name}ForConditionalGeneration", text, vision, model_type=kind, **ends)

    size = {"longest_edge": 112 if tiles else 56}
    more = {"max_image_size": {"longest_edge": 56}, "do_image_splitting": tiles, "do_pad": True}
    return Family(
        image="<image>",
        special=("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
        config=config,
        pixels=_normalised(f"{name}ImageProcessor", f"{name}Processor", size, **more),
        processor={"image_seq_len": 4},
    )


_CLIP_PIXELS = {"do_center_crop": True, "crop_size": {"height": 56, "width": 56}}
_CLIP = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}


def _llava(kind: str, name: str, pixels: dict[str, Any], **more: Any) -> Family:
    """A CLIP tower, whose class token is left out."""
    vision = _vit("clip_vision_model", projection_dim=32)
    select = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
    config = _behind(
        kind,
        f"{name}ForConditionalGeneration",
        "llama",
        vision,
        "<image>",
        "image_token_index",
        **select,
        **more,
    )
    return Family("<image>", ("<image>",), config, pixels, processor=_CLIP)


def _pixtral(kind: str, name: str, text_kind: str, merge: int, **more: Any) -> Family:
    vision = _vit("pixtral", head_dim=16, rope_theta=10000.0)
    config = _behind(
        kind, name, text_kind, vision, "[IMG]", "image_token_index", vision_feature_layer=-1, **more
    )
    patch = {"height": 14, "width": 14}
    owner = f"{kind.capitalize()}Processor"
    return Family(
        image="[IMG]",
        special=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        config=config,
        pixels=_normalised("PixtralImageProcessor", owner, {"longest_edge": 56}, patch_size=patch),
        processor={
            "patch_size": 14,
            "spatial_merge_size": merge,
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        },
    )


_SQUARE = {"height": 56, "width": 56}
_EDGE = {"shortest_edge": 56}
FAMILIES: dict[str, Family] = {
    "qwen2_vl": _qwen(
        _flat("qwen2_vl", "Qwen2VLForConditionalGeneration", _QWEN2_VIT),
        _qwen_pixels("Qwen2VLImageProcessor", "Qwen2VLProcessor", 14, 4),
    ),
    "qwen2_5_vl": _qwen(
        _flat("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", _QWEN2_5_VIT),
        _qwen_pixels("Qwen2VLImageProcessor", "Qwen2_5_VLProcessor", 14, 8),
    ),
    "qwen3_vl": _qwen(_qwen3_vl, _qwen_pixels("Qwen2VLImageProcessorFast", "Qwen3VLProcessor", 16, 8)),
    "qwen3_5": _qwen(_qwen3_5, _QWEN3_PIXELS, clips=_QWEN3_PIXELS),
    "gemma3": Family(
        image="<start_of_image>",
        special=("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        config=_gemma3,
        pixels=_normalised("Gemma3ImageProcessor", "Gemma3Processor", _SQUARE),
        processor={"image_seq_length": 4},
        tokenizer={
            "extra_special_tokens": {
                "image_token": "<image_soft_token>",
                "boi_token": "<start_of_image>",
                "eoi_token": "<end_of_image>",
            }
        },
    ),
    "gemma4": Family(
        image="<|image|>",
        video="<|video|>",
        special=(*_GEMMA4_TOKENS.values(), "<|video|>"),
        config=_gemma4,
        pixels=_GEMMA4_PIXELS,
        processor={"image_seq_length": 70, "image_processor": _GEMMA4_PIXELS},
        tokenizer={"extra_special_tokens": _GEMMA4_TOKENS},
    ),
    "paligemma": Family(
        image="<image>",
        special=("<image>",),
        config=_paligemma,
        pixels=_normalised("SiglipImageProcessor", "PaliGemmaProcessor", _SQUARE, image_seq_length=16),
        processor={},
        tokenizer={"bos_token": "<|im_start|>", "extra_special_tokens": {"image_token": "<image>"}},
    ),
    "idefics3": _idefics("idefics3", "Idefics3", tiles=False),
    "smolvlm": _idefics("smolvlm", "SmolVLM", tiles=True),
    "llava": _llava(
        "llava", "Llava", _normalised("CLIPImageProcessor", "LlavaProcessor", _EDGE, **_CLIP_PIXELS)
    ),
    "llava_next": _llava(
        "llava_next",
        "LlavaNext",
        _normalised(
            "LlavaNextImageProcessor", "LlavaNextProcessor", _EDGE, **_CLIP_PIXELS, image_grid_pinpoints=_GRID,
            do_pad=True,
        ),
        image_grid_pinpoints=_GRID,
    ),
    "llava_onevision": Family(
        image="<image>",
        video="<video>",
        special=("<image>", "<video>"),
        config=lambda ids, text: _behind(
            "llava_onevision", "LlavaOnevisionForConditionalGeneration", "qwen2", _vit("siglip_vision_model"),
            "<image>", "image_token_index", video_token_index=ids("<video>"), image_grid_pinpoints=_GRID,
            vision_aspect_ratio="anyres_max_9", vision_feature_layer=-1, vision_feature_select_strategy="full",
        )(ids, text),
        pixels=_normalised(
            "LlavaOnevisionImageProcessor", "LlavaOnevisionProcessor", _SQUARE, image_grid_pinpoints=_GRID,
            do_pad=True,
        ),
        processor={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "internvl": Family(
        image="<IMG_CONTEXT>",
        special=("<img>", "</img>", "<IMG_CONTEXT>"),
        config=_behind(
            "internvl", "InternVLForConditionalGeneration", "qwen3", _vit("internvl_vision"), "<IMG_CONTEXT>",
            "image_token_id", downsample_ratio=0.5, max_dynamic_patch=2,
        ),
        pixels=_normalised("GotOcr2ImageProcessor", "InternVLProcessor", _SQUARE),
        processor={"image_seq_length": 4},
    ),
    "pixtral": _pixtral("pixtral", "LlavaForConditionalGeneration", "mistral", merge=1),
    "mistral3": _pixtral(
        "mistral3", "Mistral3ForConditionalGeneration", "mistral", merge=2, spatial_merge_size=2
    ),
}  # fmt: skip


FAMILIES["gemma4_both_ways"] = replace(FAMILIES["gemma4"], config=_gemma4_both_ways)


def chat(family: str, question: str, images: int = 0, videos: int = 0) -> str:
    """A question as the family's chat template writes it, its media before it."""
    made = FAMILIES[family]
    media = made.image * images + made.video * videos
    return f"<|im_start|>user\n{media}{question}<|im_end|>\n<|im_start|>assistant\n"


@functools.cache
def tiny_vlm_folder(family: str, seed: int = 0) -> Path:
    """A model's folder, made once a session."""
    root = Path(tempfile.mkdtemp(prefix="mlx-nb-tiny-vlm-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return make_vlm_folder(root / family, family, seed)


@functools.cache
def tiny_vlm(family: str, seed: int = 0) -> tuple[Any, Any]:
    """Model and processor as `mlx_vlm.load` returns them, loaded once a session."""
    import mlx_vlm

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about processors without torchvision
        return mlx_vlm.load(str(tiny_vlm_folder(family, seed)))


def make_vlm_folder(folder: Path, family: str, seed: int = 0) -> Path:
    """Write a model of a family in mlx-vlm's format."""
    made = FAMILIES[family]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(list(made.special))
    tokenizer.save(str(folder / "tokenizer.json"))
    template = _template(made)
    config = made.config(
        tokenizer.token_to_id, _text(tokenizer.get_vocab_size(), tokenizer.token_to_id(_EOS))
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _EOS,
        "pad_token": _PAD,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
        **made.tokenizer,
    }
    files = {
        "config": config,
        "tokenizer_config": settings,
        "preprocessor_config": made.pixels,
        "processor_config": made.processor,
        "video_preprocessor_config": made.clips,
        "chat_template": {"chat_template": template},
    }
    for name, content in files.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    quiet = [tokenizer.token_to_id(token) for token in (_PAD, "<|im_start|>", _EOS, *made.special)]
    mx.save_safetensors(str(folder / "model.safetensors"), _weights(config, seed, quiet))
    return folder


def _text(vocabulary: int, eos: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "eos_token_id": eos,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }


def _template(made: Family) -> str:
    parts = (
        (
            "{% for part in message.content %}{% if part.type == 'image' %}IMAGE{% elif part.type == 'video' %}VIDEO"
            "{% else %}{{ part.text or part.content }}{% endif %}{% endfor %}"
        )
        .replace("IMAGE", made.image)
        .replace("VIDEO", made.video)
    )
    return (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.content is string %}{{ message.content }}{% else %}"
        + parts
        + "{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def _model(config: dict[str, Any]) -> Any:
    """A model as mlx-vlm makes it before it reads weights."""
    from mlx_vlm.utils import get_model_and_args, update_module_configs

    given = json.loads(json.dumps(config))
    for part in ("text_config", "vision_config", "audio_config"):
        given.setdefault(part, {})
    family, _ = get_model_and_args(given)
    parts = ["text", "vision", "perceiver", "projector", "audio"]
    return family.Model(update_module_configs(family.ModelConfig.from_dict(given), family, given, parts))


def _weights(config: dict[str, Any], seed: int, quiet: list[int]) -> dict[str, mx.array]:
    mx.random.seed(seed)
    weights = {}
    for name, value in tree_flatten(_model(config).parameters()):
        noise = mx.random.normal(value.shape)
        head = name.endswith("lm_head.weight")
        embedding = "embed_tokens" in name and "vision" not in name
        if value.ndim <= 1:
            drawn = value + 0.1 * noise
        elif embedding:
            drawn = 0.5 * noise / math.sqrt(value.shape[-1])
        else:
            inputs = math.prod(value.shape[1:]) if value.ndim > 2 else value.shape[-1]
            drawn = _GAIN * noise / math.sqrt(inputs)
        if (embedding or head) and value.shape[0] == _vocabulary(config):
            drawn[mx.array(quiet)] *= 0.1
        weights[name] = drawn.astype(mx.float32)
    return weights


def _vocabulary(config: dict[str, Any]) -> int:
    return int(config["vocab_size"])

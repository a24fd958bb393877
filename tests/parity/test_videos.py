"""Answers to prompts with videos are those of mlx_vlm.stream_generate, one prompt at a time."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vlm_models import chat, tiny_vlm, tiny_vlm_folder

from mlx_nb import EngineConfig, EngineCore, SamplingParams, SchedulerConfig, SingleStream
from mlx_nb.backends.pretrained import Pretrained
from mlx_nb.errors import RequestError
from mlx_nb.prompts.media import load_video

FRAMES = 6
QUESTION = "What happens?"
GREEDY = SamplingParams(max_tokens=16, temperature=0)


def frames(number: int) -> list[Image.Image]:
    """One of many videos, all of one length and size."""
    pixels = np.random.default_rng(number).integers(0, 255, (FRAMES, 84, 112, 3), dtype=np.uint8)
    return [Image.fromarray(each) for each in pixels]


def alone(family: str, text: str, *numbers: int) -> list[int]:
    """What mlx-vlm answers to one prompt."""
    import mlx_vlm

    model, processor = tiny_vlm(family)
    options: dict[str, Any] = {}
    if numbers:
        told = {
            "total_num_frames": FRAMES,
            "fps": load_video(frames(1)).fps,
            "frames_indices": list(range(FRAMES)),
        }
        clips = [np.stack([np.asarray(f) for f in frames(n)]).transpose(0, 3, 1, 2) for n in numbers]
        options = {"video": clips, "video_metadata": [told] * len(clips)}
    responses = list(
        mlx_vlm.stream_generate(model, processor, text, max_tokens=16, temperature=0.0, **options)
    )
    return list(responses[-1].token_ids)


@pytest.fixture(params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def family(request: pytest.FixtureRequest) -> str:
    """Each that takes videos."""
    return str(request.param)


@pytest.fixture(params=["batch", "single"])
def engine(family: str, request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    """Each kind of engine."""
    single = SingleStream() if request.param == "single" else None
    config = EngineConfig(scheduler_config=SchedulerConfig(max_num_seqs=1 if single else 256))
    running = EngineCore(None, None, config, backend=Pretrained(str(tiny_vlm_folder(family)), single=single))
    running.launch()
    running.wait_ready()
    yield running
    running.close()


def test_a_video_equals_mlx_vlm_and_is_cached_by_its_content(engine: EngineCore, family: str) -> None:
    assert engine.info.takes_videos
    text = chat(family, QUESTION, videos=1)
    for number in (1, 2):
        for cached in (False, True):
            output = engine.generate_sync(text, GREEDY, videos=[frames(number)])
            assert output.output_token_ids == alone(family, text, number)
            assert (output.cached_tokens == output.prompt_tokens - 1) == cached


def test_several_videos_beside_texts_equal_mlx_vlm(engine: EngineCore, family: str) -> None:
    two, none = chat(family, QUESTION, videos=2), chat(family, QUESTION)
    ids = [engine.submit(two, GREEDY, videos=[frames(1), frames(2)]), engine.submit(none, GREEDY)]
    outputs = [list(engine.stream_sync(request_id))[-1].output_token_ids for request_id in ids]
    assert outputs == [alone(family, two, 1, 2), alone(family, none)]


def test_images_and_videos_together_are_refused(engine: EngineCore, family: str) -> None:
    text = chat(family, QUESTION, images=1, videos=1)
    with pytest.raises(RequestError, match="images and videos don't go into one prompt"):
        engine.submit(text, GREEDY, images=[frames(1)[0]], videos=[frames(2)])


def test_a_model_of_images_alone_refuses_videos() -> None:
    running = EngineCore(None, None, backend=Pretrained(str(tiny_vlm_folder("smolvlm"))))
    running.launch()
    running.wait_ready()
    try:
        with pytest.raises(RequestError, match="takes no videos: leave them out"):
            running.submit(chat("smolvlm", QUESTION), GREEDY, videos=[frames(1)])
    finally:
        running.close()

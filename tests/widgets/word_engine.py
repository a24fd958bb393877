"""An engine that says given tokens, each with a probability and alternatives: for the token view's tests."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mlx_nb import AsyncEngineCore, EngineConfig, EngineCore, TokenLogprob
from mlx_nb.backends.base import Event, Token
from mlx_nb.backends.fake import EOS, FakeBackend, FakeCodec
from mlx_nb.session.session import default_session

FIRST = EOS + 1
OTHERS = (" which", " that", " is", " and", " its", " the")
STORY = (
    "<think>|99/The|71/ user|93/ wants|88/ a|91/ fact|42/.|87/<~think>|98/Tides|61/ are|92/ the|74/ slow|22"
    "/ breathing|8/ of|97/ the|98/ sea|57/:|34/ twice|66/ a|99/ day|97/ the|81/ Moon|95/ pulls|48/ the|93"
    "/ water|76/ up|12/,|72/ and|91/ twice|83/ it|88/ lets|27/ go|61/.|89/\n\n|55/In|33/ the|84/ Bay|29/ of|99"
    "/ Fund|97/y|99/ the|71/ difference|18/ is|94/ |96/16|41/ metres|77/,|38/ enough|26/ to|98/ hide|6/ a|97"
    "/ house|39/ of|31/ four|24/ floors|44/.|93/\n|62/   |80/<img src=x onerror=alert(1)>|9/ Sailors|14"
    "/ call|68/ it|73/ \U0001f30a|35/ and|52/ wait|21/.|90"
)


def parse(story: str) -> list[tuple[bytes, float]]:
    """Pieces and their probabilities; a wave is two tokens, as its bytes are in many vocabularies."""
    said: list[tuple[bytes, float]] = []
    for item in story.split("/"):
        text, _, percent = item.replace("~", "/").rpartition("|")
        piece, p = text.encode(), int(percent) / 100
        said += [(piece[:-2], 0.6), (piece[-2:], p)] if "\U0001f30a" in text else [(piece, p)]
    return said


class WordCodec(FakeCodec):
    """Bytes, and after them the words."""

    def __init__(self, words: Sequence[bytes]) -> None:
        super().__init__()
        self._words = words
        self.vocabulary_size = FIRST + len(words)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Words and bytes to text."""
        parts = [
            self._words[i - FIRST] if i >= FIRST else b"<eos>" if i == EOS else bytes([i]) for i in token_ids
        ]
        return b"".join(parts).decode(errors="replace")


def adopt_words(name: str, story: str = STORY, *, repeat: int = 1, step_s: float = 0.02) -> EngineCore:
    """Put an engine into the session that says the story."""
    said = parse(story) * repeat
    words = list(dict.fromkeys([word for word, _ in said] + [other.encode() for other in OTHERS]))
    ids = [FIRST + words.index(word) for word, _ in said]

    def logprob(position: int) -> TokenLogprob:
        p = said[position][1]
        others = [
            FIRST + words.index(o.encode())
            for o in OTHERS
            if FIRST + words.index(o.encode()) != ids[position]
        ]
        left, top = 1 - p, {ids[position]: p}
        for number, other in enumerate(others[:4]):
            share = left * (0.46 if number else 0.55)
            top[other], left = share, left - share
        ordered = sorted(top.items(), key=lambda pair: -pair[1])
        return TokenLogprob(ids[position], math.log(p), {i: math.log(q) for i, q in ordered})

    class WordBackend(FakeBackend):
        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config, lambda _: [*ids, EOS], step_s, 100_000, None, takes_images=False)
            self.codec = WordCodec(words)
            self._at: dict[str, int] = {}

        def next(self) -> list[Event]:
            return [self._weighed(event) for event in super().next()]

        def _weighed(self, event: Event) -> Event:
            if not (isinstance(event, Token) and event.token_id != EOS and event.logprob):
                return event
            at = self._at[event.request_id] = self._at.get(event.request_id, -1) + 1
            return replace(event, logprob=logprob(at))

    def make(config: EngineConfig, _on_progress: Any) -> WordBackend:
        return WordBackend(config)

    core = EngineCore(None, None, EngineConfig(model_name="Tides-1B"), backend=make)
    default_session().adopt(name, "words", AsyncEngineCore.over(core))
    return core

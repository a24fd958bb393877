"""mlx-lm as it comes: the bare batch loop that everything is measured against, and its ready-made functions."""

import itertools
import time
from collections import deque
from pathlib import Path
from typing import Any

from mlx_lm import batch_generate, stream_generate
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from .. import subjects
from ..work import Answer, Ask
from .driver import Driver


class _MlxLm(Driver):
    """Model and tokenizer as mlx-lm loads them."""

    def load(self, folder: Path, options: dict[str, Any]) -> None:
        self.model, self.tokenizer = subjects.load(folder)
        self.options = {
            "completion_batch_size": options.get("rows", 32),
            **{key: options[key] for key in ("prefill_step_size",) if key in options},
        }

    def texts(self, answers: list[Answer]) -> list[Answer]:
        """Write the texts, when the clock no longer runs."""
        for answer in answers:
            answer.text = self.tokenizer.decode(answer.ids)
        return answers


class Floor(_MlxLm):
    """The least that can be done with BatchGenerator: put in, step, take out. No text is made."""

    def load(self, folder: Path, options: dict[str, Any]) -> None:
        super().load(folder, options)
        self.generator = BatchGenerator(self.model, **self.options)

    def run(self, asks: list[Ask]) -> list[Answer]:
        answers = [Answer(ids=[]) for _ in asks]
        arriving = deque(sorted(range(len(asks)), key=lambda n: asks[n].at))
        leaving = deque(
            sorted((n for n, ask in enumerate(asks) if ask.leaves is not None), key=lambda n: asks[n].leaves)
        )
        rows: dict[int, Answer] = {}
        uids: dict[int, int] = {}
        began = time.perf_counter()
        while arriving or rows:
            if arriving:
                self._let_in(asks, answers, arriving, rows, uids, began)
            if leaving:
                self._let_out(asks, leaving, rows, uids, began)
            if rows:
                responses = self.generator.next()[1]
                now = time.perf_counter() - began
                for response in responses:
                    answer = rows[response.uid]
                    answer.ids.append(response.token)  # type: ignore[union-attr]
                    answer.times.append(now)
                    if response.finish_reason is not None:
                        answer.end = now
                        del rows[response.uid]
                if answers[-1].end and any(ask.with_last for ask in asks):
                    self.generator.remove(list(rows))
                    rows.clear()
            elif arriving:
                time.sleep(max(0.0, asks[arriving[0]].at - (time.perf_counter() - began)))
        for answer in answers:
            answer.made = len(answer.ids or [])
        return self.texts(answers)

    def _let_in(
        self,
        asks: list[Ask],
        answers: list[Answer],
        arriving: deque[int],
        rows: dict[int, Answer],
        uids: dict[int, int],
        began: float,
    ) -> None:
        here = []
        while arriving and asks[arriving[0]].at <= time.perf_counter() - began:
            here.append(arriving.popleft())
        if here:
            prompts = [asks[n].prompt.tokens for n in here]
            for n, uid in zip(here, self.generator.insert(prompts, [asks[n].new for n in here]), strict=True):
                uids[n], rows[uid] = uid, answers[n]

    def _let_out(
        self,
        asks: list[Ask],
        leaving: deque[int],
        rows: dict[int, Answer],
        uids: dict[int, int],
        began: float,
    ) -> None:
        now = time.perf_counter() - began
        while leaving and leaving[0] in uids and (asks[leaving[0]].leaves or 0) <= now:
            uid = uids[leaving.popleft()]
            if answer := rows.pop(uid, None):
                self.generator.remove([uid])
                answer.end = now


class BatchGenerate(_MlxLm):
    """`mlx_lm.batch_generate`: all prompts at once, all answers at the end."""

    def run(self, asks: list[Ask]) -> list[Answer]:
        began = time.perf_counter()
        made = batch_generate(
            self.model,
            self.tokenizer,
            [ask.prompt.tokens for ask in asks],
            max_tokens=[ask.new for ask in asks],
            **self.options,
        )
        end = time.perf_counter() - began
        return [Answer(made=ask.new, end=end, text=text) for ask, text in zip(asks, made.texts, strict=True)]


class StreamGenerate(_MlxLm):
    """`mlx_lm.stream_generate`: one request after another, in order of arrival."""

    def run(self, asks: list[Ask]) -> list[Answer]:
        began = time.perf_counter()
        answers = []
        for ask in asks:
            time.sleep(max(0.0, ask.at - (time.perf_counter() - began)))
            answers.append(self.one(ask, began))
        return answers

    def one(self, ask: Ask, began: float) -> Answer:
        """Return the answer to one request."""
        return self.stream(ask, began, ask.prompt.tokens)

    def stream(self, ask: Ask, began: float, tokens: list[int], **options: Any) -> Answer:
        """Return the answer to the tokens that are still to be read."""
        step = {key: self.options[key] for key in ("prefill_step_size",) if key in self.options}
        answer, texts = Answer(ids=[]), []
        for response in stream_generate(
            self.model, self.tokenizer, tokens, max_tokens=ask.new, **step, **options
        ):
            answer.times.append(time.perf_counter() - began)
            answer.ids.append(response.token)  # type: ignore[union-attr]
            texts.append(response.text)
        answer.made, answer.end, answer.text = len(answer.times), answer.times[-1], "".join(texts)
        return answer


class ByHand(StreamGenerate):
    """`stream_generate` with a cache that its caller keeps and trims to what the next prompt has in common."""

    def load(self, folder: Path, options: dict[str, Any]) -> None:
        super().load(folder, options)
        self._cache: list[Any] = []
        self._held: list[int] = []

    def one(self, ask: Ask, began: float) -> Answer:
        tokens = ask.prompt.tokens
        pairs = zip(self._held, tokens[:-1], strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if common == 0:
            self._cache, self._held = make_prompt_cache(self.model), []
        else:
            trim_prompt_cache(self._cache, self._cache[0].offset - common)
        answer = self.stream(ask, began, tokens[common:], prompt_cache=self._cache)
        self._held = [*tokens, *(answer.ids or [])][: self._cache[0].offset]
        return answer

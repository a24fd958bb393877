"""What an answer looks like: bundles of MIME types for each format.

What a model wrote is never run as HTML of the page: it is markdown, escaped text, or (in the format "html") a frame
in which scripts, forms and the network are switched off.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..outputs import GenerationOutput, RequestOutput, TokenLogprob
from ..session.markdown import code_block, code_span, safe_markdown
from ..session.tools import Called

__all__ = ["FORMATS", "Bundle", "Said", "bundle", "markdown", "small"]

FORMATS = ("markdown", "text", "json", "code", "html")
Bundle = dict[str, str]

_SMALL = "font-size: 85%; opacity: 0.7"
_WRAP = "white-space: pre-wrap"
_FENCED = re.compile(r"\A\s*(`{3,}|~{3,})[^\n`]*\n(.*?)\n?\1\s*\Z", re.DOTALL)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:"


@dataclass(frozen=True, slots=True)
class Said:
    """What a model has said so far.

    Attributes
    ----------
    calls : tuple of Called
        Tools it calls; those that were carried out have a `content`.
    finished : bool
    finish_reason : str, optional
        Why it ended.
    logprobs : sequence of TokenLogprob, optional
        One a token, if they were asked for.
    """

    text: str = ""
    reasoning: str = ""
    calls: tuple[Called, ...] = ()
    finished: bool = False
    finish_reason: str | None = None
    logprobs: Sequence[TokenLogprob] | None = None

    @classmethod
    def of(cls, output: RequestOutput | GenerationOutput, calls: tuple[Called, ...] = ()) -> Said:
        """From an engine's output, and the calls of it that were carried out."""
        text = output.output_text if isinstance(output, RequestOutput) else output.text
        open_calls = tuple(Called.of(call) for call in output.tool_calls[len(calls) :])
        reason = output.finish_reason
        return cls(text, output.reasoning, calls + open_calls, reason is not None, reason, output.logprobs)


def bundle(said: Said, style: str = "markdown") -> Bundle:
    """How a notebook shows it in one of `FORMATS`; ``text/plain`` is always among it."""
    text = _pretty(said.text) if style == "json" else said.text
    text = text.lstrip("\n") if said.reasoning else text
    plain = plain_text(said, text)
    if style == "html" and said.finished:
        return {"text/plain": plain, "text/html": _fold(said) + _frame(text) + _calls_html(said)}
    if style == "text":
        if not said.reasoning and not said.calls:
            return {"text/plain": plain}
        shown = f'<pre style="{_WRAP}">{html.escape(text)}</pre>' if text else ""
        return {"text/plain": plain, "text/html": _fold(said) + shown + _calls_html(said)}
    parts = [_fold(said), _body(text, style), *(f"→ {code_span(str(call))}" for call in said.calls)]
    return {"text/plain": plain, "text/markdown": "\n\n".join(part for part in parts if part)}


def plain_text(said: Said, text: str) -> str:
    """Reasoning, answer and calls, one under another."""
    reasoning = f"Reasoning:\n{said.reasoning.strip()}" if said.reasoning.strip() else ""
    answer = text.lstrip() if reasoning else text
    return "\n\n".join(filter(None, [reasoning, answer, "\n".join(f"→ {call}" for call in said.calls)]))


def markdown(text: str) -> Bundle:
    """A bundle for a text of the model."""
    return bundle(Said(text))


def small(text: str) -> Bundle:
    """A bundle for a line of ours."""
    return {"text/plain": text, "text/html": f'<div style="{_SMALL}">{html.escape(text)}</div>'}


def _body(text: str, style: str) -> str:
    if style == "markdown" or not text or (style == "code" and text.lstrip().startswith(("```", "~~~"))):
        return safe_markdown(text)
    return code_block(text, style if style != "code" else "")


def _unfenced(text: str) -> str:
    """Without the code fence that models like to put around it."""
    found = _FENCED.match(text)
    return found[2] if found else text


def _pretty(text: str) -> str:
    try:
        return json.dumps(json.loads(_unfenced(text)), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def _fold(said: Said) -> str:
    """The reasoning in a block that folds, and is open until the answer begins.

    Valid as HTML and as markdown, whatever the model thinks: no fence, tag or formula of its can leave the block.
    """
    if not said.reasoning.strip():
        return ""
    opened = "" if said.text or said.finished else " open"
    thought = html.escape(said.reasoning.strip()).replace("$", "&#36;")
    return (
        f"<details{opened}><summary>Reasoning</summary>\n\n"
        f'<pre style="{_WRAP}; {_SMALL}">{thought}</pre>\n\n</details>\n\n'
    )


def _frame(text: str) -> str:
    """A page of the model's in a frame without rights."""
    page = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">{_unfenced(text)}'
    style = "width: 100%; height: 320px; resize: vertical; border: 1px solid #8884; background: white"
    return f'<iframe sandbox="" srcdoc="{html.escape(page)}" style="{style}"></iframe>'


def _calls_html(said: Said) -> str:
    return "".join(f'<div style="{_SMALL}">→ <code>{html.escape(str(c))}</code></div>' for c in said.calls)

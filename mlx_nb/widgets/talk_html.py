"""The chat panel where no widget runs: one line of text, and the conversation as HTML for a saved notebook.

Everything is escaped and styled inline: a saved page has neither our style sheet nor our script. Of a model's
markdown only code blocks are laid out; the rest stays as it was written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from .protocol import ChatHead, ChatTurn, TurnEnding

__all__ = ["as_html", "as_text"]

_FENCED = re.compile(
    r"^[ ]{0,3}(?P<fence>`{3,}|~{3,})(?P<info>[^`\n]*)\n(?P<code>.*?)(?:^[ ]{0,3}(?P=fence)[`~]*[ ]*$|\Z)",
    re.MULTILINE | re.DOTALL,
)
_BOX = "font:14px/20px system-ui,sans-serif;max-width:900px"
_TURN = "margin:0 0 12px"
_NAME = "font-weight:600;margin:0 0 2px"
_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere;margin:0 0 6px"
_CODE = "white-space:pre;overflow-x:auto;margin:0 0 6px;padding:8px 12px;border:1px solid #9e9e9e"
_QUIET = "font-size:12px;opacity:.72;margin:0"
_REMARKS: dict[TurnEnding, str] = {
    "waiting": "not answered yet",
    "answering": "the answer was still being written",
    "stopped": "stopped",
    "length": "cut off at max_tokens",
}


def as_text(head: ChatHead, turns: Sequence[ChatTurn]) -> str:
    """The panel in one line."""
    count = "no turns" if not turns else "1 turn" if len(turns) == 1 else f"{len(turns):,} turns"
    last = f" · last: {' '.join(turns[-1]['question'].split())[:80]}" if turns else ""
    return f"Chat with {head['model'] or 'no model'} · {count}{last}"


def as_html(head: ChatHead, turns: Sequence[ChatTurn]) -> str:
    """The conversation, readable without anything else."""
    about = f"Chat with <bdi>{escape(head['model'] or 'no model')}</bdi> (snapshot)"
    body = "".join(map(_turn, turns)) or f'<p style="{_QUIET}">Nothing was said yet.</p>'
    head_line = f'<p style="{_QUIET};margin:0 0 8px">{about}</p>'
    return f'<div class="mlx-nb-chat-snapshot" style="{_BOX}">{head_line}{body}</div>'


def _turn(turn: ChatTurn) -> str:
    status = turn["status"]
    remark = status["problem"] or _REMARKS.get(status["ending"], "")
    pictures = "".join(
        f'<p style="margin:0 0 6px"><img src="{escape(image["src"])}" alt="{escape(image["name"])}"></p>'
        for image in turn["images"]
    )
    reasoning = turn["reasoning"].strip()
    thinking = (
        f'<details><summary style="{_QUIET}">Thinking</summary><p style="{_TEXT};opacity:.72">{escape(reasoning)}</p>'
        "</details>"
        if reasoning
        else ""
    )
    question = f'<p style="{_TEXT}">{escape(turn["question"])}</p>{pictures}'
    return (
        f'<div style="{_TURN}"><p style="{_NAME}">You</p>{question}</div>'
        f'<div style="{_TURN}"><p style="{_NAME}">Model</p>{thinking}{_answer(turn["answer"])}'
        + (f'<p style="{_QUIET}">({escape(remark)})</p>' if remark else "")
        + "</div>"
    )


def _answer(text: str) -> str:
    parts: list[str] = []
    end = 0
    for block in _FENCED.finditer(text):
        parts += [
            _prose(text[end : block.start()]),
            f'<pre style="{_CODE}"><code>{escape(block["code"])}</code></pre>',
        ]
        end = block.end()
    return "".join([*parts, _prose(text[end:])])


def _prose(text: str) -> str:
    return f'<p style="{_TEXT}">{escape(text.strip())}</p>' if text.strip() else ""

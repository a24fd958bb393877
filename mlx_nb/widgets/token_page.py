"""An answer token by token where no widget runs: plain text with its uncertain tokens, and a page of shaded text.

Everything is escaped and styled inline: a saved page has neither our style sheet nor our script. Without any styles
it still is the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby

from .protocol import AnswerBand, TokenFigures, TokenItem
from .token_items import UNCERTAIN, level, likelier

__all__ = ["answer_html", "answer_text", "figures_line", "uncertain_table"]

MOST_LISTED = 8
"""Uncertain tokens in the table."""

_SHADES = (0, 0.16, 0.32, 0.48, 0.64)
_STEPS = ("≥ 90 %", "60–90", "30–60", "10–30", "&lt; 10 %")  # noqa: RUF001  # a range has an en dash
_HEADS = {"reasoning": "Reasoning", "tool": "Tool call"}
_SMALL = "font:12px/1.5 system-ui,sans-serif;opacity:0.75"
_TEXT = "font:15px/2 system-ui,sans-serif;white-space:pre-wrap;overflow-wrap:anywhere"


def answer_text(items: Sequence[TokenItem]) -> str:
    """Return what was written: the reasoning under its head, and the answer."""
    parts = [
        f"{_HEADS[part]}:\n{text.strip()}" if part in _HEADS else text.lstrip() if index else text
        for index, (part, text) in enumerate(_parts(items))
    ]
    return "\n\n".join(part for part in parts if part)


def _parts(items: Sequence[TokenItem]) -> list[tuple[str, str]]:
    shown = (item for item in items if item["part"] != "marker")
    return [
        (part, "".join(item["text"] for item in run)) for part, run in groupby(shown, key=lambda i: i["part"])
    ]


def uncertain_table(items: Sequence[TokenItem]) -> str:
    """Return the least certain tokens as lines of text; empty when all are likely."""
    doubtful = [(item["p"], index) for index, item in enumerate(items) if item["p"] < UNCERTAIN]
    if not doubtful:
        return ""
    listed = sorted(index for _, index in sorted(doubtful)[:MOST_LISTED])
    names = [repr(items[index]["text"]) for index in listed]
    width = max(map(len, names))
    head = f"{len(doubtful):,} of {len(items):,} tokens below 30 %"
    if len(doubtful) > MOST_LISTED:
        head += f", the least likely {MOST_LISTED}"
    rows = [
        f"  {index + 1:>5,}  {name:<{width}}  {_percent(items[index]['p']):>7}  {_instead(items[index])}".rstrip()
        for index, name in zip(listed, names, strict=True)
    ]
    return "\n".join([f"{head}:", *rows])


def _instead(item: TokenItem) -> str:
    if not likelier(item):
        return ""
    before = item["top"][: (item["rank"] or 4) - 1][:3]
    return "likelier: " + ", ".join(f"{one['text']!r} {_percent(one['p'])}" for one in before)


def figures_line(count: int, figures: TokenFigures) -> str:
    """Return count, mean probability and perplexity in one line."""
    parts = ["1 token" if count == 1 else f"{count:,} tokens"]
    if figures["mean"] is not None:
        parts.append(f"mean probability {figures['mean']:.0%}".replace("%", " %"))
    if figures["perplexity"] is not None:
        parts.append(f"perplexity {figures['perplexity']:,.2f}")
    return " · ".join(parts)


def answer_html(band: AnswerBand, figures: TokenFigures, items: Sequence[TokenItem]) -> str:
    """Return the shaded answer; alternatives show when the pointer rests on a token."""
    about = " · ".join(filter(None, [band["title"], figures_line(len(items), figures)]))
    body = "".join(_part_html(part, list(run)) for part, run in groupby(items, key=_home()))
    return (
        f'<div class="mlx-nb-tokens-snapshot"><div style="{_SMALL}">{escape(about)}</div>'
        f'{body or escape(band["note"]) or "…"}<div style="{_SMALL}">{_legend()}</div></div>'
    )


def _home() -> Callable[[TokenItem], str]:
    """Give each token the part it is drawn in: a marker stays where it was written."""
    last = ["answer"]

    def home(item: TokenItem) -> str:
        if item["part"] != "marker":
            last[0] = item["part"]
        return last[0]

    return home


def _part_html(part: str, items: Sequence[TokenItem]) -> str:
    head = f'<div style="{_SMALL}">{_HEADS[part]}</div>' if part in _HEADS else ""
    style = f"{_TEXT};border-left:3px solid #8888;padding-left:12px" if head else _TEXT
    runs = []
    for plain, run in groupby(items, key=lambda item: level(item["p"]) == 0 and item["part"] != "marker"):
        texts = list(run)
        runs.append(escape("".join(t["text"] for t in texts)) if plain else "".join(map(_token_html, texts)))
    return f'{head}<div style="{style}">{"".join(runs)}</div>'


def _token_html(item: TokenItem) -> str:
    """A token below 90 %, or a marker: its word is shaded, the space around it is not."""
    text = item["text"]
    word = text.strip()
    lead, tail = (text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]) if word else ("", text)
    style = f"background-color:rgba(25,118,210,{_SHADES[level(item['p'])]})"
    if likelier(item):
        style += ";text-decoration:underline"
    if item["part"] == "marker":
        style += ";font-family:monospace;font-size:12px;border:1px solid #8888"
    shown = word or ("⏎" if "\n" in text else "·" * len(text) or "◌")
    if not word and "\n" not in text:
        tail = ""
    return f'{escape(lead)}<span style="{style}" title="{escape(_title(item))}">{escape(shown)}</span>{escape(tail)}'


def _title(item: TokenItem) -> str:
    lines = [f"{one['text']!r} {_percent(one['p'])}" for one in item["top"]]
    if item["rank"] is None:
        return "\n".join([f"{_percent(item['p'])}; instead:" if lines else _percent(item["p"]), *lines])
    lines[item["rank"] - 1] += " ←"
    return "\n".join(lines)


def _legend() -> str:
    shades = "".join(
        f'<span style="background-color:rgba(25,118,210,{shade});padding:1px 6px">{step}</span>'
        for shade, step in zip(_SHADES, _STEPS, strict=True)
    )
    return f'Probability {shades} <span style="text-decoration:underline">underlined</span>: another was likelier'


def _percent(p: float) -> str:
    return f"{p * 100:.1f} %"

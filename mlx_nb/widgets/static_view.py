"""The monitor where no widget runs: one line of text, and a small table for a saved notebook or its export.

Everything is escaped and styled inline: a saved page has neither our style sheet nor our script.
"""

from __future__ import annotations

from html import escape

from .protocol import MonitorState
from .readings import Reading

_WORDS: dict[MonitorState, str] = {
    "loading": "loading",
    "running": "running",
    "idle": "idle",
    "paused": "paused",
    "unloaded": "unloaded (the model is not in memory)",
    "stopped": "stopped",
    "error": "failed",
}
_TABLE = "border-collapse:collapse;font:13px/1.5 system-ui,sans-serif;font-variant-numeric:tabular-nums"
_NAME = "padding:2px 16px 2px 0;text-align:left;font-weight:400;opacity:.72"
_VALUE = "padding:2px 0;text-align:left"
_UNKNOWN = "–"  # noqa: RUF001  # the dash that stands for an unknown value


def as_text(reading: Reading) -> str:
    """Return the monitor in one line."""
    engine, load = reading["engine"], reading["load"]
    parts = [f"Engine monitor: {engine['model'] or 'no model'}, {_WORDS[engine['state']]}"]
    if engine["failure"]:
        parts.append(engine["failure"])
    else:
        parts += [_counts(reading), f"{load['decode']:,.1f} tok/s"]
    return " · ".join(parts)


def as_html(reading: Reading) -> str:
    """Return the monitor as a table that needs nothing else."""
    engine, load, cache = reading["engine"], reading["load"], reading["prefix"]
    about = " · ".join(part for part in (engine["model"], engine["precision"], engine["backend"]) if part)
    rows = [
        ("State", _WORDS[engine["state"]]),
        ("Requests", _counts(reading)),
        ("Tokens/s", f"decode {load['decode']:,.1f}, prefill {load['prefill']:,.0f}"),
        ("Memory", _memory(reading)),
        ("Prefix cache", _prefix(reading) if cache["enabled"] else "off"),
    ]
    if engine["workers"]:
        rows += [
            (row["id"], f"{row['prompt']} ({moving['done']:,} of {moving['total']:,} rows)")
            for row, moving in zip(reading["rows"], reading["progress"], strict=True)
        ]
    if engine["failure"]:
        rows.insert(1, ("Failure", engine["failure"]))
    body = "".join(
        f'<tr><th scope="row" style="{_NAME}">{escape(name)}</th>'
        f'<td style="{_VALUE}">{escape(value)}</td></tr>'
        for name, value in rows
    )
    caption = (
        f'<caption style="text-align:left;padding:2px 0"><bdi>{escape(about)}</bdi> (snapshot)</caption>'
    )
    return f'<table class="mlx-nb-monitor-snapshot" style="{_TABLE}">{caption}<tbody>{body}</tbody></table>'


def _counts(reading: Reading) -> str:
    load = reading["load"]
    return f"{load['running']:,} running, {load['waiting']:,} waiting, {load['finished']:,} finished"


def _memory(reading: Reading) -> str:
    memory = reading["memory"]
    used = [memory["weights"], memory["kv"], memory["prefix"], memory["other"], memory["pool"]]
    if all(part is None for part in used):
        return _UNKNOWN
    return f"{_size(sum(part or 0 for part in used))} of {_size(memory['limit'])}"


def _prefix(reading: Reading) -> str:
    cache = reading["prefix"]
    rate = _UNKNOWN if cache["hit_rate"] is None else f"{cache['hit_rate']:.0%}"
    return (
        f"{cache['entries']:,} entries, {_size(cache['bytes'])}, hit rate {rate}, "
        f"{cache['tokens_saved']:,} tokens saved"
    )


def _size(count: int | None) -> str:
    if count is None:
        return _UNKNOWN
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.0f} MB"

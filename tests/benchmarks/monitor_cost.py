"""What a watched monitor takes from the speed of decoding.

usage: python -m tests.benchmarks.monitor_cost [ROUNDS] [TOKENS]

In a real kernel a small random model answers eight requests at a time, by turns with a monitor that a view looks at
and with one that nobody sees. The view itself is played: its message is handed to the widget, and the updates go out
to a client that reads them all. Prints JSON: tokens a second of each, the median over rounds of their ratio, and
updates a second. Exit status 1 when the monitor costs 1 % or more.
"""

import json
import queue
import sys
from pathlib import Path
from typing import Any

from jupyter_client.manager import start_new_kernel

from .report import report

BOUND = 0.01
CELL = """\
import json, statistics, sys, time
sys.path.insert(0, {root!r})
from tests.models import tiny
from mlx_nb import EngineConfig, EngineCore, SamplingParams
from mlx_nb.widgets import MonitorWidget

core = EngineCore(*tiny(), EngineConfig(model_name="tiny"))
core.launch()
monitor = MonitorWidget(core)
sent, send = [], monitor.send_state
monitor.send_state = lambda key=None: (sent.append(key), send(key))
order = 0

def speed(watched):
    global order
    order += 1
    view = {{"kind": "view", "view": "v", "order": order, "open": watched}}
    monitor._handle_custom_msg(view, [])
    params = SamplingParams(max_tokens={tokens}, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    core.generate_batch_sync(["To be, or not to be"] * 8, params)
    return 8 * {tokens} / (time.perf_counter() - start), time.perf_counter() - start

speed(False), speed(True)
rounds, looked, updates = [], 0.0, 0
for turn in range({rounds}):
    pair = {{}}
    for watched in (turn % 2 == 0, turn % 2 == 1):
        before = len(sent)
        pair[watched], seconds = speed(watched)
        if watched:
            looked, updates = looked + seconds, updates + len(sent) - before
    rounds.append((pair[False], pair[True]))
print(json.dumps({{
    "unwatched_tps": statistics.median(each[0] for each in rounds),
    "watched_tps": statistics.median(each[1] for each in rounds),
    "ratio": statistics.median(watched / unwatched for unwatched, watched in rounds),
    "updates_per_second": updates / looked,
}}))
core.close()
"""


def measure(rounds: int, tokens: int) -> dict[str, Any]:
    """Run the cell in a kernel, and read everything that the kernel sends."""
    root = str(Path(__file__).parents[2])
    manager, client = start_new_kernel()
    try:
        asked = client.execute(CELL.format(root=root, rounds=rounds, tokens=tokens))
        printed = ""
        while True:
            try:
                message = client.get_iopub_msg(timeout=120)
            except queue.Empty:
                raise TimeoutError("the kernel has said nothing for two minutes") from None
            if message["parent_header"].get("msg_id") != asked:
                continue
            match message["msg_type"], message["content"]:
                case "stream", {"name": "stdout", "text": text}:
                    printed += text
                case "error", {"traceback": lines}:
                    raise RuntimeError("\n".join(lines))
                case "status", {"execution_state": "idle"}:
                    figures: dict[str, Any] = json.loads(printed)
                    return figures
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def main() -> None:
    """Measure and report."""
    rounds, tokens = (int(word) for word in [*sys.argv[1:], "20", "1000"][:2])
    figures = measure(rounds, tokens)
    cost = 1 - figures["ratio"]
    report(rounds=rounds, tokens=tokens, bound=BOUND, cost=cost, **figures)
    sys.exit(cost >= BOUND)


if __name__ == "__main__":
    main()

// The monitor as anywidget loads it.
import { widget } from "../mount";
import type { MonitorTraits } from "../protocol";
import { MonitorView } from "./view";

export default widget<MonitorTraits>(
  ["engine", "load", "history", "memory", "prefix", "rows", "progress", "hidden_requests"],
  (send) => new MonitorView(send),
);

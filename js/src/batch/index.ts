// A DataFrame job's view as anywidget loads it.
import { widget } from "../mount";
import type { BatchTraits } from "../protocol";
import { BatchView } from "./view";

export default widget<BatchTraits>(
  ["job", "counts", "pace", "tokens", "results"],
  (send) => new BatchView(send),
);

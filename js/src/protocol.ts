// What the widgets and the browser say to each other. Mirrors mlx_nb/widgets/protocol.py name by name;
// test/fixtures/protocol.json is checked by both sides.

export type MonitorState = "loading" | "running" | "idle" | "stopped" | "error";
export type RequestPhase = "waiting" | "prefill" | "decode";
export type Command = "abort_all" | "clear_cache" | "stop";
export type BatchState = "running" | "paused" | "stopped" | "finished" | "error";
export type RowOutcome = "done" | "cut" | "failed" | "skipped";
export type JobAction = "pause" | "resume" | "stop";

export const HISTORY_SECONDS = 120;

export interface EngineBand {
  state: MonitorState;
  model: string;
  precision: string;
  backend: string;
  failure: string | null;
  command: string;
  notice: string | null;
}

export interface LoadBand {
  decode: number;
  prefill: number;
  running: number;
  waiting: number;
  finished: number;
  slots: number | null;
}

export interface HistoryBand {
  decode: (number | null)[];
  prefill: (number | null)[];
  decode_peak: number;
  prefill_peak: number;
}

export interface MemoryBand {
  weights: number | null;
  kv: number | null;
  prefix: number | null;
  other: number | null;
  pool: number | null;
  limit: number | null;
}

export interface PrefixBand {
  enabled: boolean;
  entries: number;
  bytes: number | null;
  hit_rate: number | null;
  tokens_saved: number;
}

export interface RequestRow {
  id: string;
  prompt: string;
}

export interface RequestProgress {
  phase: RequestPhase;
  done: number;
  total: number;
  rate: number | null;
  elapsed: number;
  cached: number;
}

export interface MonitorTraits {
  engine: EngineBand;
  load: LoadBand;
  history: HistoryBand;
  memory: MemoryBand;
  prefix: PrefixBand;
  rows: RequestRow[];
  progress: RequestProgress[];
  hidden_requests: number;
}

export interface JobBand {
  state: BatchState;
  title: string;
  failure: string | null;
  command: string;
  ended: string | null;
}

export interface CountsBand {
  total: number;
  done: number;
  failed: number;
  skipped: number;
  running: number;
  cut: number;
  reused: number;
}

export interface PaceBand {
  rows: number | null;
  tokens: number | null;
  elapsed: number;
  left: number | null;
}

export interface TokensBand {
  samples: (number | null)[];
  peak: number;
}

export interface RowResult {
  row: string;
  prompt: string;
  answer: string;
  outcome: RowOutcome;
}

export interface BatchTraits {
  job: JobBand;
  counts: CountsBand;
  pace: PaceBand;
  tokens: TokensBand;
  /** The newest first. */
  results: RowResult[];
}

export interface ViewChange {
  kind: "view";
  view: string;
  /** A message of a lower order than one that arrived is late, and ignored. */
  order: number;
  open: boolean;
}

export interface Abort {
  kind: "abort";
  request_id: string;
}

export interface EngineCommand {
  kind: "command";
  command: Command;
}

export interface JobCommand {
  kind: "job";
  action: JobAction;
}

/** What a view of any widget asks for. */
export type Asked = Abort | EngineCommand | JobCommand;

export type Message = ViewChange | Asked;

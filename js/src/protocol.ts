// What the widgets and the browser say to each other. Mirrors mlx_nb/widgets/protocol.py name by name;
// test/fixtures/protocol.json is checked by both sides.

export type MonitorState = "loading" | "running" | "idle" | "paused" | "unloaded" | "stopped" | "error";
export type RequestPhase = "waiting" | "prefill" | "decode";
export type Command = "pause" | "resume" | "abort_all" | "clear_cache" | "stop" | "restart";
export type BatchState = "running" | "paused" | "stopped" | "finished" | "error";
export type RowOutcome = "done" | "cut" | "failed" | "skipped";
export type JobAction = "pause" | "resume" | "stop";
export type ChatState = "loading" | "running" | "idle" | "stopped" | "error";
export type ChatAction = "stop" | "regenerate" | "dismiss" | "reset" | "whole";
export type TurnEnding = "waiting" | "answering" | "done" | "length" | "stopped" | "failed";

export const HISTORY_SECONDS = 120;

export interface EngineBand {
  state: MonitorState;
  model: string;
  precision: string;
  backend: string;
  failure: string | null;
  command: string;
  can_restart: boolean;
  notice: string | null;
  workers: boolean;
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

export interface ChatHead {
  state: ChatState;
  model: string;
  problem: string | null;
  command: string | null;
  takes_images: boolean;
  can_think: boolean;
}

export interface ChatImage {
  name: string;
  src: string;
}

export interface TurnStatus {
  ending: TurnEnding;
  problem: string | null;
  thought_s: number | null;
  left_out: number;
}

export interface ChatTurn {
  key: string;
  question: string;
  images: ChatImage[];
  answer: string;
  reasoning: string;
  status: TurnStatus;
}

export interface TurnGrowth {
  key: string;
  answer: string;
  reasoning: string;
  status: TurnStatus;
}

export interface ChatTalk {
  /** The revision that this adds to; 0: this is everything. */
  base: number;
  revision: number;
  keys: string[];
  turns: ChatTurn[];
  grown: TurnGrowth[];
}

export interface ChatFigures {
  rate: number | null;
  first_s: number | null;
  prompt: number | null;
  cached: number | null;
  output: number | null;
}

export interface ChatSettings {
  values: Record<string, string>;
  problems: Record<string, string>;
}

export interface ChatTraits {
  head: ChatHead;
  talk: ChatTalk;
  figures: ChatFigures;
  settings: ChatSettings;
}

export type AnswerState = "running" | "finished" | "stopped" | "error";
export type ShownPart = "answer" | "reasoning" | "tool" | "marker";

export interface AnswerBand {
  state: AnswerState;
  title: string;
  /** What goes on before the first token. */
  note: string;
  /** Alternatives that each token has. */
  k: number;
}

export interface TokenFigures {
  mean: number | null;
  perplexity: number | null;
  mean_bits: number | null;
  max_bits: number | null;
}

export interface Alternative {
  text: string;
  p: number;
}

export interface TokenItem {
  text: string;
  part: ShownPart;
  p: number;
  rank: number | null;
  bits: number;
  top: Alternative[];
}

export interface TokensTraits {
  answer: AnswerBand;
  figures: TokenFigures;
  /** All of them when Python sends them, at the latest at the end; in between they come as NewTokens. */
  tokens: TokenItem[];
}

/** The only message to the token view: tokens that follow the first `start` ones. */
export interface NewTokens {
  kind: "tokens";
  start: number;
  tokens: TokenItem[];
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

/** A question; the bytes of `images` travel as the message's buffers, in the same order. */
export interface ChatSend {
  kind: "chat_send";
  text: string;
  replaces: string | null;
  images: string[];
}

export interface ChatCommand {
  kind: "chat";
  action: ChatAction;
}

export interface ChatSet {
  kind: "chat_set";
  values: Record<string, string>;
}

/** A view that has missed tokens asks for all of them. */
export interface AllTokens {
  kind: "tokens";
}

/** What a view of any widget asks for. */
export type Asked = Abort | EngineCommand | JobCommand | AllTokens | ChatSend | ChatCommand | ChatSet;

export type Message = ViewChange | Asked;

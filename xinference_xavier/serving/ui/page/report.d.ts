// What the server answers: `stats/schema.py` describes the fields. And what the page makes of it.

type Hits = Record<Source, number>;
type ByName<T> = Record<string, T>;

interface Histogram {
  counts: number[];
}

interface Fetches {
  committed: number;
  rolled_back: ByName<number>;
}

interface Counters {
  hits: Hits;
  first_tokens: Record<Source, Histogram>;
  requests: number;
  seconds_saved: number;
  bytes_received: number;
  fetches: Fetches;
}

interface Sample extends Counters {
  time: number;
}

interface Pool {
  rows: number;
  ready: number;
  filling: number;
  pinned: number;
  quarantined: number;
  row_bytes: number;
  cache_rows: number;
  engines: number;
}

interface Disk {
  state: string; // empty without a disk
  problem: string;
  limit_bytes: number;
  rows: number;
}

interface Comparison {
  differing: number;
  peer: string;
  layer: string;
  amount: number;
  failed_audits: number;
}

interface Replica extends Counters {
  incarnation: string;
  replica: string;
  address: string;
  namespace: string;
  holdings?: number;
  stale: boolean;
  draining?: boolean;
  vllm: string | null;
  vllm_untested: boolean;
  from_environment: string[];
  prefill_tokens_per_s: number | null;
  received_from: ByName<number>;
  fetching: ByName<number>;
  fetch_decisions: { left_out: ByName<string> };
  pool: Pool;
  disk: Disk;
  comparison: Comparison;
  verdict: string;
  verdict_reason: string;
  transport: string | null;
}

interface FirstBytes {
  predicted: Histogram;
  actual: Histogram;
  error: Histogram;
}

interface Load {
  backlog_s: number;
  requests: number;
  accepts: boolean;
  role?: string;
}

interface RoutingReport {
  mode?: Routing | "";
  loads?: ByName<Load>;
  choices?: ByName<number>;
  waiting?: number;
  waited?: number;
  waited_s?: number;
  refused?: number;
  moved?: number;
  unrouted?: number;
  failed_prefills?: number;
  first_bytes?: ByName<FirstBytes>;
}

interface Prefix {
  name: string;
  state: string;
  reason: string;
  tokens: number;
  chunks: number;
  replicas: ByName<{ held: number }>;
  retention: string;
  expires: number;
}

interface Report {
  model_uid: string;
  enabled: boolean;
  replicas: Replica[];
  totals: Counters;
  tracker: { dropped: number };
  routing?: RoutingReport;
  prefixes?: Prefix[];
  prefix_states?: ByName<number>;
}

interface XavierEvent {
  event: string;
  time: number;
  [field: string]: string | number | boolean;
}

// Of one donor to one consumer: all bytes, bytes per second now, and rows under way.
interface Link {
  from: string;
  to: string;
  bytes: number;
  rate: number;
  rows: number;
}

type Series = Source | "bytes" | "committed" | "rolled_back";
type Rate = { time: number } & Partial<Record<Series, number | null>>;

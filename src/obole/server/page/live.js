// Live figures from /metrics, asked for each second: numbers, and three graphs of the last two minutes.

import { Failure, get, health } from "./api.js";
import { percent } from "./receipt.js";
import { SOURCES, inOrder } from "./sources.js";

const SPAN = 120; // seconds on a graph
const RECENT = 3; // seconds over which the pace is averaged
const LINE = /^([a-z_]+)(?:\{(.*)\})? (\S+)$/;
const STATES = { ok: "ready", draining: "shutting down", failed: "failed", gone: "not reachable" };

/** Prometheus' text as name -> [{labels, value}], leaving out histograms. */
export function parse(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const [, name, labels, value] = LINE.exec(line) ?? [];
    if (!name || name.endsWith("_bucket") || name.endsWith("_created")) continue;
    if (!found.has(name)) found.set(name, []);
    found.get(name).push({ labels: labels ?? "", value: Number(value) });
  }
  return found;
}

/** What the graphs need of it: {at, running, waiting, kv, tokens, accepted: by source, hits, queries, drafted}. `at`: ms. */
export function sampleOf(metrics, at) {
  const total = (name) => (metrics.get(`obole_${name}`) ?? []).reduce((sum, { value }) => sum + value, 0);
  const bySource = (name) => {
    const series = metrics.get(`obole_${name}`) ?? [];
    return Object.fromEntries([...SOURCES.keys()].map((source) => [source, series.find(({ labels }) => labels.includes(`source="${source}"`))?.value ?? 0]));
  };
  return {
    at,
    running: total("num_requests_running"),
    waiting: total("num_requests_waiting"),
    kv: total("kv_cache_usage_perc"),
    tokens: bySource("generation_tokens_total"),
    accepted: bySource("spec_decode_num_accepted_tokens_total"),
    drafted: total("spec_decode_num_draft_tokens_total"),
    hits: total("prefix_cache_hits_total"),
    queries: total("prefix_cache_queries_total"),
  };
}

const sum = (counts) => Object.values(counts).reduce((total, one) => total + one, 0);

/** Tokens per second over the last few samples. */
export function paceOf(samples) {
  const last = samples.at(-1);
  const first = samples.at(-1 - Math.min(RECENT, samples.length - 1));
  return !last || last === first ? 0 : (sum(last.tokens) - sum(first.tokens)) / ((last.at - first.at) / 1000);
}

/** The share of `part` in `whole` over all samples, or since the server's start where nothing happened; null where nothing ever did. */
function shareOf(samples, part, whole) {
  const [first, last] = [samples[0], samples.at(-1)];
  if (whole(last) > whole(first)) return (part(last) - part(first)) / (whole(last) - whole(first));
  return whole(last) > 0 ? part(last) / whole(last) : null;
}

const GRAPHS = [
  {
    name: "throughput",
    unit: "/s",
    parts: (now, before, time) => inOrder(now.tokens).map(([source, many]) => [source, (many - before.tokens[source]) / time]),
    says: (samples) => `${Math.round(paceOf(samples))} tokens/s`,
  },
  {
    name: "hits",
    unit: "",
    parts: (now, before) => {
      const hits = now.hits - before.hits;
      return [["device", hits], ["computed", now.queries - before.queries - hits]];
    },
    says: (samples) => shown(shareOf(samples, (s) => s.hits, (s) => s.queries)),
  },
  {
    name: "acceptance",
    unit: "",
    parts: (now, before) => {
      const accepted = inOrder(now.accepted).map(([source, many]) => [source, many - before.accepted[source]]);
      return [...accepted, ["computed", now.drafted - before.drafted - accepted.reduce((total, [, many]) => total + many, 0)]];
    },
    says: (samples) => shown(shareOf(samples, (s) => sum(s.accepted), (s) => s.drafted)),
  },
];

const shown = (share) => (share === null ? "–" : percent(share));

/** Bars, one for each pair of samples, the newest at the right. `bars`: {from, to: seconds ago, parts: [[colour name, height], ...]}. */
function draw(canvas, bars, unit) {
  const scale = window.devicePixelRatio;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  const style = getComputedStyle(canvas);
  const colour = (name) => style.getPropertyValue(`--${name}`);
  pen.scale(scale, scale);
  const most = Math.max(0, ...bars.map(({ parts }) => parts.reduce((total, [, tall]) => total + tall, 0)));
  const x = (ago) => width * (1 - ago / SPAN);
  pen.fillStyle = colour("line");
  pen.fillRect(0, height - 1, width, 1);
  for (const { from, to, parts } of bars) {
    let base = height - 1;
    for (const [name, tall] of parts) {
      const rise = most && (tall / most) * (height - 14);
      pen.fillStyle = colour(name);
      pen.fillRect(x(from), base - rise, Math.max(2, x(to) - x(from)), rise);
      base -= rise;
    }
  }
  pen.fillStyle = colour("muted");
  pen.font = `10px ${style.fontFamily}`;
  if (most) pen.fillText(`${Math.round(most).toLocaleString("en")}${unit}`, 0, 9);
}

export class Live {
  /** `key` gives the API key of the moment; `find` gives elements by id. */
  constructor(key, find) {
    this._key = key;
    this._find = find;
    this._samples = [];
    this._beats = 0;
  }

  start() {
    this.refresh();
    setInterval(() => document.hidden || this.refresh(), 1000);
  }

  /** Ask now. */
  async refresh() {
    if (this._beats++ % 3 === 0) this._showHealth(await health());
    try {
      const text = await (await get("metrics", this._key())).text();
      this._take(sampleOf(parse(text), performance.now()));
      this._trouble("");
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      this._trouble(error.status === 401 ? "Live figures need the API key." : error.message);
    }
  }

  _take(sample) {
    const before = this._samples.at(-1);
    if (before && sum(sample.tokens) < sum(before.tokens)) this._samples = []; // the server was started anew
    this._samples.push(sample);
    while (this._samples[0].at < sample.at - 1000 * (SPAN + 1)) this._samples.shift();
    this._find("running").textContent = sample.running;
    this._find("waiting").textContent = sample.waiting;
    this._find("kv").textContent = percent(sample.kv);
    this._find("pace").textContent = GRAPHS[0].says(this._samples);
    for (const { name, unit, parts, says } of GRAPHS) {
      this._find(name).textContent = says(this._samples);
      const bars = this._samples.slice(1).map((now, place) => {
        const last = this._samples[place];
        return { from: (sample.at - last.at) / 1000, to: (sample.at - now.at) / 1000, parts: parts(now, last, (now.at - last.at) / 1000) };
      });
      draw(this._find(`graph-${name}`), bars, unit);
    }
  }

  _showHealth(state) {
    const element = this._find("health");
    element.dataset.state = state;
    element.firstChild.textContent = STATES[state] ?? state;
  }

  _trouble(message) {
    const element = this._find("trouble");
    if (element.textContent !== message) element.textContent = message;
    element.hidden = !message;
  }
}

// The receipt of an answer: what the server measured, as lines.

import { bar, fill, inOrder, make } from "./sources.js";

const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export const count = (number, noun) => `${whole.format(number)} ${noun}${number === 1 ? "" : noun.endsWith("s") ? "es" : "s"}`;
export const percent = (share) => `${Math.round(100 * share)} %`;

export function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  for (; bytes >= 999.5 && place < units.length - 1; place++) bytes /= 1000;
  return `${short.format(bytes)} ${units[place]}`;
}

export function seconds(time) {
  if (time >= 0.0995) return `${time.toFixed(time < 9.995 ? 2 : 1)} s`;
  return `${(1000 * time).toFixed(time < 0.00995 ? 1 : 0)} ms`;
}

/** "$1.25"; below a cent, cents: "0.00272 ¢". */
export function money(dollars) {
  return dollars === 0 || dollars >= 0.00995 ? `$${dollars.toFixed(2)}` : `${new Intl.NumberFormat("en", { maximumSignificantDigits: 3, maximumFractionDigits: 20 }).format(100 * dollars)} ¢`;
}

const sum = (counts) => Object.values(counts).reduce((total, one) => total + one, 0);

/** Tokens per second of the answer; its first token belongs to the prompt's time. Null where there is nothing to divide. */
export function speed(receipt) {
  return receipt.output_tokens > 1 && receipt.decode_seconds > 0 ? (receipt.output_tokens - 1) / receipt.decode_seconds : null;
}

/** Dollars for the time that the machine worked on the answer, as if on nothing else. `rate`: dollars an hour. */
export function price(receipt, rate) {
  return ((receipt.prefill_seconds + receipt.decode_seconds) * rate) / 3600;
}

const WHERE = { device: "on device", ram: "in RAM", ssd: "on SSD" };

/** [tier, tokens] of the prompt, those of the device also where there are none. */
function cachedBy(receipt) {
  const tiers = Object.keys(receipt.cached_by_tier).length ? receipt.cached_by_tier : { device: receipt.cached_tokens };
  return Object.keys(WHERE).map((tier) => [tier, tiers[tier] ?? 0]).filter(([tier, many]) => many || tier === "device");
}

/** Lines of the receipt: {label, value, note, swatch, part}. `rate`: dollars an hour, null for no price. */
export function lines(receipt, rate) {
  const made = [
    { label: "prompt", value: count(receipt.prompt_tokens, "token") },
    ...cachedBy(receipt).map(([tier, many]) => ({ label: `cached ${WHERE[tier]}`, value: whole.format(many), swatch: tier, part: true })),
    { label: "computed", value: whole.format(receipt.computed_tokens), swatch: "computed", part: true },
    { label: "answer", value: count(receipt.output_tokens, "token") },
    ...inOrder(receipt.sources).filter(([, many]) => many).map(([source, many]) => ({ label: source, value: whole.format(many), swatch: source, part: true })),
    { label: "forward passes", value: whole.format(receipt.forward_passes), note: each(receipt.output_tokens, receipt.forward_passes, "tokens a pass") },
  ];
  const drafted = sum(receipt.drafted);
  if (drafted) {
    const rejected = sum(receipt.rejected);
    made.push({ label: "drafted", value: count(drafted, "token"), note: `${whole.format(rejected)} rejected` });
  }
  if (receipt.acceptance === "lossy") made.push({ label: "lossy", value: `${whole.format(receipt.confidences.length)} unverified`, note: `confidence ${short.format(Math.min(...receipt.confidences))} at least` });
  const bytes = receipt.weight_bytes + receipt.kv_bytes;
  made.push({ label: "memory read", value: receipt.output_tokens ? `${size(bytes / receipt.output_tokens)} a token` : size(bytes), note: `weights ${size(receipt.weight_bytes)}, KV ${size(receipt.kv_bytes)}` });
  if (receipt.preemptions) made.push({ label: "preempted", value: count(receipt.preemptions, "time"), note: `${count(receipt.recomputed_tokens, "token")} recomputed` });
  made.push({ label: "time", value: seconds(receipt.total_seconds), note: `queue ${seconds(receipt.queued_seconds)}, prompt ${seconds(receipt.prefill_seconds)}, answer ${seconds(receipt.decode_seconds)}` });
  const pace = speed(receipt);
  if (pace) made.push({ label: "speed", value: `${short.format(pace)} tokens/s` });
  if (drafted) made.push({ label: receipt.saved_seconds < 0 ? "lost to drafts" : "saved by drafts", value: `about ${seconds(Math.abs(receipt.saved_seconds))}` });
  if (rate !== null) {
    const cost = price(receipt, rate);
    made.push({ label: "price", value: money(cost), note: `at ${money(rate)} an hour${receipt.output_tokens ? `, ${money((1e6 * cost) / receipt.output_tokens)} a million tokens` : ""}` });
  }
  return made;
}

function each(amount, among, unit) {
  return among ? `${short.format(amount / among)} ${unit}` : "";
}

/** What the folded receipt says. */
export function summary(receipt, rate) {
  const pace = speed(receipt);
  const parts = [count(receipt.output_tokens, "token")];
  if (pace) parts.push(`${short.format(pace)} tokens/s`);
  parts.push(`${percent(receipt.output_tokens ? 1 - (receipt.sources.model ?? 0) / receipt.output_tokens : 0)} drafted`);
  if (receipt.prompt_tokens) parts.push(`${percent(receipt.cached_tokens / receipt.prompt_tokens)} of the prompt cached`);
  if (rate !== null) parts.push(money(price(receipt, rate)));
  return parts;
}

/** The receipt on the page. While the answer comes it counts; `settle` fills it in. */
export class ReceiptView {
  constructor() {
    this.element = make("details", "receipt");
    this.element.hidden = true;
    this._summary = this.element.appendChild(make("summary"));
    this._bar = this._summary.appendChild(bar([]));
    this._said = this._summary.appendChild(make("span", "said"));
    this._lines = this.element.appendChild(make("dl", "lines"));
    this._receipt = null;
    this._summary.addEventListener("click", (event) => this._receipt || event.preventDefault());
  }

  /** `counts`: tokens by source so far. */
  counting(counts, tokens, elapsed) {
    this.element.hidden = tokens === 0;
    fill(this._bar, inOrder(counts));
    const pace = tokens > 1 && elapsed > 0 ? (tokens - 1) / elapsed : null;
    this._say(pace ? [count(tokens, "token"), `${short.format(pace)} tokens/s`] : [count(tokens, "token")]);
  }

  settle(receipt, rate) {
    this._receipt = receipt;
    this.element.hidden = false;
    this.element.classList.add("settled");
    fill(this._bar, inOrder(receipt.sources));
    this.price(rate);
  }

  /** Price it anew. */
  price(rate) {
    if (!this._receipt) return;
    this._say(summary(this._receipt, rate));
    this._lines.replaceChildren(...lines(this._receipt, rate).map(lineElement));
  }

  _say(parts) {
    this._said.replaceChildren(...parts.map((part) => make("span", "", part)));
  }
}

function lineElement({ label, value, note = "", swatch = "", part = false }) {
  const element = make("div", part ? "part" : "");
  const term = element.appendChild(make("dt"));
  if (swatch) term.append(make("i", `swatch ${swatch}`));
  term.append(label);
  element.append(make("span", "dots"));
  const told = element.appendChild(make("dd"));
  if (note) told.append(make("small", "", note));
  told.append(make("b", "", value));
  return element;
}

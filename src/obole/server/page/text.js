// The text of an answer: which token each piece belongs to, and where its Markdown is. Pure functions and plain data.

const encoder = new TextEncoder();
const AHEAD = 64; // bytes of tokens without a place in the text, such as names of control tokens, that are passed over

/** Text that arrives beside its tokens, which may be ahead of it. `pieces`: {start, end, source ("": not known), probability}, in order. */
export class TokenText {
  constructor() {
    this.text = "";
    this.pieces = [];
    this.counts = {}; // tokens by source, whether they have text or not
    this._bytes = []; // of tokens whose text is still to come
    this._owners = []; // the token of each of these bytes
  }

  get tokens() {
    return Object.values(this.counts).reduce((sum, count) => sum + count, 0);
  }

  /** `sources`: of the new tokens; `spellings`: {bytes, logprob} of each, or nothing where they are not known. */
  push(text, sources, spellings) {
    for (const source of sources) this.counts[source] = (this.counts[source] ?? 0) + 1;
    if (sources.length && !spellings.length) {
      // which token ends where is not known: one piece, of no source in particular where they differ
      if (text) this._append(text, { source: new Set(sources).size === 1 ? sources[0] : "", probability: null });
      return;
    }
    sources.forEach((source, place) => {
      const owner = { source, probability: Math.exp(spellings[place].logprob) };
      for (const byte of spellings[place].bytes) {
        this._bytes.push(byte);
        this._owners.push(owner);
      }
    });
    for (const character of text) this._append(character, this._take(encoder.encode(character)));
  }

  _append(text, owner) {
    const start = this.text.length;
    this.text += text;
    const last = this.pieces.at(-1);
    if (last && (owner === null || last.owner === owner)) last.end = this.text.length;
    else this.pieces.push({ start, end: this.text.length, owner, source: owner?.source ?? "", probability: owner?.probability ?? null });
  }

  /** The token that the next bytes of the text belong to; null where no token has them (damaged characters). */
  _take(wanted) {
    const most = Math.min(AHEAD, this._bytes.length - wanted.length);
    for (let skip = 0; skip <= most; skip++) {
      if (wanted.every((byte, place) => this._bytes[skip + place] === byte)) {
        const owner = this._owners[skip];
        this._bytes.splice(0, skip + wanted.length);
        this._owners.splice(0, skip + wanted.length);
        return owner;
      }
    }
    return this._owners[0] ?? null;
  }
}

export const BOLD = 1;
export const ITALIC = 2;
export const CODE = 4;
export const MARK = 8; // characters that only mean something to Markdown

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`\n]*)$/;
const KINDS = [
  ["heading", /^(#{1,6}) +/],
  ["quote", /^> ?/],
  ["item", /^(?:\s{0,12})(?:[-*+]|\d{1,3}[.)])\s+/],
  ["row", /^\s*\|.*\|\s*$/],
  ["gap", /^\s*$/],
];

/** Blocks of Markdown from `from` on: {kind, start, end, level}. They cover the text without gaps; only the last can still change. */
export function blocksOf(text, from = 0) {
  const blocks = [];
  let fence = null;
  for (let start = from; start < text.length; ) {
    const newline = text.indexOf("\n", start);
    const end = newline < 0 ? text.length : newline + 1;
    const line = text.slice(start, end).replace(/\n$/, "");
    const open = FENCE.exec(line);
    const last = blocks.at(-1);
    if (fence) {
      last.end = end;
      if (open && open[1].startsWith(fence) && !open[2].trim()) fence = null;
    } else if (open) {
      fence = open[1];
      blocks.push({ kind: "code", start, end, level: 0 });
    } else {
      const kind = KINDS.find(([, pattern]) => pattern.test(line))?.[0] ?? "text";
      if (kind === "text" && last?.kind === "text") last.end = end;
      else blocks.push({ kind, start, end, level: levelOf(kind, line) });
    }
    start = end;
  }
  return blocks;
}

function levelOf(kind, line) {
  if (kind === "heading") return /^#+/.exec(line)[0].length;
  return kind === "item" ? Math.min(4, Math.floor(/^\s*/.exec(line)[0].length / 2)) : 0;
}

/** Flags (BOLD, ITALIC, ...) of each UTF-16 unit of a block. */
export function stylesOf(text, { kind, start, end }) {
  const block = text.slice(start, end);
  const styles = new Uint8Array(block.length);
  if (kind === "code") markFences(block, styles);
  else if (kind !== "row") markInline(block, styles, prefixOf(kind, block, styles));
  return styles;
}

function markFences(block, styles) {
  const first = block.indexOf("\n");
  styles.fill(MARK, 0, first < 0 ? block.length : first + 1);
  const body = block.replace(/\n$/, "");
  const last = body.lastIndexOf("\n") + 1;
  if (last > 0 && FENCE.test(body.slice(last))) styles.fill(MARK, last);
}

/** The length of what makes the block what it is. Numbers and dashes of lists stay in sight, the rest is marked. */
function prefixOf(kind, block, styles) {
  const pattern = KINDS.find(([name]) => name === kind)?.[1];
  const length = kind === "gap" ? 0 : (pattern?.exec(block)?.[0].length ?? 0);
  if (kind === "heading" || kind === "quote") styles.fill(MARK, 0, length);
  return length;
}

/** Code, bold and italic. One pass; delimiters that find no partner stay text (after CommonMark 0.31, simplified). */
function markInline(block, styles, from) {
  const runs = [...block.matchAll(/`+|\*{1,3}|_{1,3}/g)].filter((run) => run.index >= from);
  const ticks = partners(runs);
  const open = new Map(); // delimiter -> where it was opened, innermost last
  for (let place = 0; place < runs.length; place++) {
    const [mark] = runs[place];
    const start = runs[place].index;
    const end = start + mark.length;
    if (mark[0] === "`") {
      const partner = ticks.get(place);
      if (partner === undefined) continue;
      const close = runs[partner].index;
      cover(styles, start, end, close, close + mark.length, CODE);
      place = partner;
      continue;
    }
    const before = block[start - 1] ?? " ";
    const after = block[end] ?? " ";
    const inWord = mark[0] === "_" && /\w/.test(before) && /\w/.test(after);
    if (open.has(mark) && /\S/.test(before) && !inWord) {
      const [from, to] = open.get(mark);
      cover(styles, from, to, start, end, [ITALIC, BOLD, BOLD | ITALIC][mark.length - 1]);
      for (const [other, [begun]] of [...open]) if (begun >= from) open.delete(other);
    } else if (/\S/.test(after) && !inWord) {
      open.set(mark, [start, end]);
    }
  }
}

/** For each run of backticks, the next one of the same length. */
function partners(runs) {
  const found = new Map();
  const next = new Map();
  for (let place = runs.length - 1; place >= 0; place--) {
    const [mark] = runs[place];
    if (mark[0] !== "`") continue;
    if (next.has(mark.length)) found.set(place, next.get(mark.length));
    next.set(mark.length, place);
  }
  return found;
}

function cover(styles, start, end, close, after, flag) {
  for (let i = end; i < close; i++) styles[i] |= flag;
  for (let i = start; i < end; i++) styles[i] |= MARK;
  for (let i = close; i < after; i++) styles[i] |= MARK;
}

/** A block cut where the token or the style changes: {start, end, style, piece}, `piece` being a place in `pieces`. */
export function runsOf(text, pieces, block, firstPiece = 0) {
  const styles = stylesOf(text, block);
  const runs = [];
  let piece = firstPiece;
  for (let start = block.start; start < block.end; ) {
    while (pieces[piece].end <= start) piece++;
    const style = styles[start - block.start];
    const most = Math.min(block.end, pieces[piece].end);
    let end = start + 1;
    while (end < most && styles[end - block.start] === style) end++;
    runs.push({ start, end, style, piece });
    start = end;
  }
  return runs;
}

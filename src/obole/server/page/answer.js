// One answer on the page: its text as it comes, token by token, then its receipt, or what went wrong.

import { ReceiptView } from "./receipt.js";
import { make } from "./sources.js";
import { BOLD, CODE, ITALIC, MARK, TokenText, blocksOf, runsOf } from "./text.js";

const STYLES = [[BOLD, "bold"], [ITALIC, "italic"], [CODE, "mono"], [MARK, "mark"]];

export class Answer {
  /** `changed` is called after each change of what is shown. */
  constructor(changed) {
    this.element = make("article", "answer");
    this.element.setAttribute("aria-label", "Answer");
    this._body = this.element.appendChild(make("div", "text coming"));
    this._notice = this.element.appendChild(make("div", "notice"));
    this._receipt = new ReceiptView();
    this.element.append(this._receipt.element);
    this.actions = this.element.appendChild(make("div", "actions"));
    this._changed = changed;
    this._content = new TokenText();
    this._open = null; // the last block: {block, element, runs, piece: its first}
    this._frame = 0;
    this._first = null; // when the first token came, ms
    this._last = null;
    this.failed = false;
  }

  get text() {
    return this._content.text;
  }

  /** Take a chunk of the stream. */
  push(chunk) {
    const [choice] = chunk.choices;
    const sources = chunk.obole?.sources ?? [];
    if (!choice || (!choice.delta.content && !sources.length)) return;
    this._last = performance.now();
    this._first ??= this._last;
    this._content.push(choice.delta.content ?? "", sources, choice.logprobs?.content ?? []);
    this._frame ||= requestAnimationFrame(() => this._show());
  }

  /** The answer is complete. `rate`: dollars an hour or null. */
  finish(receipt, reason, rate) {
    this._end();
    if (receipt) this._receipt.settle(receipt, rate);
    if (reason === "length") this._note("The answer was cut off at its limit of tokens.");
    if (!this.text && reason === "stop") this._note("The model had nothing to say.");
    this._changed();
  }

  stop() {
    this._end();
    this._note("Stopped. What came before is kept; a receipt is made for complete answers only.");
    this._changed();
  }

  /** `more`: buttons that go with the message. */
  fail(message, ...more) {
    this._end();
    this.failed = true;
    const box = make("div", "error");
    box.setAttribute("role", "alert");
    box.append(make("p", "", message), ...more);
    this._notice.replaceChildren(box);
    this._changed();
  }

  price(rate) {
    this._receipt.price(rate);
  }

  /** What is known of the token under an element: {source, probability, text}. */
  tokenAt(element) {
    const piece = this._content.pieces[element.dataset.token];
    return piece && { ...piece, text: this.text.slice(piece.start, piece.end) };
  }

  _note(text) {
    this._notice.replaceChildren(make("p", "", text));
  }

  _end() {
    cancelAnimationFrame(this._frame);
    this._show();
    this._body.classList.remove("coming");
  }

  _show() {
    this._frame = 0;
    const { text, pieces, counts, tokens } = this._content;
    for (const block of blocksOf(text, this._open?.block.start ?? 0)) this._showBlock(block, text, pieces);
    this._receipt.counting(counts, tokens, (this._last - this._first) / 1000);
    this._changed();
  }

  _showBlock(block, text, pieces) {
    const before = this._open;
    const again = before?.block.start === block.start;
    if (again && before.block.kind === block.kind) {
      before.block = block;
    } else {
      if (again) before.element.remove(); // it turned out to be something else
      const element = this._body.appendChild(make("div", `block ${block.kind}`));
      if (block.level) element.dataset.level = block.level;
      if (block.kind === "code") element.append(copyButton(element));
      const piece = again ? before.piece : (before?.runs.at(-1)?.piece ?? 0);
      this._open = { block, element, runs: [], piece };
    }
    this._drawRuns(runsOf(text, pieces, block, this._open.piece), text, pieces);
  }

  /** Bring the elements of the open block up to date; what did not change stays. */
  _drawRuns(runs, text, pieces) {
    const { element, block, runs: before } = this._open;
    const others = block.kind === "code" ? 1 : 0; // its button
    let kept = 0;
    while (kept < runs.length && kept < before.length && sameRun(runs[kept], before[kept])) kept++;
    while (element.childNodes.length > kept + others) element.lastChild.remove();
    for (const run of runs.slice(kept)) {
      const span = make("span", `token ${pieces[run.piece].source}`, text.slice(run.start, run.end));
      for (const [flag, name] of STYLES) if (run.style & flag) span.classList.add(name);
      span.dataset.token = run.piece;
      element.append(span);
    }
    this._open.runs = runs;
  }
}

function sameRun(one, other) {
  return one.start === other.start && one.end === other.end && one.style === other.style && one.piece === other.piece;
}

/** Copies the code of a block, without its fences. */
function copyButton(block) {
  const button = make("button", "copy", "Copy");
  button.type = "button";
  button.addEventListener("click", () => {
    const code = [...block.querySelectorAll(".token:not(.mark)")].map((token) => token.textContent).join("");
    copy(code, button);
  });
  return button;
}

/** Put a text on the clipboard and say so on the button. */
export async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed here";
  }
  setTimeout(() => (button.textContent = before), 1500);
}

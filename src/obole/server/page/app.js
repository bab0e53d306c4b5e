// The page: a conversation, its keys and buttons.

import { Answer, copy } from "./answer.js";
import { Failure, complete, get } from "./api.js";
import { Live } from "./live.js";
import { Settings } from "./settings.js";
import { SOURCES, make } from "./sources.js";
import { percent } from "./receipt.js";

const find = (id) => document.getElementById(id);
const input = find("input");
const EXAMPLES = [
  "Explain in three sentences why the sky is blue.",
  "Write a Python function that counts the words of a text. Then write it again with type hints.",
  "List the planets of the solar system with one fact for each. Then repeat the list.",
];

/** Turns: {prompt, element, answer}, `answer` being the view of what was said to it. */
const turns = [];
let running = null; // the AbortController of the answer that is coming
let editing = false; // the next message takes the place of the last
let reached = true; // the end of the conversation is in sight, and is to stay so
let modelKey = null; // the API key that the list of models was asked for with

const settings = new Settings(find("form"), find("settings"), () => {
  for (const { answer } of turns) answer.price(settings.rate);
  if (settings.key !== modelKey) showModels();
  live.refresh();
});
const live = new Live(() => settings.key, find);

/* The conversation */

function messages(upTo) {
  const said = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  for (const { prompt, answer } of turns.slice(0, upTo)) {
    if (answer.text) said.push({ role: "user", content: prompt }, { role: "assistant", content: answer.text });
  }
  return [...said, { role: "user", content: turns[upTo].prompt }];
}

function send(prompt) {
  if (!prompt.trim() || running || !settings.check()) return;
  if (editing) turns.pop().element.remove();
  edit(false);
  const element = find("log").appendChild(make("div", "turn"));
  const said = element.appendChild(make("article", "said-by-you"));
  said.setAttribute("aria-label", "You");
  said.append(make("p", "", prompt));
  turns.push({ prompt, element, answer: null });
  input.value = "";
  grow();
  reached = true;
  ask();
}

/** Have the last message answered, again if it has been. */
async function ask() {
  const turn = turns.at(-1);
  turn.answer?.element.remove();
  const answer = (turn.answer = new Answer(follow));
  turn.element.append(answer.element);
  const controller = (running = new AbortController());
  show();
  try {
    const body = { ...settings.request(), messages: messages(turns.length - 1) };
    if (find("tint").checked) body.logprobs = true; // they come with the bytes of each token: where it ends
    if (!find("models").hidden) body.model = find("models").value;
    let [receipt, reason] = [null, null];
    for await (const chunk of complete(body, settings.key, controller.signal)) {
      answer.push(chunk);
      receipt = chunk.obole?.receipts?.[0] ?? receipt;
      reason = chunk.choices[0]?.finish_reason ?? reason;
    }
    answer.finish(receipt, reason, settings.rate);
    announce("The answer is complete.");
  } catch (error) {
    if (error.name === "AbortError") answer.stop();
    else failed(answer, error);
  } finally {
    running = null;
    addActions(turn);
    show();
  }
}

function failed(answer, error) {
  if (!(error instanceof Failure)) console.error(error);
  const wait = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  const buttons = [button("Retry", retry)];
  if (error.status === 401) buttons.push(button("Enter the API key", () => openPanel("key")));
  answer.fail(error.message + wait, ...buttons);
}

function retry() {
  if (!running && settings.check()) ask();
}

function stop() {
  running?.abort();
}

function startAnew() {
  stop();
  turns.length = 0;
  find("log").replaceChildren();
  edit(false);
  show();
  input.focus();
}

function edit(on) {
  if (on && (running || !turns.length)) return;
  if (on) input.value = turns.at(-1).prompt;
  else if (editing) input.value = "";
  editing = on;
  find("editing").hidden = !on;
  document.body.classList.toggle("editing", on);
  grow();
  if (on) {
    input.focus();
    input.setSelectionRange(input.value.length, input.value.length);
  }
}

/* What is on the page besides */

function button(label, act) {
  const element = make("button", "", label);
  element.type = "button";
  element.addEventListener("click", () => act(element));
  return element;
}

/** Buttons below an answer; retry and edit belong to the last one only, which the style sheet sees to. */
function addActions({ answer }) {
  const retryButton = button("Retry", retry);
  const editButton = button("Edit message", () => edit(true));
  retryButton.className = editButton.className = "of-last";
  if (answer.text) answer.actions.append(button("Copy", (element) => copy(answer.text, element)));
  if (!answer.failed) answer.actions.append(retryButton);
  answer.actions.append(editButton);
}

function show() {
  find("welcome").hidden = turns.length > 0;
  find("fresh").hidden = turns.length === 0;
  find("send").hidden = Boolean(running);
  find("stop").hidden = !running;
  find("log").setAttribute("aria-busy", String(Boolean(running)));
  find("tip").hidden = true;
  follow();
}

/** Keep the end in sight if it was. */
function follow() {
  const scroll = find("scroll");
  if (reached) scroll.scrollTop = scroll.scrollHeight;
  find("latest").hidden = reached;
}

function announce(text) {
  find("announce").textContent = text;
}

function grow() {
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight, window.innerHeight / 3)}px`;
}

function openPanel(field) {
  togglePanel(true);
  settings.open(field);
}

function togglePanel(open) {
  document.body.classList.toggle("closed", !open);
  document.body.classList.toggle("opened", open);
  find("toggle").setAttribute("aria-expanded", String(open));
}

async function showModels() {
  modelKey = settings.key;
  try {
    const names = (await (await get("v1/models", modelKey)).json()).data.map(({ id }) => id);
    find("model").textContent = names[0];
    find("model").hidden = names.length > 1;
    find("models").hidden = names.length < 2;
    find("models").replaceChildren(...names.map((name) => make("option", "", name)));
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    modelKey = null; // ask again with the next change
  }
}

function showLegend() {
  for (const [source, meaning] of SOURCES) {
    const entry = find("legend").appendChild(make("li"));
    entry.append(make("i", `swatch ${source}`), make("b", "", source), make("span", "", meaning));
  }
}

/* The token under the pointer */

function point(event) {
  const tip = find("tip");
  const token = event.target.closest?.(".token");
  const answer = token && turns.find(({ answer }) => answer?.element.contains(token))?.answer;
  const piece = answer?.tokenAt(token);
  tip.hidden = !piece;
  if (!piece) return;
  const chance = piece.probability === null ? "" : `probability ${piece.probability < 0.001 ? "below 0.1 %" : percent(piece.probability)}`;
  tip.replaceChildren(make("i", `swatch ${piece.source}`), make("b", "", piece.source || "several sources"), make("code", "", JSON.stringify(piece.text)), make("span", "", chance));
  const box = token.getClientRects()[0];
  tip.style.left = `${Math.max(8, Math.min(box.left, window.innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${box.top - tip.offsetHeight - 6 > 0 ? box.top - tip.offsetHeight - 6 : box.bottom + 6}px`;
}

/* Keys and clicks */

function onKey(event) {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    send(input.value);
  } else if (event.key === "ArrowUp" && !input.value && !editing) {
    event.preventDefault();
    edit(true);
  }
}

function start() {
  input.addEventListener("keydown", onKey);
  input.addEventListener("input", grow);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.isComposing) return;
    if (running) stop();
    else if (editing) edit(false);
  });
  find("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send(input.value);
  });
  find("stop").addEventListener("click", () => {
    stop();
    input.focus();
  });
  find("fresh").addEventListener("click", startAnew);
  find("toggle").addEventListener("click", () => togglePanel(find("toggle").getAttribute("aria-expanded") === "false"));
  find("scroll").addEventListener("scroll", ({ target }) => {
    reached = target.scrollHeight - target.scrollTop - target.clientHeight < 40;
    find("latest").hidden = reached;
    find("tip").hidden = true;
  });
  find("latest").addEventListener("click", () => {
    reached = true;
    follow();
  });
  find("log").addEventListener("pointerover", point);
  find("log").addEventListener("pointerleave", () => (find("tip").hidden = true));
  find("log").addEventListener("toggle", follow, true); // a receipt that opens at the end stays in sight
  find("tint").addEventListener("change", ({ target }) => document.body.classList.toggle("plain", !target.checked));
  find("examples").append(...EXAMPLES.map((text) => button(text, () => send(text))));
  togglePanel(window.matchMedia("(min-width: 60em)").matches);
  showLegend();
  showModels();
  show();
  live.start();
}

start();

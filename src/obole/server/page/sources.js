// Where tokens come from: names as the server has them, and what they mean.

export const SOURCES = new Map([
  ["model", "the model's own pass"],
  ["lookup", "earlier in this chat"],
  ["memory", "earlier chats"],
  ["prediction", "the expected answer"],
  ["forced", "all that the format allows"],
  ["draft", "a smaller model's guess"],
  ["mtp", "the model's own foresight"],
]);

/** An element with a class and text. */
export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

/** A bar whose parts are as long as the numbers of `amounts` ([class, number], ...). */
export function bar(amounts) {
  const element = make("div", "bar");
  element.setAttribute("aria-hidden", "true");
  fill(element, amounts);
  return element;
}

/** The same bar with other numbers. */
export function fill(element, amounts) {
  const shown = amounts.filter(([, amount]) => amount > 0);
  while (element.children.length > shown.length) element.lastChild.remove();
  shown.forEach(([name, amount], place) => {
    const part = element.children[place] ?? element.appendChild(make("i"));
    part.className = `swatch ${name}`;
    part.style.flexGrow = amount;
  });
}

/** [source, count] in the order of the legend. */
export function inOrder(counts) {
  return [...SOURCES.keys()].map((source) => [source, counts[source] ?? 0]);
}

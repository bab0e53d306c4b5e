// The settings form. All of it is kept in this browser but for the API key, which is forgotten with the tab.

const PLACE = "obole.settings";
const KEY_PLACE = "obole.key";
const NUMBERS = ["temperature", "max_tokens"];

/** Values of a store, or nothing where the browser keeps none. */
function read(store, place) {
  try {
    return window[store].getItem(place);
  } catch {
    return null;
  }
}

function write(store, place, value) {
  try {
    window[store].setItem(place, value);
  } catch {
    // private windows may refuse: the settings then last as long as the page
  }
}

export class Settings {
  /** `changed` is called when anything has. */
  constructor(form, panel, changed) {
    this._form = form;
    this._panel = panel;
    this._fields = [...form.elements].filter((field) => field.name);
    const kept = JSON.parse(read("localStorage", PLACE) ?? "{}");
    for (const field of this._fields) field.value = field.name === "key" ? (read("sessionStorage", KEY_PLACE) ?? "") : (kept[field.name] ?? "");
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("change", () => {
      this._keep();
      changed();
    });
  }

  get key() {
    return this._value("key").trim();
  }

  /** Dollars an hour; null for no prices. */
  get rate() {
    const field = this._form.elements.rate;
    return field.value && field.validity.valid ? Number(field.value) : null;
  }

  get system() {
    return this._value("system");
  }

  /** Fields of a request. What is not set is left to the server. */
  request() {
    const made = {};
    for (const name of NUMBERS) if (this._value(name)) made[name] = Number(this._value(name));
    if (this._value("speculate")) made.speculate = this._value("speculate");
    if (this._value("prediction")) made.prediction = { type: "content", content: this._value("prediction") };
    return made;
  }

  /** Whether everything is filled in properly; shows what is not. */
  check() {
    if (this._form.checkValidity()) return true;
    this.open();
    this._form.reportValidity();
    return false;
  }

  open(name) {
    this._panel.open = true;
    if (name) this._form.elements[name].focus();
  }

  _value(name) {
    return this._form.elements[name].value;
  }

  _keep() {
    const kept = Object.fromEntries(this._fields.filter(({ name }) => name !== "key").map(({ name, value }) => [name, value]));
    write("localStorage", PLACE, JSON.stringify(kept));
    write("sessionStorage", KEY_PLACE, this.key);
  }
}

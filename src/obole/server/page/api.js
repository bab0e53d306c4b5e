// The server's API, as far as the page needs it.

/** What went wrong, in a sentence for the reader. `status`: 0 where there was no answer at all. */
export class Failure extends Error {
  constructor(message, { status = 0, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

function headersFor(key) {
  if (/[^\x21-\x7e]/.test(key)) throw new Failure("The API key has a character that no key has: enter it anew.", { status: 401 });
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function reach(path, options) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server cannot be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const told = await response.json().catch(() => null);
  const message = told?.error?.message ?? `The server answered with status ${response.status}.`;
  return new Failure(message, { status: response.status, retryAfter: response.headers.get("retry-after") });
}

/** A response to GET. Throws `Failure` for anything but success. */
export function get(path, key = "") {
  return reach(path, { headers: headersFor(key), signal: AbortSignal.timeout(10000) });
}

/** The state of the server: "ok", "draining", "failed", or "gone" where nothing answers. */
export async function health() {
  try {
    return (await (await fetch("health", { cache: "no-store", signal: AbortSignal.timeout(5000) })).json()).status;
  } catch {
    return "gone";
  }
}

/** The chunks of a chat completion as they come. Throws `Failure`; AbortError once `signal` has fired. */
export async function* complete(body, key, signal) {
  const response = await reach("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headersFor(key) },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Failure(chunk.error.message);
    yield chunk;
  }
  throw new Failure("The connection ended before the answer was complete.");
}

/** The data of server-sent events. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await read(reader);
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The connection broke before the answer was complete.");
  }
}

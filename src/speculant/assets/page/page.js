// The page of a server: a prompt, its tokens in colours, and the figures of the engine. It uses the server's public routes alone.

const element = (id) => document.getElementById(id);
const LENGTHS = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16];
const WINDOW_MS = 1000; // over which the speed now is taken
const POLL_MS = 1000;

const state = { model: null, messages: [], running: null };

// Requests.

function headers() {
  const key = element("api-key").value.trim();
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

async function call(path, body, signal) {
  const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
  const response = await fetch(path, { ...options, headers: headers(), signal });
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  const error = new Error(answer?.error?.message ?? `The server answered ${response.status}.`);
  throw Object.assign(error, { status: response.status });
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (waiting + value).split("\n");
    waiting = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const chunk = JSON.parse(line.slice("data: ".length));
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

// Settings.

const mode = () => document.querySelector("input[name=mode]:checked").value;

function speculation(on) {
  if (!on) return { speculation: false };
  const length = element("length").value;
  return length ? { speculation: { num_speculative_tokens: Number(length) } } : {};
}

function settings(on, salt) {
  return {
    model: state.model,
    stream: true,
    max_tokens: element("tokens").valueAsNumber,
    temperature: element("temperature").valueAsNumber,
    seed: element("seed").valueAsNumber,
    speculant: { tokens: true },
    ...(salt && { cache_salt: salt }),
    ...speculation(on),
  };
}

// Output.

function show(parent, text, kind) {
  const output = element("output");
  const follows = output.scrollHeight - output.scrollTop - output.clientHeight < 40;
  const span = document.createElement("span");
  span.className = kind;
  span.textContent = text;
  parent.append(span);
  if (follows) output.scrollTop = output.scrollHeight;
}

function heading(text) {
  const title = document.createElement("h3");
  title.textContent = text;
  const body = document.createElement("div");
  element("output").append(title, body);
  return body;
}

function kind(token) {
  if (token.drafted) return "accepted";
  return token.corrected ? "corrected" : "plain";
}

const perSecond = (speed) => `${speed.toFixed(speed < 10 ? 1 : 0)} tokens/s`;

// The speeds of one run, or of both ways to answer one request. A gain has no other source.
function showSpeeds({ on, off }) {
  const most = Math.max(on ?? 0, off ?? 0) || 1;
  for (const [name, speed, none] of [["with", on, "–"], ["without", off, "not measured"]]) {
    element(name).textContent = speed ? perSecond(speed) : none;
    element(`${name}-bar`).style.width = `${(100 * (speed ?? 0)) / most}%`;
  }
  element("gain").textContent = on && off ? `${(on / off).toFixed(2)} times plain` : "–";
}

// One run: the text, its speed without the first token, how many tokens were of which kind, and those of a pass. Each
// pass of the model gives a token that is no accepted draft, but for a last one that ends within its draft.
// salt: texts of other salts are not used; null = those of this page's other runs are.

async function run(on, signal, salt = null) {
  const prompt = element("prompt").value;
  const chat = mode() === "chat";
  const question = { role: "user", content: prompt };
  const path = chat ? "v1/chat/completions" : "v1/completions";
  const input = chat ? { messages: [...state.messages, question] } : { prompt };
  const response = await call(path, { ...settings(on, salt), ...input }, signal);

  const title = on ? "with speculation" : "plain";
  if (chat) show(heading("You"), prompt, "given");
  const body = heading(chat ? `Model, ${title}` : `Completion, ${title}`);
  if (!chat) show(body, prompt, "given");

  const counts = { accepted: 0, corrected: 0, plain: 0 };
  const times = [];
  let text = "";
  let unfinished = 0; // 1 while the last token is an accepted draft
  for await (const chunk of events(response)) {
    const tokens = chunk.speculant_tokens ?? [];
    const now = performance.now();
    for (const token of tokens) {
      counts[kind(token)] += 1;
      unfinished = Number(token.drafted);
      times.push(now);
    }
    const choice = chunk.choices?.[0];
    const piece = (chat ? choice?.delta?.reasoning_content ?? choice?.delta?.content : choice?.text) ?? "";
    if (piece) show(body, piece, tokens.length ? kind(tokens.at(-1)) : "plain");
    text += piece;
    const recent = times.filter((time) => time > now - WINDOW_MS);
    const seconds = (now - Math.max(times[0] ?? now, now - WINDOW_MS)) / 1000;
    if (seconds > 0.05) element("now").textContent = perSecond(recent.length / seconds);
  }
  const seconds = (times.at(-1) - times[0]) / 1000;
  const speed = seconds > 0 ? (times.length - 1) / seconds : null;
  element("now").textContent = "–";
  const passes = counts.corrected + counts.plain + unfinished;
  return { text, speed, tokens: times.length, passes, counts, question };
}

function remember(result) {
  if (mode() !== "chat") return;
  state.messages.push(result.question, { role: "assistant", content: result.text });
  element("prompt").value = "";
}

function summary({ tokens, passes, speed, counts }, on) {
  const perPass = (tokens / (passes || 1)).toFixed(2);
  const drafted = on
    ? `; ${perPass} tokens per pass, ${counts.accepted} accepted from drafts, ${counts.corrected} corrected`
    : "";
  return `${tokens} tokens${speed ? ` at ${perSecond(speed)}` : ""}${drafted}.`;
}

async function runOnce(signal) {
  const on = element("speculation").checked;
  const result = await run(on, signal);
  showSpeeds({ [on ? "on" : "off"]: result.speed });
  remember(result);
  return summary(result, on);
}

// Both ways get the same request. Each has a salt of its own, so that neither drafts from the other's text, nor from the
// text of an earlier run, and neither finds the prompt in the cache.
async function runBoth(signal) {
  const name = `page-${Date.now()}-${Math.random()}`;
  const first = await run(true, signal, `${name}-on`);
  const second = await run(false, signal, `${name}-off`);
  showSpeeds({ on: first.speed, off: second.speed });
  remember(second);
  const same = first.text === second.text ? "The texts are identical." : "The texts differ.";
  return `With speculation: ${summary(first, true)} Plain: ${summary(second, false)} ${same}`;
}

async function start(task) {
  if (state.running || !element("form").reportValidity()) return;
  state.running = new AbortController();
  busy(true);
  element("problem").textContent = "";
  showSpeeds({});
  element("status").textContent = "Running …";
  try {
    element("status").textContent = await task(state.running.signal);
  } catch (error) {
    const stopped = error.name === "AbortError";
    element("status").textContent = stopped ? "Stopped." : "";
    if (!stopped) element("problem").textContent = explain(error);
  }
  state.running = null;
  busy(false);
}

function explain(error) {
  if (error.status === 401) return "This server needs an API key: enter it under Sampling.";
  return error instanceof TypeError ? "The server can't be reached." : error.message;
}

function busy(on) {
  element("run").disabled = on;
  element("compare").disabled = on || element("speculation").disabled;
  element("stop").disabled = !on;
  element("output").setAttribute("aria-busy", String(on));
}

// The engine's figures.

function readMetrics(page) {
  const values = {};
  for (const line of page.split("\n")) {
    const match = /^[^#:]+:(\w+)\{([^}]*)\} (\S+)$/.exec(line);
    if (!match) continue;
    const position = /position="(\d+)"/.exec(match[2])?.[1];
    values[position === undefined ? match[1] : `${match[1]}/${position}`] = Number(match[3]);
  }
  return values;
}

function showMetrics(values) {
  element("running").textContent = values.num_requests_running ?? "–";
  element("waiting").textContent = values.num_requests_waiting ?? "–";
  element("cache").textContent = `${(100 * (values.kv_cache_usage_perc ?? 0)).toFixed(0)} %`;
  const passes = values.generation_passes_total;
  element("per-pass").textContent = passes ? (values.generation_tokens_total / passes).toFixed(2) : "–";
  const drafts = values.spec_decode_num_drafts_total ?? 0;
  const rows = [];
  for (let place = 0; ; place += 1) {
    const accepted = values[`spec_decode_num_accepted_tokens_per_pos_total/${place}`];
    if (accepted === undefined || !drafts) break;
    rows.push(row(place + 1, accepted / drafts));
  }
  element("positions").tBodies[0].replaceChildren(...rows);
  element("positions").hidden = !rows.length;
  element("no-drafts").hidden = rows.length > 0;
}

function row(position, share) {
  const line = document.createElement("tr");
  const bar = document.createElement("span");
  bar.className = "bar accepted";
  bar.style.width = `${100 * share}%`;
  line.insertCell().textContent = position;
  line.insertCell().append(`${(100 * share).toFixed(0)} %`, bar);
  return line;
}

async function poll() {
  if (!document.hidden) {
    try {
      if (!state.model) await connect();
      showMetrics(readMetrics(await (await call("metrics")).text()));
    } catch (error) {
      state.model = null;
      element("model").textContent = explain(error);
    }
  }
  setTimeout(poll, POLL_MS);
}

async function connect() {
  const { data } = await (await call("v1/models")).json();
  const [{ id, speculation: chosen }] = data;
  state.model = id;
  element("model").textContent = id;
  element("detail").textContent = chosen.on ? chosen.detail : `Off: ${chosen.detail}`;
  for (const name of ["speculation", "length", "compare"]) element(name).disabled = !chosen.on;
  element("speculation").checked = chosen.on;
}

// The page.

for (const length of LENGTHS) element("length").append(new Option(String(length), String(length)));
element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  start(runOnce);
});
element("compare").addEventListener("click", () => start(runBoth));
element("stop").addEventListener("click", () => state.running?.abort());
element("clear").addEventListener("click", () => {
  state.messages = [];
  element("output").replaceChildren();
  element("status").textContent = "";
});
element("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) element("form").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") state.running?.abort();
});
poll();

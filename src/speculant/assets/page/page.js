// The page of a server: a prompt is answered with guesses and plain, side by side. It uses the server's public routes
// alone, and shows texts of the server as text, never as HTML.

import { BROKEN, Run, comparison, events, fills, generatedTokens, guessesOf, seconds, timeOf } from "./measure.js";

const element = (id) => document.getElementById(id);
const SIDES = ["fast", "slow"]; // with speculation, and plain
const TITLES = { fast: "With guesses", slow: "Plain" };
const ORDERED = { fast: "First: with guesses", slow: "Second: plain" };
const NAMES = { fast: "answer with guesses", slow: "plain answer" };
const LENGTHS = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16];
const LOADING_MS = 2000; // between questions whether the model is loaded
const CONTINUED = 128; // tokens of a continued text, which has no natural end; a chat's answer has the context's room
const FULL = "Start over begins a new conversation.";
const EXAMPLES = {
  completion: [
    ["Fibonacci", "def fibonacci(n):\n"],
    ["A stack", "class Stack:\n    def __init__(self):\n"],
    ["Read a file", "import os\n\n\ndef read_lines(path):\n"],
  ],
  chat: [
    ["Fibonacci", "Write a Python function that returns the first n Fibonacci numbers."],
    ["A stack", "Write a Python class for a stack, with push and pop."],
    ["Months", "List the twelve months with their numbers of days, as JSON."],
  ],
};

// model: the name of the model; null until the server is known. longest: its context, in tokens. messages: of the chat.
// running: stops what runs now. last: the last comparison. asked: a key was asked for. loading, waiting: the model is
// being loaded, and the timer.
const state = {
  model: null, longest: 0, messages: [], running: null, last: null, asked: false, loading: false, waiting: null,
};

// Requests.

function headers() {
  const key = element("api-key").value.trim();
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

async function call(path, body, signal) {
  const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
  const response = await fetch(path, { ...options, headers: headers(), signal }).catch((error) => {
    throw error instanceof TypeError ? Object.assign(new Error("The server can't be reached."), { gone: true }) : error;
  });
  if (response.ok) return response;
  const { error } = (await response.json().catch(() => null)) ?? {};
  const text = error?.message ?? `The server answered with status ${response.status}.`;
  throw Object.assign(new Error(text), { status: response.status, code: error?.code });
}

// The connection: a key first if one is needed. Only a model that is being loaded is asked for again and again.

async function connect() {
  clearTimeout(state.waiting);
  element("retry").hidden = true;
  say("problem", "");
  if (!state.loading) say("connection", state.model ? "" : "Connecting …");
  try {
    let model = await firstModel();
    if (model.state && model.state !== "loaded") { // of several models, each is loaded when it is asked for
      say("connection", "The model is being loaded.");
      await call("props");
      model = await firstModel();
    }
    showModel(model);
  } catch (error) {
    fail(error);
  }
}

async function firstModel() {
  const response = await call("v1/models");
  const models = await response.json().catch(() => null);
  if (!models?.data?.length) throw new Error("There is no server of models at this address.");
  return models.data[0];
}

function fail(error) {
  const loading = (state.loading = error.code === "loading");
  element("key-form").hidden = error.status !== 401;
  say("connection", loading ? "The model is being loaded. This page starts by itself." : "");
  if (loading) waitForModel();
  else if (error.status === 401) askForKey();
  else {
    const full = error.status === 400 && /max_model_len|\bcontext\b/.test(error.message) && state.messages.length;
    say("problem", full ? `${error.message} ${FULL}` : error.message);
    element("problem").scrollIntoView({ block: "nearest" });
    element("retry").hidden = Boolean(state.model) && !error.gone;
  }
}

function waitForModel() {
  clearTimeout(state.waiting);
  state.waiting = setTimeout(() => (document.hidden ? null : connect()), LOADING_MS);
}

function askForKey() {
  const field = element("api-key");
  if (field.value) say("problem", "The server does not accept this key.");
  showWork(false);
  state.asked = true;
  field.focus();
  field.select();
}

function useKey(event) {
  event.preventDefault();
  const key = element("api-key").value.trim();
  if (/^[\x21-\x7e]+$/.test(key)) connect();
  else say("problem", "A key has letters, digits and signs of ASCII alone, and no spaces.");
}

function showWork(works) {
  element("work").hidden = element("skip").hidden = !works;
}

function showModel({ id, max_model_len: longest, chat, speculation }) {
  const { on = false, detail = "" } = speculation ?? {};
  state.loading = false;
  say("connection", "");
  const first = state.model === null;
  Object.assign(state, { model: id, longest });
  say("model", `Model: ${id}`);
  say("speculation", `Speculation is ${on ? `on: ${detail}` : "off"}`);
  say("method", on ? `On this server: ${detail}.` : "");
  say("off", on ? "" : `This server makes no guesses, so there is only the plain answer. The reason: ${detail}.`);
  for (const option of element("what").options) option.disabled = !on && option.value !== "slow";
  if (!on) element("what").value = "slow";
  element("length").disabled = !on;
  element("chat").disabled = !chat;
  element("modes").hidden = !chat;
  element("no-chat").hidden = chat;
  element("key-form").hidden = true;
  if (first) {
    // The embedded model has a chat template, but was not trained to converse.
    element(chat && id !== "demo" ? "chat" : "completion").checked = true;
    element("tokens").max = longest;
    clear();
  }
  choose();
  showWork(true);
  if (state.asked) element("examples").querySelector("button").focus();
  state.asked = false;
}

// Settings.

const mode = () => document.querySelector("input[name=mode]:checked").value;
const usualLength = () => (mode() === "chat" ? null : Math.min(CONTINUED, Math.ceil(state.longest / 2)));

function sides() {
  const what = element("what").value;
  return what === "both" ? SIDES : [what];
}

function speculation(side) {
  if (side === "slow") return { speculation: false };
  const length = element("length").value;
  return length ? { speculation: { num_speculative_tokens: Number(length) } } : {};
}

// All of a run, from the settings now: the route, the turns before the answer, and the body for each side. The bodies
// differ in speculation and in their salts: a request uses no text of another salt, neither its cache nor its words.
function plan() {
  const prompt = element("prompt").value;
  const chat = mode() === "chat";
  const turns = chat ? [...state.messages, { role: "user", content: prompt }] : [{ content: prompt }];
  const common = {
    model: state.model,
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: element("tokens").valueAsNumber || usualLength(),
    temperature: element("temperature").valueAsNumber,
    seed: element("seed").valueAsNumber,
    speculant: { tokens: true },
    ...(chat ? { messages: turns } : { prompt }),
  };
  const name = `page-${Date.now()}-${Math.random()}`;
  const bodies = sides().map((side) => [side, { ...common, cache_salt: `${name}-${side}`, ...speculation(side) }]);
  return { chat, turns, bodies, path: chat ? "v1/chat/completions" : "v1/completions" };
}

// What depends on the chosen settings: the examples, and the panels in sight.
function choose() {
  const chosen = EXAMPLES[mode()].map(([name, prompt]) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    button.addEventListener("click", () => {
      element("prompt").value = prompt;
      start(answer);
    });
    return button;
  });
  element("examples").replaceChildren(...chosen);
  const both = sides().length > 1;
  for (const side of SIDES) {
    element(side).hidden = !sides().includes(side);
    say(`${side}-title`, (both ? ORDERED : TITLES)[side]);
  }
  const chat = mode() === "chat";
  element("chat-note").hidden = !chat || state.model !== "demo";
  element("tokens").placeholder = usualLength() ?? "what the context has room for";
  say("keys", `${chat ? "Enter starts, Shift+Enter begins a line" : "Ctrl+Enter starts"}, Escape stops.`);
  document.querySelector(".legend").hidden = !sides().includes("fast");
  say("run", both ? "Compare" : "Run");
  if (!element("prompt").value && !chat) element("prompt").value = EXAMPLES.completion[0][1];
}

// Output. Pieces are drawn once a frame, so that drawing disturbs the measurement little.

// A text that stays is not written again: screen readers would read it out each time.
function say(id, text) {
  if (element(id).textContent !== text) element(id).textContent = text;
}

function span(text, kind) {
  const part = document.createElement("span");
  part.className = kind;
  part.textContent = text;
  return part;
}

function empty() {
  element("reasoning").hidden = true;
  for (const side of SIDES) {
    element(`${side}-text`).replaceChildren();
    element(`${side}-bar`).style.width = "0";
    say(`${side}-count`, "");
    say(`${side}-guesses`, "");
  }
}

function finish(side, run, share) {
  say(`${side}-count`, timeOf(run));
  say(`${side}-guesses`, guessesOf(run));
  element(`${side}-bar`).style.width = `${100 * share}%`;
}

function turn({ role, content }) {
  if (!role) return [span(content, "given")];
  const title = document.createElement("h4");
  title.textContent = role === "user" ? "You" : "Model";
  return [title, span(content, "given")];
}

class Panel {
  waiting = [];
  frame = null;
  tokens = 0;

  constructor(side, { chat, turns }) {
    this.side = side;
    this.body = element(`${side}-text`);
    const all = chat ? [...turns, { role: "assistant", content: "" }] : turns;
    this.body.append(...all.flatMap(turn));
    this.body.scrollTop = this.body.scrollHeight;
  }

  add(piece) {
    this.waiting.push(piece);
    this.frame ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    const follows = this.body.scrollHeight - this.body.scrollTop - this.body.clientHeight < 40;
    this.body.append(...this.waiting.filter(({ text }) => text).map(({ text, kind }) => span(text, kind)));
    if (this.waiting.some(({ kind }) => kind.includes("reasoning"))) element("reasoning").hidden = false;
    this.tokens += this.waiting.reduce((sum, piece) => sum + piece.tokens, 0);
    if (this.waiting.length) say(`${this.side}-count`, `${this.tokens} tokens · ${seconds(this.waiting.at(-1).time)}`);
    this.waiting = [];
    if (follows) this.body.scrollTop = this.body.scrollHeight;
  }
}

// Runs.

async function runOne(run, path, body, panel, signal) {
  const began = performance.now();
  const response = await call(path, body, signal);
  try {
    for await (const chunk of events(response.body)) {
      const seen = run.pieces.length;
      run.read(chunk, performance.now() - began);
      for (const piece of run.pieces.slice(seen)) panel.add(piece);
    }
  } catch (error) {
    const broken = error instanceof TypeError || error instanceof SyntaxError;
    throw broken ? new Error(`${BROKEN}: the server stopped, or the connection was lost.`) : error;
  } finally {
    panel.draw();
  }
}

const generated = (signal) =>
  call("metrics", null, signal)
    .then((response) => response.text())
    .then(generatedTokens)
    .catch(() => NaN);

// The sides follow one another, so that they don't disturb each other. The server's count of tokens tells whether
// others used it meanwhile.
async function answer(signal) {
  const planned = plan();
  empty();
  const panels = Object.fromEntries(planned.bodies.map(([side]) => [side, new Panel(side, planned)]));
  const compares = planned.bodies.length > 1;
  const runs = {};
  state.last = null;
  element("replay").hidden = true;
  element("status").scrollIntoView({ block: "nearest" });
  const before = compares ? await generated(signal) : NaN;
  try {
    for (const [side, body] of planned.bodies) {
      say("status", `Writing the ${NAMES[side]} …`);
      runs[side] = new Run();
      await runOne(runs[side], planned.path, body, panels[side], signal);
      finish(side, runs[side], 0);
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    return stopped(planned, runs);
  }
  const after = compares ? await generated(signal) : NaN;
  remember(planned, runs);
  if (compares) {
    const others = after - before > runs.fast.tokens + runs.slow.tokens;
    showComparison(planned, runs, others ? "Others used the server meanwhile, so the times are rough." : "");
  } else for (const side in runs) say("status", `The ${NAMES[side]}: ${timeOf(runs[side])}.`);
  const [run] = Object.values(runs);
  if (fills(run, state.longest)) element("status").append(` ${cutOf(planned)}`);
}

const cutOf = ({ chat }) =>
  `The ${chat ? "conversation" : "text"} fills the context of ${state.longest} tokens.${chat ? ` ${FULL}` : ""}`;

// What was written stays. If the second answer had begun, both are compared as far as it came.
function stopped(planned, runs) {
  say("status", "Stopped.");
  remember(planned, runs);
  const tokens = Math.min(runs.fast?.tokens ?? 0, runs.slow?.tokens ?? 0);
  if (tokens < 2) return;
  const parts = { fast: runs.fast.first(tokens), slow: runs.slow.first(tokens) };
  showComparison(planned, parts, "You stopped the plain answer.");
}

function remember({ chat, turns }, runs) {
  const [run] = Object.values(runs);
  if (!chat || !run?.content) return;
  state.messages = [...turns, { role: "assistant", content: run.content }];
  element("prompt").value = "";
}

function showComparison(planned, runs, remark) {
  const { title, text } = comparison(runs.fast, runs.slow);
  state.last = { runs, planned };
  const strong = document.createElement("strong");
  strong.textContent = title;
  element("status").replaceChildren(strong, ` ${text} ${remark}`.trimEnd());
  element("replay").hidden = false;
  showTimes(runs);
}

function showTimes(runs) {
  const longest = Math.max(runs.fast.milliseconds, runs.slow.milliseconds) || 1;
  for (const side of SIDES) finish(side, runs[side], runs[side].milliseconds / longest);
}

// Both runs again, at the same time, each at the pace that was measured. Stopping it shows their ends.
function replay(signal) {
  const { runs, planned } = state.last;
  empty();
  const panels = SIDES.map((side) => [new Panel(side, planned), [...runs[side].pieces]]);
  const began = performance.now();
  return new Promise((resolve) => {
    const frame = () => {
      const now = signal.aborted ? Infinity : performance.now() - began;
      for (const [panel, left] of panels) {
        while (left.length && left[0].time <= now) panel.add(left.shift());
        panel.draw();
      }
      if (panels.some(([, left]) => left.length)) return requestAnimationFrame(frame);
      showTimes(runs);
      resolve();
    };
    frame();
  });
}

// A field that is folded away can't show its fault.
function valid() {
  const form = element("form");
  if (!form.checkValidity() && element("prompt").validity.valid) element("settings").open = true;
  return form.reportValidity();
}

async function start(task) {
  if (state.running || (task === answer && !valid())) return;
  state.running = new AbortController();
  say("problem", "");
  element("retry").hidden = true;
  busy(true);
  try {
    await task(state.running.signal);
  } catch (error) {
    say("status", "");
    fail(error);
  }
  state.running = null;
  busy(false);
}

// Buttons keep the focus: they are not disabled, but do nothing.
function busy(on) {
  const buttons = [element("run"), element("clear"), element("replay"), ...element("examples").children];
  for (const button of buttons) button.setAttribute("aria-disabled", String(on));
  element("stop").setAttribute("aria-disabled", String(!on));
  for (const side of SIDES) element(`${side}-text`).setAttribute("aria-busy", String(on));
}

function clear() {
  if (state.running) return;
  state.messages = [];
  state.last = null;
  element("replay").hidden = true;
  const both = sides().length > 1;
  say("status", `Press one of them, or write your own prompt. ${both ? "The answer is written twice: with guesses, then plain." : ""}`);
  empty();
}

// The page.

for (const length of LENGTHS) element("length").append(new Option(String(length), String(length)));
element("key-form").addEventListener("submit", useKey);
element("retry").addEventListener("click", connect);
element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  start(answer);
});
element("replay").addEventListener("click", () => start(replay));
element("stop").addEventListener("click", () => state.running?.abort());
element("clear").addEventListener("click", clear);
element("what").addEventListener("change", choose);
for (const id of ["completion", "chat"]) {
  element(id).addEventListener("change", () => {
    const examples = Object.values(EXAMPLES).flat();
    if (examples.some(([, prompt]) => prompt === element("prompt").value)) element("prompt").value = "";
    clear();
    choose();
  });
}
element("prompt").addEventListener("keydown", (event) => {
  const sends = mode() === "chat" && !event.shiftKey && !matchMedia("(pointer: coarse)").matches;
  if (event.key !== "Enter" || event.isComposing || !(sends || event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  element("form").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") state.running?.abort();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && state.loading) connect();
});
connect();

// The measurement of a run, and the comparison of two. Nothing here touches the page.

export const BROKEN = "The answer broke off before its end";

// The chunks of a stream of server-sent events. Throws if the server reports an error, or the stream breaks off.
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error(`${BROKEN}.`);
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

function kindOf(token) {
  if (token?.drafted) return "accepted";
  return token?.corrected ? "corrected" : "plain";
}

// One run: its pieces of text with their kinds and times in milliseconds since the request, and its figures.
export class Run {
  pieces = [];
  text = "";
  content = ""; // the text without reasoning
  tokens = 0;
  milliseconds = 0; // from the request to the last token
  end = null; // "stop" = the model's own end, "length" = the limit of tokens
  figures = null; // the server's, of this answer
  total = 0; // the server's count of the prompt's tokens and the answer's

  read(chunk, time) {
    const tokens = chunk.speculant_tokens ?? [];
    const choice = chunk.choices?.[0];
    const content = choice?.text ?? choice?.delta?.content ?? "";
    const text = (choice?.delta?.reasoning_content ?? "") + content;
    this.text += text;
    this.content += content;
    this.tokens += tokens.length;
    if (tokens.length) this.milliseconds = time;
    const kind = kindOf(tokens.at(-1)) + (text && !content ? " reasoning" : "");
    if (text || tokens.length) this.pieces.push({ text, kind, tokens: tokens.length, time });
    this.end = choice?.finish_reason ?? this.end;
    this.figures = chunk.metrics?.speculative_decoding ?? this.figures;
    this.total = chunk.usage?.total_tokens ?? this.total;
  }

  // The run as far as so many tokens, as if a limit had ended it there.
  first(tokens) {
    const part = Object.assign(new Run(), { end: "length" });
    for (const piece of this.pieces) {
      if (part.tokens >= tokens) break;
      part.pieces.push(piece);
      part.text += piece.text;
      part.tokens += piece.tokens;
      part.milliseconds = piece.time;
    }
    return part;
  }
}

// Whether the context ended a run, and no other limit.
export const fills = ({ end, total }, context) => end === "length" && total >= context;

export const seconds = (milliseconds) => `${(milliseconds / 1000).toFixed(milliseconds < 9995 ? 2 : 1)} s`;

// How many times as fast a token was with speculation. null = nothing to compare: a run did not end, or is too short.
export function gainOf(fast, slow) {
  if (!(fast.end && slow.end) || Math.min(fast.tokens, slow.tokens) < 2) return null;
  return slow.milliseconds / slow.tokens / (fast.milliseconds / fast.tokens);
}

export function gainWords(gain) {
  const times = gain.toFixed(gain < 9.95 ? 1 : 0);
  if (times === "1.0") return "As fast as plain";
  return `${times} times as fast${gain < 1 ? ": slower than plain here" : ""}`;
}

// The sentences about two runs of one request. Their gain is theirs alone.
export function comparison(fast, slow) {
  const gain = gainOf(fast, slow);
  if (gain === null) return { title: "", text: "An answer is too short to compare, or did not end." };
  const same = fast.text === slow.text;
  const each = (run) => `${(run.milliseconds / run.tokens).toFixed(1)} ms`;
  const text =
    fast.tokens === slow.tokens
      ? `${fast.end === "length" ? "The first" : "All"} ${fast.tokens} tokens took ${seconds(fast.milliseconds)} instead of ${seconds(slow.milliseconds)}.`
      : `A token took ${each(fast)} instead of ${each(slow)} (of ${fast.tokens} and ${slow.tokens} tokens).`;
  return { title: `${gainWords(gain)}.`, text: `${text} The two texts ${same ? "are identical" : "differ"}.` };
}

export const timeOf = ({ tokens, milliseconds }) => `${tokens} tokens in ${seconds(milliseconds)}`;

// The figures of one answer's guesses; "" = there were none.
export function guessesOf({ figures }) {
  if (!figures?.num_draft_tokens) return "";
  const { tokens_per_pass: perPass, num_accepted_draft_tokens: right, num_draft_tokens: drafted } = figures;
  return `${perPass.toFixed(1)} tokens per pass, ${right} of ${drafted} guesses right`;
}

// The tokens that a server has generated in all, from its metrics; NaN = unknown.
export function generatedTokens(metrics) {
  return Number(/^\w+:generation_tokens_total(?:\{[^}]*\})? (\S+)$/m.exec(metrics)?.[1] ?? NaN);
}

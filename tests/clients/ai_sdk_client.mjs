// The AI SDK: chats, forced calls and objects through its provider for compatible servers; responses through OpenAI's, and
// messages through Anthropic's.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateObject, generateText, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const { CLIENT_URL, CLIENT_MODEL, CLIENT_CALLS } = process.env;
const server = { baseURL: CLIENT_URL, apiKey: "none" };
const provider = createOpenAICompatible({ ...server, name: "speculant", supportsStructuredOutputs: true });
const responses = createOpenAI(server).responses;
const messages = createAnthropic(server);
const schema = z.object({ city: z.enum(["Oslo", "Rome"]), warm: z.boolean() });
const prompt = "How is the weather in Oslo?";
const settings = { model: provider(CLIENT_MODEL), prompt, maxRetries: 0, maxOutputTokens: 400 };
const short = { ...settings, maxOutputTokens: 12, temperature: 0 };
const tools = { weather: tool({ description: "The weather of a city.", inputSchema: schema }) };
const choices = ["required", { type: "tool", toolName: "weather" }];
const PATIENCE = 20_000; // milliseconds

async function joined(stream) {
  let text = "";
  for await (const piece of stream) text += piece;
  return text;
}

async function aborted() {
  const page = await (await fetch(`${CLIENT_URL.replace(/\/v1$/, "")}/metrics`)).text();
  return Number(/^vllm:request_success_total\{[^}]*"abort"[^}]*\} (\S+)$/m.exec(page)[1]);
}

const checks = {
  async chat() {
    const answer = await generateText(short);
    assert.ok(answer.text);
    assert.equal(answer.usage.outputTokens, 12);
  },

  async "chat, streamed"() {
    assert.equal(await joined(streamText(short).textStream), (await generateText(short)).text);
  },

  async tools() {
    for (const toolChoice of choices) {
      const whole = await generateText({ ...settings, tools, toolChoice });
      assert.equal(whole.text, "");
      assert.equal(whole.toolCalls[0].toolName, "weather");
      schema.parse(whole.toolCalls[0].input);
    }
  },

  async "tools, chosen by the model"() {
    const auto = generateText({ ...settings, maxOutputTokens: 8, tools });
    if (CLIENT_CALLS) await auto;
    else await assert.rejects(auto, /--tool-parser/);
  },

  async "tools, streamed"() {
    for (const toolChoice of choices) {
      const stream = streamText({ ...settings, tools, toolChoice });
      const calls = await stream.toolCalls;
      assert.equal(await stream.text, "");
      schema.parse(calls[0].input);
    }
  },

  async "structured output"() {
    schema.parse((await generateObject({ ...settings, schema })).object);
    const stream = streamObject({ ...settings, schema });
    for await (const part of stream.partialObjectStream) assert.equal(typeof part, "object");
    schema.parse(await stream.object);
  },

  async completions() {
    const completion = { ...short, model: provider.completionModel(CLIENT_MODEL) };
    const whole = (await generateText(completion)).text;
    assert.ok(whole);
    assert.equal(await joined(streamText(completion).textStream), whole);
  },

  async responses() {
    const response = { ...short, model: responses(CLIENT_MODEL) };
    const whole = (await generateText(response)).text;
    assert.ok(whole);
    assert.equal(await joined(streamText(response).textStream), whole);
  },

  async "responses with tools"() {
    const forced = { ...settings, model: responses(CLIENT_MODEL), tools, toolChoice: "required" };
    schema.parse((await generateText(forced)).toolCalls[0].input);
    schema.parse((await streamText(forced).toolCalls)[0].input);
  },

  async messages() {
    const message = { ...short, model: messages(CLIENT_MODEL) };
    const whole = await generateText(message);
    assert.equal(whole.usage.outputTokens, 12);
    assert.equal(await joined(streamText(message).textStream), whole.text);
  },

  async "messages with tools"() {
    for (const toolChoice of choices) {
      const forced = { ...settings, model: messages(CLIENT_MODEL), tools, toolChoice };
      schema.parse((await generateText(forced)).toolCalls[0].input);
      schema.parse((await streamText(forced).toolCalls)[0].input);
    }
  },

  async errors() {
    await assert.rejects(generateText({ ...short, model: provider("nothing") }), (error) => {
      assert.equal(error.statusCode, 404);
      assert.match(error.message, /nothing/);
      return true;
    });
    await assert.rejects(generateText({ ...short, temperature: -1 }), /temperature/);
  },

  async "embeddings: a clear 404"() {
    const model = provider.textEmbeddingModel(CLIENT_MODEL);
    await assert.rejects(embed({ model, value: "hi", maxRetries: 0 }), /route/);
  },

  async cancellation() {
    const [before, control] = [await aborted(), new AbortController()];
    const providerOptions = { speculant: { ignore_eos: true } };
    const stream = streamText({
      ...settings,
      maxOutputTokens: 900,
      providerOptions,
      abortSignal: control.signal,
      onError() {},
    });
    for await (const part of stream.fullStream) if (part.type === "text-delta") break;
    control.abort();
    const deadline = Date.now() + PATIENCE;
    while ((await aborted()) === before) {
      assert.ok(Date.now() < deadline, "the request did not end");
      await new Promise((resume) => setTimeout(resume, 50));
    }
  },
};

const results = {};
for (const [call, check] of Object.entries(checks)) {
  try {
    await check();
    results[call] = true;
  } catch (error) {
    console.error(`-- AI SDK: ${call}`, error);
    results[call] = false;
  }
}
const { version } = createRequire(import.meta.url)("ai/package.json");
console.log(JSON.stringify({ client: `ai ${version}`, results }));
process.exit(Object.values(results).every(Boolean) ? 0 : 1);

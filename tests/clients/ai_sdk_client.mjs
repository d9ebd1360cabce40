// The AI SDK: forced calls and objects, whole and streamed.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const { CLIENT_URL, CLIENT_MODEL, CLIENT_CALLS } = process.env;
const provider = createOpenAICompatible({
  name: "speculant",
  baseURL: CLIENT_URL,
  apiKey: "none",
  supportsStructuredOutputs: true,
});
const schema = z.object({ city: z.enum(["Oslo", "Rome"]), warm: z.boolean() });
const settings = {
  model: provider(CLIENT_MODEL),
  prompt: "How is the weather in Oslo?",
  maxRetries: 0,
  maxOutputTokens: 400,
};
const tools = { weather: tool({ description: "The weather of a city.", inputSchema: schema }) };

for (const toolChoice of ["required", { type: "tool", toolName: "weather" }]) {
  const whole = await generateText({ ...settings, tools, toolChoice });
  assert.equal(whole.text, "");
  assert.equal(whole.toolCalls[0].toolName, "weather");
  schema.parse(whole.toolCalls[0].input);
  const stream = streamText({ ...settings, tools, toolChoice });
  const calls = await stream.toolCalls;
  assert.equal(await stream.text, "");
  schema.parse(calls[0].input);
}

const auto = generateText({ ...settings, maxOutputTokens: 8, tools });
if (CLIENT_CALLS) await auto;
else await assert.rejects(auto, /--tool-parser/);

schema.parse((await generateObject({ ...settings, schema })).object);
const stream = streamObject({ ...settings, schema });
for await (const part of stream.partialObjectStream) assert.equal(typeof part, "object");
schema.parse(await stream.object);

const require = createRequire(import.meta.url);
const versions = ["ai", "@ai-sdk/openai-compatible"].map((name) => `${name} ${require(`${name}/package.json`).version}`);
console.log(`${versions.join(", ")}: calls and objects`);

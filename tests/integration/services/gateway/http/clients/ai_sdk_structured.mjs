// Ask a gateway for structured answers by Vercel's AI SDK, and print what came as JSON:
// node --input-type=module - URL PROMPT < ai_sdk_structured.mjs
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, stepCountIs, streamObject, streamText, tool } from "ai";

const [url, prompt] = process.argv.slice(2);
const galley = createOpenAICompatible({
  name: "galley",
  baseURL: url,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const request = { model: galley("tiny"), prompt, maxOutputTokens: 400, seed: 7, maxRetries: 0 };
const schema = jsonSchema({
  type: "object",
  properties: { city: { type: "string", maxLength: 8 }, days: { enum: [1, 2, 3] } },
  required: ["city", "days"],
  additionalProperties: false,
});
const calls = [];
const tools = {
  get_weather: tool({
    description: "Weather of a city.",
    inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string" } }, required: ["city"] }),
    execute: async (input) => {
      calls.push(input);
      return "Rain.";
    },
  }),
};

const { object } = await generateObject({ ...request, schema });
const { object: list } = await generateObject({ ...request, output: "array", schema });
const { object: word } = await generateObject({ ...request, output: "enum", enum: ["rain", "sun"] });
const { object: any } = await generateObject({ ...request, output: "no-schema" });
const growing = streamObject({ ...request, schema });
let partial = 0;
for await (const _ of growing.partialObjectStream) partial += 1;
const required = await generateText({ ...request, tools, toolChoice: "required" });
const named = await generateText({ ...request, tools, toolChoice: { type: "tool", toolName: "get_weather" } });
const reasoned = await generateText({ ...request, seed: 8 });
const reasoning = streamText({ ...request, seed: 8 });
let reasoning_parts = 0;
for await (const part of reasoning.fullStream) reasoning_parts += part.type === "reasoning-delta" ? 1 : 0;
calls.length = 0;

const called = await generateText({ ...request, tools });
const stream = streamText({ ...request, tools });
const kinds = new Set();
for await (const part of stream.fullStream) kinds.add(part.type);
const steps = await generateText({ ...request, tools, stopWhen: stepCountIs(2) });

console.log(
  JSON.stringify({
    objects: [object, ...list, await growing.object],
    word,
    any: typeof any,
    partial,
    required: [required, named].map((answer) => answer.toolCalls.map((call) => call.toolName)),
    reasoned: [reasoned.reasoningText, reasoned.text],
    reasoning: [await reasoning.reasoningText, await reasoning.text],
    reasoning_parts,
    reasoning_tokens: (await reasoning.usage).outputTokenDetails.reasoningTokens,
    called: called.toolCalls.map((call) => [call.toolName, call.input]),
    finish: called.finishReason,
    streamed: (await stream.toolCalls).map((call) => [call.toolName, call.input]),
    kinds: ["tool-input-start", "tool-input-delta", "tool-input-end", "tool-call"].filter((kind) => kinds.has(kind)),
    steps: steps.steps.length,
    results: calls.length,
  }),
);

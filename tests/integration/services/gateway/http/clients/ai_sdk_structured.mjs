// Ask a gateway for structured answers by Vercel's AI SDK, and print what came as JSON:
// node --input-type=module - URL PROMPT < ai_sdk_structured.mjs
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

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
const called = await generateText({ ...request, tools });
const stream = streamText({ ...request, tools });
const kinds = new Set();
for await (const part of stream.fullStream) kinds.add(part.type);
const steps = await generateText({ ...request, tools, stopWhen: stepCountIs(2) });

console.log(
  JSON.stringify({
    object,
    called: called.toolCalls.map((call) => [call.toolName, call.input]),
    finish: called.finishReason,
    streamed: (await stream.toolCalls).map((call) => [call.toolName, call.input]),
    kinds: ["tool-input-start", "tool-input-delta", "tool-input-end", "tool-call"].filter((kind) => kinds.has(kind)),
    steps: steps.steps.length,
    results: calls.length,
  }),
);

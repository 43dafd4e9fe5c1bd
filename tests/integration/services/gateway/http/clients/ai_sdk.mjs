// Call a gateway by Vercel's AI SDK, and print what came as JSON: node --input-type=module - URL PROMPT < ai_sdk.mjs
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [url, prompt] = process.argv.slice(2);
const galley = createOpenAICompatible({ name: "galley", baseURL: url, apiKey: "none", includeUsage: true });
const request = { model: galley("tiny"), prompt, maxOutputTokens: 40, seed: 7, maxRetries: 0 };

const whole = await generateText(request);
const stream = streamText({ ...request, providerOptions: { galley: { speculation: { mode: "off" } } } });
let streamed = "";
for await (const part of stream.textStream) streamed += part;
const error = await generateText({ ...request, model: galley("other") }).catch((refused) => refused);

console.log(
  JSON.stringify({
    chat: whole.text,
    finish: whole.finishReason,
    streamed,
    usage: [whole.usage.outputTokens, (await stream.usage).outputTokens],
    error: [error.name, error.statusCode, error.message],
  }),
);

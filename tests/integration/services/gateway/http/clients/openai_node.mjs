// Call a gateway by OpenAI's client for Node, and print what came as JSON:
// node --input-type=module - URL PROMPT < openai_node.mjs
import OpenAI from "openai";

const [url, prompt] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const chat = { model: "tiny", messages: [{ role: "user", content: prompt }], max_tokens: 40, seed: 7 };

const whole = await client.chat.completions.create({ ...chat, n: 2, logprobs: true, top_logprobs: 2 });
const events = await client.chat.completions.create({
  ...chat,
  stream: true,
  stream_options: { include_usage: true },
});
let streamed = "";
let usage = null;
for await (const event of events) {
  streamed += event.choices[0]?.delta.content ?? "";
  usage = event.usage ?? usage;
}
const helper = client.chat.completions.stream({ ...chat, speculation: { mode: "off" } });
const text = await client.completions.create({ model: "tiny", prompt, max_tokens: 40, seed: 7 });
const respond = { model: "tiny", input: prompt, max_output_tokens: 40, seed: 7 };
const response = await client.responses.create(respond);
let responded = "";
for await (const event of await client.responses.create({ ...respond, stream: true }))
  if (event.type === "response.output_text.delta") responded += event.delta;
const kept = await client.responses.retrieve(response.id);
const models = [];
for await (const model of client.models.list()) models.push(model.id);
const error = await client.chat.completions.create({ ...chat, temperature: -1 }).catch((refused) => refused);

console.log(
  JSON.stringify({
    chat: whole.choices.map((choice) => choice.message.content),
    logprobs: whole.choices[0].logprobs.content.length,
    streamed,
    usage: [whole.usage.completion_tokens, usage.completion_tokens],
    plain: await helper.finalContent(),
    text: text.choices[0].text,
    responses: [response.output_text, responded, kept.output_text],
    models,
    error: [error instanceof OpenAI.BadRequestError, error.param, error.code],
  }),
);

// Checks a key over REST and over the Redis protocol (node-redis).
//
// Start the service, then run this program:
//
//     tollgate --resp
//     npm install redis
//     node check.mjs
//
// TOLLGATE_URL and TOLLGATE_REDIS_URL name other addresses. A token (api.token_file) goes into TOLLGATE_TOKEN.

import { createClient } from 'redis';

const url = process.env.TOLLGATE_URL ?? 'http://127.0.0.1:8080';
const redisUrl = process.env.TOLLGATE_REDIS_URL ?? 'redis://127.0.0.1:6380';
const token = process.env.TOLLGATE_TOKEN;

// Takes permits of a key. A denial is an answer too: HTTP status 429.
async function checkRest(key, permits = 1) {
  const query = new URLSearchParams({ key, permits });
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const response = await fetch(`${url}/api/v1/rate-limit/check?${query}`, { headers });
  if (!response.ok && response.status !== 429) {
    throw new Error(`${response.status}: ${await response.text()}`);
  }
  return response.json();
}

const rest = await checkRest('node:rest');
console.log(`REST: allowed=${rest.allowed} remaining=${rest.remaining}`);

// With RESP 3, TG.CHECK answers with an object.
const client = createClient({ url: redisUrl, password: token, RESP: 3 });
client.on('error', (error) => console.error(error.message));
await client.connect();

const [limited, limit, remaining, retryAfter, resetAfter] =
  await client.sendCommand(['CL.THROTTLE', 'node:cell', '15', '30', '60']);
console.log(`CL.THROTTLE: limited=${limited} limit=${limit} remaining=${remaining} ` +
  `retry_after=${retryAfter} reset_after=${resetAfter}`);

const key = await client.sendCommand(['TG.CHECK', 'KEY', 'node:key']);
console.log(`TG.CHECK KEY: allowed=${key.allowed} remaining=${key.remaining}`);
const request = await client.sendCommand(['TG.CHECK', 'user', 'alice', 'path', '/api/items']);
console.log(`TG.CHECK: allowed=${request.allowed} rule=${request.rule}`);

// Commands that are sent in one turn of the event loop go out as one pipeline.
const checks = Array.from({ length: 16 }, (_, number) =>
  client.sendCommand(['CL.THROTTLE', `node:${number}`, '15', '30', '60']));
const allowed = (await Promise.all(checks)).filter((reply) => Number(reply[0]) === 0).length;
console.log(`pipeline: ${allowed} of 16 allowed`);

await client.close();

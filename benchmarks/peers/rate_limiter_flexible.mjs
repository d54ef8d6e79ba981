// The same closed loop in Node: one measurement for each line of standard input.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const require = createRequire(`${process.env.PEER_MODULES}/`);
const { RateLimiterRedis } = require("rate-limiter-flexible");
const { Redis } = require("ioredis");

const store = new Redis(process.env.STORE_URL);
const limiter = new RateLimiterRedis({ storeClient: store, points: Number(process.env.PER_MINUTE), duration: 60 });

async function measure({ keys, first, seconds, callers }) {
  const names = Array.from({ length: keys }, (_, number) => `key-${String(first + number).padStart(6, "0")}`);
  const latencies = [];
  const begun = performance.now();
  const end = begun + 1_000 * seconds;
  const call = async () => {
    for (let sent = performance.now(); sent < end; ) {
      await limiter.consume(names[Math.floor(Math.random() * names.length)], 1); // a denial rejects, and ends the run
      const done = performance.now();
      latencies.push(done - sent);
      sent = done;
    }
  };
  await Promise.all(Array.from({ length: callers }, call));
  const elapsed = (performance.now() - begun) / 1_000;
  latencies.sort((one, other) => one - other);
  const cut = (part) => 1_000 * latencies[Math.floor(part * latencies.length)];
  const decisions = latencies.length;
  return { per_second: decisions / elapsed, decisions, p50_us: cut(0.5), p99_us: cut(0.99) };
}

await limiter.consume("key-000000", 1);
console.log(JSON.stringify({ ready: true }));
for await (const line of createInterface({ input: process.stdin })) {
  console.log(JSON.stringify(await measure(JSON.parse(line))));
}
store.disconnect();

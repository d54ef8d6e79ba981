// The same closed loop in Node: so many callers at once, each asking again when it has its answer.
import { createRequire } from "node:module";

const require = createRequire(`${process.env.PEER_MODULES}/`);
const { RateLimiterRedis } = require("rate-limiter-flexible");
const { Redis } = require("ioredis");

const store = new Redis(process.env.STORE_URL);
const limiter = new RateLimiterRedis({ storeClient: store, points: 1_000_000, duration: 1 });
const latencies = [];
const begun = performance.now();
const end = begun + 1_000 * Number(process.env.PEER_SECONDS);

async function call() {
  for (let sent = performance.now(); sent < end; ) {
    await limiter.consume("acme", 1); // it rejects where it denies, and that ends the run
    const done = performance.now();
    latencies.push(done - sent);
    sent = done;
  }
}

await Promise.all(Array.from({ length: Number(process.env.PEER_CALLERS) }, call));
const seconds = (performance.now() - begun) / 1_000;
latencies.sort((one, other) => one - other);
const cut = (part) => 1_000 * latencies[Math.floor(part * latencies.length)];
console.log(JSON.stringify({ per_second: latencies.length / seconds, p50_us: cut(0.5), p99_us: cut(0.99) }));
store.disconnect();

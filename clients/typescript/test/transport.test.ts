import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { json } from "node:stream/consumers";
import { type TestContext, test } from "node:test";
import { AgentUnavailable, Client, type ClientOptions, Denied, type OnFailure, RequestRejected } from "../src/index.js";

const ALLOWED = { allowed: true, degraded: null, policies: [], denied_by: null, retry_after_ms: 0 };
const subject = { tenant: "acme", route: "/v1/exports", method: "POST" };

type Handler = (response: ServerResponse, request: IncomingMessage) => void;

/** Answers calls with one handler after the other, and keeps the operation ids that it got. */
class ScriptedAgent {
  readonly operations: string[] = [];
  readonly timesMs: number[] = [];
  /** Resolves when the client has asked for a sign of life. */
  readonly probed: Promise<void>;
  #onProbe = () => {};
  url = "";
  #close = () => {};

  constructor() {
    this.probed = new Promise((resolve) => {
      this.#onProbe = resolve;
    });
  }

  static async serve(context: TestContext, ...handlers: Handler[]): Promise<ScriptedAgent> {
    const agent = new ScriptedAgent();
    const server = createServer((request, response) => {
      if (request.url === "/healthz") {
        response.end("{}");
        agent.#onProbe();
        return;
      }
      void json(request).then((body) => {
        agent.operations.push((body as { operation_id: string }).operation_id);
        agent.timesMs.push(performance.now());
        handlers[Math.min(agent.operations.length, handlers.length) - 1]?.(response, request);
      });
    });
    server.listen(0, "127.0.0.1");
    await once(server, "listening");
    agent.url = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
    agent.#close = () => {
      server.close();
      server.closeAllConnections();
    };
    context.after(() => {
      agent.close();
    });
    return agent;
  }

  close(): void {
    this.#close();
  }
}

function answer(status: number, body: unknown): Handler {
  return (response) => {
    response.writeHead(status, { "Content-Type": "application/json", ...(status === 503 ? { "Retry-After": "1" } : {}) });
    response.end(JSON.stringify(body));
  };
}

const hangUp: Handler = (response) => response.destroy();

test("an answer of a newer agent is read as far as it is known", async (context) => {
  const policy = { policy: "export", quota: "exports", kind: "budget", allowed: false, reason: "over_budget" };
  const numbers = { limit: 1, share: 1, remaining: 0, reset_ms: 1, retry_after_ms: 1, added: [1] };
  const newer = { ...ALLOWED, allowed: false, denied_by: "export", degraded: "neighbour", added: { deep: null } };
  const agent = await ScriptedAgent.serve(context, answer(429, { ...newer, policies: [{ ...policy, ...numbers }] }));
  const decision = await new Client(agent.url, { onFailure: "raise" }).check({ subject });
  assert.deepEqual([decision.allowed, decision.degraded, decision.reason], [false, "neighbour", "over_budget"]);
});

/** Return a client whose breaker opens after two calls without a sign of life. */
function breaking(agent: ScriptedAgent, breakerPauseMs: number): Client {
  return new Client(agent.url, { onFailure: "raise", attempts: 1, breakerFailures: 2, breakerPauseMs });
}

test("the breaker stops calls to an agent that is away", async (context) => {
  const agent = await ScriptedAgent.serve(context, hangUp);
  const client = breaking(agent, 3_600_000);
  for (let call = 0; call < 4; call++) {
    await assert.rejects(client.check({ subject }), call < 2 ? AgentUnavailable : /circuit breaker is open/);
  }
  assert.equal(agent.operations.length, 2);
});

test("any answer keeps the breaker closed", async (context) => {
  const agent = await ScriptedAgent.serve(context, hangUp, answer(500, {}), hangUp, answer(200, ALLOWED));
  const client = breaking(agent, 3_600_000);
  for (let call = 0; call < 3; call++) {
    await assert.rejects(client.check({ subject }), AgentUnavailable);
  }
  assert.ok((await client.check({ subject })).allowed);
});

test("a trial closes the breaker", async (context) => {
  const agent = await ScriptedAgent.serve(context, hangUp, hangUp, answer(200, ALLOWED));
  const client = breaking(agent, 0);
  await assert.rejects(client.check({ subject }), AgentUnavailable);
  await assert.rejects(client.check({ subject }), AgentUnavailable);
  assert.ok((await client.check({ subject })).allowed);
  assert.ok((await client.check({ subject })).allowed);
});

test("a lost call is repeated under the same operation", async (context) => {
  const agent = await ScriptedAgent.serve(context, hangUp, answer(500, { title: "oops" }), answer(200, ALLOWED));
  const client = new Client(agent.url, { onFailure: "raise" });
  assert.ok((await client.check({ subject })).allowed);
  assert.equal(agent.operations.length, 3);
  assert.equal(new Set(agent.operations).size, 1);
  await client.check({ subject });
  assert.notEqual(agent.operations[3], agent.operations[0]);
});

test("Retry-After is honoured", async (context) => {
  const agent = await ScriptedAgent.serve(context, answer(503, { title: "Not ready" }), answer(200, ALLOWED));
  assert.ok((await new Client(agent.url).check({ subject })).allowed);
  const [first, second] = agent.timesMs;
  assert.ok((second ?? 0) - (first ?? 0) >= 990); // timers of Node may be a millisecond early
});

test("a denial is not repeated", async (context) => {
  for (const status of [429, 503]) {
    const agent = await ScriptedAgent.serve(context, answer(status, { ...ALLOWED, allowed: false }));
    const decision = await new Client(agent.url, { onFailure: "open" }).check({ subject });
    assert.deepEqual([decision.allowed, agent.operations.length], [false, 1]);
  }
});

test("the failure mode answers while the agent is away", async (context) => {
  const agent = await ScriptedAgent.serve(context, answer(200, ALLOWED));
  agent.close();
  const client = (onFailure: OnFailure) => new Client(agent.url, { onFailure });
  for (const mode of ["open", "closed"] as const) {
    const decision = await client(mode).check({ subject });
    assert.deepEqual([decision.allowed, decision.degraded], [mode === "open", mode]);
    const results = await client(mode).checkBatch([{ subject }, { subject }]);
    assert.deepEqual(
      results.map((each) => !(each instanceof RequestRejected) && each.degraded),
      [mode, mode],
    );
  }
  const held = await client("open").hold({ subject, units: 1 });
  assert.equal(held.id, null);
  await held.commit(1);
  await assert.rejects(client("closed").hold({ subject, units: 1 }), Denied);
  await assert.rejects(
    client("raise").check({ subject }),
    (error) => error instanceof AgentUnavailable && error.message.includes(agent.url),
  );
});

test("an agent that is alive may take its time", async (context) => {
  const agent = await ScriptedAgent.serve(context, (response, request) => {
    void agent.probed.then(() => {
      answer(200, ALLOWED)(response, request);
    });
  });
  const options: ClientOptions = { onFailure: "raise", silenceMs: 2000, attempts: 1 };
  assert.ok((await new Client(agent.url, options).check({ subject })).allowed);
});

test("a silent agent is unavailable", async (context) => {
  const server = createServer(() => {}); // accepts, and says nothing
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  context.after(() => {
    server.close();
    server.closeAllConnections();
  });
  const url = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
  const client = new Client(url, { onFailure: "raise", silenceMs: 50, attempts: 1 });
  await assert.rejects(client.check({ subject }), /no sign of life/);
});

test("a caller that gives up gets its own reason", async (context) => {
  const agent = await ScriptedAgent.serve(context, () => {});
  const call = new Client(agent.url, { onFailure: "open" }).check({ subject }, { signal: AbortSignal.timeout(50) });
  await assert.rejects(call, { name: "TimeoutError" });
});

test("a token is sent", async (context) => {
  const agent = await ScriptedAgent.serve(context, (response, request) => {
    const isKnown = request.headers.authorization === "Bearer secret";
    answer(isKnown ? 200 : 401, isKnown ? ALLOWED : { title: "Token needed" })(response, request);
  });
  assert.ok((await new Client(agent.url, { token: "secret" }).check({ subject })).allowed);
  await assert.rejects(new Client(agent.url).check({ subject }), RequestRejected);
});

test("a token that changes is taken from a function", async (context) => {
  let valid = "first";
  const agent = await ScriptedAgent.serve(context, (response, request) => {
    const isKnown = request.headers.authorization === `Bearer ${valid}`;
    answer(isKnown ? 200 : 401, isKnown ? ALLOWED : { title: "Token needed" })(response, request);
  });
  const client = new Client(agent.url, { token: () => Promise.resolve(valid) });
  assert.ok((await client.check({ subject })).allowed);
  valid = "second";
  assert.ok((await client.check({ subject })).allowed);
  const token = () => {
    throw new Error("the issuer is away");
  };
  const failing = new Client(agent.url, { token, onFailure: "raise", attempts: 1 });
  await assert.rejects(failing.check({ subject }), /the issuer is away/);
});

test("another address is refused", () => {
  for (const url of ["", "ftp://agent", "127.0.0.1:8411", "http://agent/path"]) {
    assert.throws(() => new Client(url), TypeError);
  }
});

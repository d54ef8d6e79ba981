import assert from "node:assert/strict";
import { test } from "node:test";
import { Client, Denied, RequestRejected } from "../src/index.js";

const url = process.env.LEASEHOLD_AGENT_URL;
const skip = url === undefined ? "LEASEHOLD_AGENT_URL names no agent" : false;

/** Return a subject with an allowance of 100 exports of its own. */
function subject(tenant: string) {
  return { tenant: `ts-${tenant}`, route: "/v1/exports", method: "POST" };
}

test("checks are decided", { skip }, async () => {
  const client = new Client(url);
  const admitted = await client.check({ subject: subject("checks"), cost: 60 });
  assert.deepEqual([admitted.allowed, admitted.policies[0]?.remaining], [true, 40]);
  assert.equal(admitted.headers["x-ratelimit-remaining"], "40");
  const denied = await client.check({ subject: subject("checks"), cost: 60 });
  assert.deepEqual([denied.allowed, denied.deniedBy, denied.reason], [false, "export", "limit"]);
  assert.ok(denied.headers["retry-after"] && (denied.retryAfterMs ?? 0) > 0);
  const never = await client.check({ subject: subject("checks"), cost: 101 });
  assert.deepEqual([never.reason, never.retryAfterMs], ["never", null]);
});

test("an operation is charged once", { skip }, async () => {
  const client = new Client(url);
  for (let times = 0; times < 3; times++) {
    assert.ok((await client.check({ subject: subject("operation"), cost: 60, operation_id: "a" })).allowed);
  }
  await assert.rejects(
    client.check({ subject: subject("operation"), cost: 61, operation_id: "a" }),
    (error) => error instanceof RequestRejected && error.problem.type === "/problems/operation-conflict",
  );
});

test("a batch is answered in order", { skip }, async () => {
  const checks = [60, 60, -1, 40].map((cost) => ({ subject: subject("batch"), cost }));
  const results = await new Client(url).checkBatch(checks);
  const said = results.map((each) => (each instanceof RequestRejected ? each.status : each.allowed));
  assert.deepEqual(said, [true, false, 422, true]);
});

test("a hold is committed or released", { skip }, async () => {
  const client = new Client(url);
  const held = await client.hold({ subject: subject("hold"), units: 60 });
  await assert.rejects(client.hold({ subject: subject("hold"), units: 60 }), Denied);
  await held.extend(3_600_000);
  await held.commit(25);
  await held.commit(25);
  await held.release();
  await assert.rejects(held.commit(26), (error) => error instanceof RequestRejected && error.status === 409);
  {
    await using rest = await client.hold({ subject: subject("hold"), units: 75 });
    assert.ok(rest.id !== null && rest.expiresInMs > 0);
  }
  assert.ok((await client.check({ subject: subject("hold"), cost: 75 })).allowed);
});

test("a check is explained", { skip }, async () => {
  const client = new Client(url);
  const check = { subject: subject("explain"), costs: { exports: 9 } };
  const { policies } = await client.explain(check);
  const found = policies.find((each) => each.policy === "export");
  assert.deepEqual([found?.matches, found?.cost, found?.unmet], [true, 9, []]);
  const other = await client.explain({ subject: { ...check.subject, route: "/v1/nothing" } });
  assert.equal(other.policies.find((each) => each.policy === "export")?.unmet[0]?.condition, "match.route");
});

test("wait returns what cannot pass in time", { skip }, async () => {
  const client = new Client(url);
  const allowed: boolean[] = [];
  for (const cost of [100, 1, 101]) {
    allowed.push((await client.wait({ subject: subject("wait"), cost }, { timeoutMs: 60_000 })).allowed);
  }
  assert.deepEqual(allowed, [true, false, false]);
});

test("an invalid request is rejected with its field", { skip }, async () => {
  await assert.rejects(
    new Client(url, { onFailure: "open" }).check({ subject: subject("invalid"), cost: -1 }),
    (error) => error instanceof RequestRejected && error.problem.invalid_parameters?.[0]?.field === "cost",
  );
});

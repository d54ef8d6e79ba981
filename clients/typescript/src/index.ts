/**
 * Asks the agent of a region whether work may happen now.
 *
 *     const client = new Client("http://127.0.0.1:8411", { onFailure: "closed" });
 *     const subject = { tenant: "acme", route: "/v1/exports", method: "POST" };
 *     const decision = await client.check({ subject });
 *     if (!decision.allowed) { … } // decision.retryAfterMs says when to try again
 *
 * A call that fails is repeated with the same operation id, which is made once for each call unless the caller brings
 * one. So a call whose answer was lost is charged once. While the agent is away `onFailure` answers.
 */

export type { Check, Explanation, HoldRequest, PolicyAnswer, Subject } from "./client.js";
export { Client, Hold } from "./client.js";
export type { Decision, OnFailure, Problem } from "./decision.js";
export { AgentUnavailable, Denied, RequestRejected } from "./decision.js";
export type { ClientOptions } from "./transport.js";

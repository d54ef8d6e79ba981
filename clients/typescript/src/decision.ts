import type { components } from "./api.js";

type Schemas = components["schemas"];
export type Problem = Schemas["Problem"];
export type OnFailure = "closed" | "open" | "raise";

const RETRY_WITHOUT_AGENT_MS = 1000;
const FORWARDED = [
  "ratelimit-policy",
  "ratelimit",
  "x-ratelimit-limit",
  "x-ratelimit-remaining",
  "x-ratelimit-reset",
  "retry-after",
];

/** The agent's answer to a check, or the failure mode's: then `degraded` is set, and there are no `policies`. */
export interface Decision {
  allowed: boolean;
  /** The policy that denies. */
  deniedBy: string | null;
  /** Why it denies. */
  reason: Schemas["DenialCause"] | null;
  /** The field of the block that denies the request, before any policy. */
  blockedBy: Schemas["BlockField"] | null;
  /** The failure mode that decided. */
  degraded: "open" | "closed" | "local" | null;
  /** The first moment at which the request may pass, or null if it never can. */
  retryAfterMs: number | null;
  policies: Schemas["PolicyAnswer"][];
  /** RateLimit, X-RateLimit-… and Retry-After, to forward to the caller. */
  headers: Record<string, string>;
}

/** A hold was denied. */
export class Denied extends Error {
  constructor(readonly decision: Decision) {
    const when = decision.retryAfterMs === null ? "it can never pass" : `try again in ${decision.retryAfterMs} ms`;
    super(`denied by ${decision.deniedBy} (${decision.reason}); ${when}`);
    this.name = "Denied";
  }
}

/** The request is invalid. Repeating it changes nothing. */
export class RequestRejected extends Error {
  constructor(
    readonly status: number,
    readonly problem: Partial<Problem>,
  ) {
    super(`${status} ${problem.title ?? ""}: ${problem.detail ?? ""}`);
    this.name = "RequestRejected";
  }
}

/** The agent could not be called, or could not decide. */
export class AgentUnavailable extends Error {
  constructor(address: string, reason: string) {
    super(`${address}: ${reason}`);
    this.name = "AgentUnavailable";
  }
}

/** Return the failure mode's decision, or throw the error if it is none of an unavailable agent. */
export function decideWithoutAgent(onFailure: OnFailure, error: unknown): Decision {
  if (!(error instanceof AgentUnavailable) || onFailure === "raise") {
    throw error;
  }
  return {
    allowed: onFailure === "open",
    deniedBy: null,
    reason: null,
    blockedBy: null,
    degraded: onFailure,
    retryAfterMs: onFailure === "open" ? 0 : RETRY_WITHOUT_AGENT_MS,
    policies: [],
    headers: {},
  };
}

export function isDecision(body: unknown): body is Schemas["CheckAnswer"] {
  return typeof body === "object" && body !== null && "allowed" in body && typeof body.allowed === "boolean";
}

/** Return the decision in a response, which may be a denial with status 429 or 503. */
export function decisionOf(response: Response, body: unknown): Decision {
  if (!isDecision(body)) {
    throw rejectionOf(response.status, body);
  }
  const headers = FORWARDED.flatMap((name) => {
    const value = response.headers.get(name);
    return value === null ? [] : [[name, value] as const];
  });
  return decisionFrom(body, Object.fromEntries(headers));
}

export function decisionFrom(answer: Schemas["CheckAnswer"], headers: Record<string, string>): Decision {
  const denying = answer.policies.find((each) => each.policy === answer.denied_by && each.reason);
  return {
    allowed: answer.allowed,
    deniedBy: answer.denied_by,
    reason: denying?.reason ?? null,
    blockedBy: answer.blocked_by ?? null,
    degraded: answer.degraded,
    retryAfterMs: answer.retry_after_ms,
    policies: answer.policies,
    headers,
  };
}

export function rejectionOf(status: number, body: unknown): RequestRejected {
  const problem: Partial<Problem> = typeof body === "object" && body !== null ? body : {};
  return new RequestRejected(status, problem);
}

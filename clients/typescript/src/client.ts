import { randomUUID } from "node:crypto";
import createCalls, { type Client as Calls } from "openapi-fetch";
import type { components, paths } from "./api.js";
import {
  type Decision,
  Denied,
  decideWithoutAgent,
  decisionFrom,
  decisionOf,
  type OnFailure,
  RequestRejected,
  rejectionOf,
} from "./decision.js";
import { type ClientOptions, pauseAfter, sleep, Transport } from "./transport.js";

type Schemas = components["schemas"];
/** Who makes a request, and for what. Policies match these fields and count by them. */
export type Subject = Schemas["Subject"];
/** A request to decide whether something may happen now. Without an `operation_id` the client makes one. */
export type Check = Omit<Schemas["Check"], "mode"> & { mode?: Schemas["Check"]["mode"] };
/** Units to reserve for work whose cost is not known yet; for a minute, unless `ttl_ms` says otherwise. */
export type HoldRequest = Pick<Schemas["Hold"], "subject"> & Partial<Schemas["Hold"]>;
export type PolicyAnswer = Schemas["PolicyAnswer"];
/** For every policy whether it matches a request, and why not. */
export type Explanation = Schemas["ExplainAnswer"];

interface CallOptions {
  /** Ends the call, which then throws the signal's reason. */
  signal?: AbortSignal;
}

/** A client of one agent. */
export class Client {
  readonly #calls: Calls<paths>;
  readonly #onFailure: OnFailure;

  constructor(url = "http://127.0.0.1:8411", options: ClientOptions = {}) {
    const transport = new Transport(url, options);
    this.#calls = createCalls<paths>({ baseUrl: url, fetch: (request) => transport.fetch(request) });
    this.#onFailure = options.onFailure ?? "closed";
  }

  /** Decide whether a request may happen now, and consume its cost if it may. */
  async check(check: Check, { signal }: CallOptions = {}): Promise<Decision> {
    try {
      const { data, error, response } = await this.#calls.POST("/v1/check", { body: withOperation(check), signal });
      return decisionOf(response, data ?? error);
    } catch (error) {
      return decideWithoutAgent(this.#onFailure, error);
    }
  }

  /**
   * Decide up to 1,000 checks in order, each as it would be in a call of its own. A rejected check has its error in its
   * place, which is not thrown: others may have been charged.
   */
  async checkBatch(checks: Check[], { signal }: CallOptions = {}): Promise<(Decision | RequestRejected)[]> {
    const body = { checks: checks.map(withOperation) };
    try {
      const { data, error, response } = await this.#calls.POST("/v1/check:batch", { body, signal });
      if (data === undefined) {
        throw rejectionOf(response.status, error);
      }
      return data.items.map((item) =>
        item.answer ? decisionFrom(item.answer, {}) : new RequestRejected(item.status, item.problem ?? {}),
      );
    } catch (error) {
      const decision = decideWithoutAgent(this.#onFailure, error);
      return checks.map(() => decision);
    }
  }

  /** Tell for every policy whether it matches a check and, if not, why. A failure is thrown whatever `onFailure` says. */
  async explain(check: Check, { signal }: CallOptions = {}): Promise<Explanation> {
    const body = { mode: "enforce" as const, ...check };
    const { data, error, response } = await this.#calls.POST("/v1/explain", { body, signal });
    if (data === undefined) {
      throw rejectionOf(response.status, error);
    }
    return data;
  }

  /**
   * Repeat a check when the denials say so, until it is allowed, can never pass, or could pass only after `timeoutMs`.
   * Return the last decision.
   */
  async wait(check: Check, { timeoutMs, signal }: CallOptions & { timeoutMs: number }): Promise<Decision> {
    const deadlineMs = performance.now() + timeoutMs;
    const identified = withOperation(check);
    for (let attempt = 0; ; attempt++) {
      const decision = await this.check(identified, { signal });
      if (decision.allowed || decision.retryAfterMs === null) {
        return decision;
      }
      const pauseMs = Math.max(decision.retryAfterMs, pauseAfter(attempt));
      if (performance.now() + pauseMs > deadlineMs) {
        return decision;
      }
      await sleep(pauseMs, signal);
    }
  }

  /** Reserve units for work whose cost is not known yet. Throw Denied if there are not enough. */
  async hold(request: HoldRequest, { signal }: CallOptions = {}): Promise<Hold> {
    const body = { operation_id: randomUUID(), ttl_ms: 60_000, ...request };
    let decision: Decision;
    try {
      const { data, error, response } = await this.#calls.POST("/v1/holds", { body, signal });
      if (data !== undefined) {
        return new Hold(this.#calls, data.hold_id, data.units, data.expires_in_ms);
      }
      decision = decisionOf(response, error);
    } catch (error) {
      decision = decideWithoutAgent(this.#onFailure, error);
    }
    if (decision.allowed) {
      return new Hold(this.#calls, null, body.units ?? 0, body.ttl_ms);
    }
    throw new Denied(decision);
  }
}

/**
 * Units that nothing else can spend. `await using` releases them at the end of the block unless they were committed. The
 * `id` is null if the failure mode allowed the work, and then nothing is reserved.
 *
 * A failure is thrown whatever `onFailure` says: a commit that is lost is not billed.
 */
export class Hold implements AsyncDisposable {
  readonly #calls: Calls<paths>;
  #isCommitted = false;

  constructor(
    calls: Calls<paths>,
    readonly id: string | null,
    readonly units: number,
    readonly expiresInMs: number,
  ) {
    this.#calls = calls;
  }

  /**
   * Consume the units that were used, of each quota alike or by quota, also beyond the hold, and release the rest.
   * Repeating it changes nothing; another number is rejected.
   */
  async commit(used: number | { costs: Record<string, number> }): Promise<void> {
    if (this.id !== null) {
      const params = { path: { hold_id: this.id } };
      const body = typeof used === "number" ? { units: used } : used;
      raiseRejection(await this.#calls.POST("/v1/holds/{hold_id}:commit", { params, body }));
    }
    this.#isCommitted = true;
  }

  /** Let the hold last at least so long from now on. */
  async extend(ttlMs: number): Promise<void> {
    if (this.id !== null) {
      const params = { path: { hold_id: this.id } };
      raiseRejection(await this.#calls.POST("/v1/holds/{hold_id}:extend", { params, body: { ttl_ms: ttlMs } }));
    }
  }

  /** Give all units back. It does nothing after a commit. */
  async release(): Promise<void> {
    if (this.id !== null && !this.#isCommitted) {
      const params = { path: { hold_id: this.id } };
      raiseRejection(await this.#calls.POST("/v1/holds/{hold_id}:release", { params, body: {} }));
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.release();
  }
}

/** Return the check with an operation id, under which a repetition is charged once. */
function withOperation(check: Check): Schemas["Check"] {
  const identified = { mode: "enforce" as const, ...check };
  return identified.mode === "peek" ? identified : { ...identified, operation_id: check.operation_id ?? randomUUID() };
}

function raiseRejection({ response, error }: { response: Response; error?: unknown }): void {
  if (!response.ok) {
    throw rejectionOf(response.status, error);
  }
}

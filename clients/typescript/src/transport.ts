import { CircuitBreaker } from "./breaker.js";
import { AgentUnavailable, isDecision, type OnFailure } from "./decision.js";

const FIRST_PAUSE_MS = 50;
const LONGEST_PAUSE_MS = 60_000;

export interface ClientOptions {
  /** Sent as a bearer token; a function returns the one of each attempt. If it throws, `onFailure` answers. */
  token?: string | (() => string | Promise<string>);
  /** What answers while the agent is away; "closed" by default. */
  onFailure?: OnFailure;
  /** How long the agent may give no sign of life; a second by default. While it answers /healthz a call goes on
   * waiting, as a policy's `wait` asks for. */
  silenceMs?: number;
  /** The bound of a call that the agent does not answer although it is alive; a minute by default. */
  longestWaitMs?: number;
  /** How often a call is sent before the failure mode answers; 3 by default. */
  attempts?: number;
  /** How many times in a row the agent may give no sign of life before the failure mode answers at once; 5 by default. */
  breakerFailures?: number;
  /** How long the failure mode answers then, before one call is let through on trial; a second by default. */
  breakerPauseMs?: number;
  /** Replaces the connections, for example to trust a certificate authority of your own. */
  fetch?: typeof fetch;
}

/** A response without a decision, as from an agent that has just started. */
class FailedResponse extends Error {
  constructor(
    readonly status: number,
    body: string,
    readonly retryAfterMs: number,
  ) {
    super(`the agent answered ${status}: ${body}`);
  }
}

/** The agent gave signs of life, and no answer. */
class TooSlow extends Error {}

/** Sends each request until it is answered: after a failure again, with the same body and so the same operation id. */
export class Transport {
  readonly #address: string;
  readonly #token: ClientOptions["token"];
  readonly #silenceMs: number;
  readonly #longestWaitMs: number;
  readonly #attempts: number;
  readonly #fetch: typeof fetch;
  readonly #breaker: CircuitBreaker;

  constructor(address: string, options: ClientOptions) {
    if (!/^https?:\/\/[^/?#]+\/?$/.test(address)) {
      throw new TypeError(`url: ${JSON.stringify(address)} is not http(s)://host:port`);
    }
    this.#address = address.replace(/\/$/, "");
    this.#token = options.token;
    this.#silenceMs = options.silenceMs ?? 1000;
    this.#longestWaitMs = Math.max(this.#silenceMs, options.longestWaitMs ?? 60_000);
    this.#attempts = options.attempts ?? 3;
    this.#fetch = options.fetch ?? fetch;
    this.#breaker = new CircuitBreaker(options.breakerFailures, options.breakerPauseMs);
  }

  /** Fetch a response that was decided, or throw AgentUnavailable, or the reason of the caller's own signal. */
  async fetch(request: Request): Promise<Response> {
    for (let attempt = 1; ; attempt++) {
      if (!this.#breaker.mayCall(performance.now())) {
        throw new AgentUnavailable(this.#address, "the circuit breaker is open after several calls without an answer");
      }
      try {
        const response = await this.#send(request.clone());
        this.#breaker.succeeded();
        return response;
      } catch (error) {
        request.signal.throwIfAborted();
        if (error instanceof FailedResponse) {
          this.#breaker.succeeded();
        } else if (!(error instanceof TooSlow)) {
          this.#breaker.failed(performance.now());
        }
        const asked = error instanceof FailedResponse ? error.retryAfterMs : 0;
        const pauseMs = Math.max(asked, pauseAfter(attempt - 1));
        if (attempt >= this.#attempts || pauseMs > 2 * this.#silenceMs) {
          throw new AgentUnavailable(this.#address, messageOf(error));
        }
        await sleep(pauseMs, request.signal);
      }
    }
  }

  async #send(request: Request): Promise<Response> {
    const aborting = new AbortController();
    const watch = setTimeout(() => void this.#watch(aborting), this.#silenceMs);
    try {
      const token = typeof this.#token === "function" ? await this.#token() : this.#token;
      if (token !== undefined) {
        request.headers.set("Authorization", `Bearer ${token}`);
      }
      const signal = AbortSignal.any([request.signal, aborting.signal]);
      const response = await this.#fetch(request, { signal });
      const body = await response.text();
      if (response.status >= 500 && !isDecision(parsed(body))) {
        const seconds = Number(response.headers.get("Retry-After"));
        throw new FailedResponse(response.status, body, seconds > 0 ? seconds * 1000 : 0);
      }
      return new Response(body === "" ? null : body, { status: response.status, headers: response.headers });
    } finally {
      clearTimeout(watch);
      aborting.abort();
    }
  }

  /** Abort a call when the agent gives no sign of life, or when the call takes longer than any should. */
  async #watch(call: AbortController): Promise<void> {
    const deadlineMs = performance.now() + this.#longestWaitMs - this.#silenceMs;
    while (!call.signal.aborted) {
      if (performance.now() >= deadlineMs) {
        call.abort(new TooSlow("the agent is alive, and did not answer in time"));
        return;
      }
      try {
        const signal = AbortSignal.any([call.signal, AbortSignal.timeout(this.#silenceMs)]);
        await (await this.#fetch(`${this.#address}/healthz`, { signal })).text();
      } catch (error) {
        call.abort(new Error(`the agent gave no sign of life: ${messageOf(error)}`));
        return;
      }
      const leftMs = Math.max(0, deadlineMs - performance.now());
      await sleep(Math.min(this.#silenceMs, leftMs), call.signal).catch(() => undefined);
    }
  }
}

/** Return the pause before the next attempt: doubling, and spread by a tenth. */
export function pauseAfter(attempt: number): number {
  return Math.min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS * 2 ** attempt) * (1 + Math.random() / 10);
}

/** Wait, or throw the reason of the signal. */
export function sleep(ms: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const stop = () => {
      clearTimeout(timer);
      const reason: unknown = signal?.reason;
      reject(reason instanceof Error ? reason : new Error(String(reason)));
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", stop);
      resolve();
    }, ms);
    if (signal?.aborted) {
      stop();
    }
    signal?.addEventListener("abort", stop, { once: true });
  });
}

function parsed(body: string): unknown {
  try {
    return JSON.parse(body);
  } catch {
    return undefined;
  }
}

/** Return what happened: fetch hides it in the cause of "fetch failed". */
function messageOf(error: unknown): string {
  const found = error instanceof Error && error.cause instanceof Error ? error.cause : error;
  return found instanceof Error ? found.message || found.name : String(found);
}

/**
 * Allows calls while the agent gives signs of life, and stops them for a pause after so many failures in a row. After the
 * pause one call at a time is let through on trial.
 */
export class CircuitBreaker {
  #failuresInRow = 0;
  #openUntilMs = 0;

  constructor(
    readonly failures = 5,
    readonly pauseMs = 1000,
  ) {}

  /** Tell whether to call the agent now. After the pause one caller gets true, and makes the trial call. */
  mayCall(nowMs: number): boolean {
    if (this.#failuresInRow < this.failures) {
      return true;
    }
    if (nowMs < this.#openUntilMs) {
      return false;
    }
    this.#openUntilMs = nowMs + this.pauseMs;
    return true;
  }

  /** Record that the agent answered, which closes the breaker. */
  succeeded(): void {
    this.#failuresInRow = 0;
  }

  /** Record that the agent gave no sign of life. */
  failed(nowMs: number): void {
    this.#failuresInRow += 1;
    if (this.#failuresInRow >= this.failures) {
      this.#openUntilMs = nowMs + this.pauseMs;
    }
  }
}

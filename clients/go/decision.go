package leasehold

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	"leasehold/client/api"
)

// FailureMode says what the client answers while the agent is away.
type FailureMode int

const (
	Closed FailureMode = iota // deny
	Open                      // allow
	Raise                     // return an *UnavailableError
)

const retryWithoutAgent = time.Second

// Decision is the agent's answer to a check, or the failure mode's: then Degraded is set, and there are no Policies.
type Decision struct {
	Allowed    bool
	DeniedBy   string        // the policy that denies
	Reason     string        // why: limit, no_lease, cut_off, drained, expired, never or store
	BlockedBy  string        // the field of the block that denies the request, before any policy
	Degraded   string        // open, closed or local: the failure mode that decided
	RetryAfter time.Duration // the first moment at which the request may pass
	Never      bool          // the request can never pass: a retry is useless
	Policies   []api.PolicyAnswer
	Header     http.Header // RateLimit, X-RateLimit-… and Retry-After, to forward to the caller
}

// Result is the decision of one check of a batch, or the *RejectedError with which it was refused.
type Result struct {
	Decision Decision
	Err      error
}

// DeniedError says that a hold was denied.
type DeniedError struct{ Decision Decision }

func (e *DeniedError) Error() string {
	when := fmt.Sprintf("try again in %s", e.Decision.RetryAfter)
	if e.Decision.Never {
		when = "it can never pass"
	}
	return fmt.Sprintf("leasehold: denied by %q (%s); %s", e.Decision.DeniedBy, e.Decision.Reason, when)
}

// RejectedError says that the request is invalid. Repeating it changes nothing.
type RejectedError struct {
	Status  int
	Problem api.Problem
}

func (e *RejectedError) Error() string {
	return fmt.Sprintf("leasehold: %d %s: %s", e.Status, e.Problem.Title, e.Problem.Detail)
}

// UnavailableError says that the agent could not be called, or could not decide.
type UnavailableError struct {
	Address string
	Err     error
}

func (e *UnavailableError) Error() string { return fmt.Sprintf("leasehold: %s: %s", e.Address, e.Err) }

func (e *UnavailableError) Unwrap() error { return e.Err }

func (c *Client) decideWithoutAgent(ctx context.Context, err error) (Decision, error) {
	if ctx.Err() != nil {
		return Decision{}, ctx.Err() // the caller gave up, which says nothing about the agent
	}
	switch c.onFailure {
	case Open:
		return Decision{Allowed: true, Degraded: "open"}, nil
	case Closed:
		return Decision{Degraded: "closed", RetryAfter: retryWithoutAgent}, nil
	default:
		return Decision{}, unwrapURLError(err)
	}
}

// unwrapURLError returns the *UnavailableError inside what net/http and the generated calls make of it.
func unwrapURLError(err error) error {
	var wrapped *url.Error
	if errors.As(err, &wrapped) {
		err = wrapped.Err
	}
	return err
}

// forwarded are the headers that a service passes on to its own callers.
var forwarded = []string{
	"RateLimit-Policy", "RateLimit", "X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset", "Retry-After",
}

func decisionOf(response *http.Response) (Decision, error) {
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return Decision{}, fmt.Errorf("leasehold: %w", err)
	}
	if response.StatusCode != http.StatusOK && !isDecision(body) {
		return Decision{}, rejectionFrom(response.StatusCode, body)
	}
	var answer api.CheckAnswer
	if err := json.Unmarshal(body, &answer); err != nil {
		return Decision{}, fmt.Errorf("leasehold: the agent answered %d with an unreadable body: %w", response.StatusCode, err)
	}
	decision := decisionFrom(answer)
	for _, name := range forwarded {
		if value := response.Header.Get(name); value != "" {
			decision.Header.Set(name, value)
		}
	}
	return decision, nil
}

func decisionFrom(answer api.CheckAnswer) Decision {
	decision := Decision{
		Allowed:   answer.Allowed,
		DeniedBy:  value(answer.DeniedBy),
		BlockedBy: string(value(answer.BlockedBy)),
		Degraded:  string(value(answer.Degraded)),
		Policies:  answer.Policies,
		Header:    http.Header{},
	}
	if answer.RetryAfterMs == nil {
		decision.Never = true
	} else {
		decision.RetryAfter = time.Duration(*answer.RetryAfterMs) * time.Millisecond
	}
	for _, policy := range answer.Policies {
		if policy.Policy == decision.DeniedBy && decision.Reason == "" {
			decision.Reason = string(value(policy.Reason))
		}
	}
	return decision
}

// value returns what a pointer leads to, or the zero value.
func value[T any](pointer *T) T {
	if pointer == nil {
		var zero T
		return zero
	}
	return *pointer
}

func resultsOf(response *http.Response) ([]Result, error) {
	var batch api.BatchAnswer
	if err := decode(response, &batch); err != nil {
		return nil, err
	}
	results := make([]Result, len(batch.Items))
	for i, item := range batch.Items {
		if item.Answer != nil {
			results[i].Decision = decisionFrom(*item.Answer)
			continue
		}
		body, err := json.Marshal(item.Problem)
		if err != nil {
			return nil, fmt.Errorf("leasehold: %w", err)
		}
		results[i].Err = rejectionFrom(int(item.Status), body)
	}
	return results, nil
}

func rejectionOf(response *http.Response) error {
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return fmt.Errorf("leasehold: %w", err)
	}
	return rejectionFrom(response.StatusCode, body)
}

func rejectionFrom(status int, body []byte) error {
	rejection := &RejectedError{Status: status}
	if err := json.Unmarshal(body, &rejection.Problem); err != nil {
		rejection.Problem.Title = http.StatusText(status)
	}
	return rejection
}

// isDecision tells an answer, which may be a denial with status 429 or 503, from other problem documents.
func isDecision(body []byte) bool {
	var found struct {
		Allowed *bool `json:"allowed"`
	}
	return json.Unmarshal(body, &found) == nil && found.Allowed != nil
}

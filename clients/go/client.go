// Package leasehold asks the agent of a region whether work may happen now.
//
//	client, err := leasehold.New("http://127.0.0.1:8411", leasehold.Options{OnFailure: leasehold.Closed})
//	export := leasehold.Subject{Tenant: "acme", Route: "/v1/exports", Method: "POST"}
//	decision, err := client.Check(ctx, leasehold.Check{Subject: export})
//	if !decision.Allowed { … } // decision.RetryAfter says when to try again
//
// A call that fails is repeated with the same operation id, which is made once for each call unless the caller brings
// one. So a call whose answer was lost is charged once. While the agent is away Options.OnFailure answers.
package leasehold

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"leasehold/client/api"
)

// Subject says who makes a request, and for what. Policies match these fields and count by them.
type Subject = api.Subject

// Check is a request to decide whether something may happen now. Without an OperationID the client makes one.
type Check = api.Check

// Explanation says for every policy whether it matches a request, and why not.
type Explanation = api.ExplainAnswer

// HoldRequest reserves Units for work whose cost is not known yet. Without a TTLMs it lasts a minute.
type HoldRequest = api.Hold

// Client asks one agent. Any number of goroutines may share it.
type Client struct {
	api       *api.Client
	address   string
	onFailure FailureMode
}

// New returns a client of the agent at http://host:port, https://host:port or unix:///path/of/a/socket.
func New(address string, options Options) (*Client, error) {
	transport, base, err := newTransport(address, options)
	if err != nil {
		return nil, err
	}
	calls, err := api.NewClient(base, api.WithHTTPClient(transport))
	if err != nil {
		return nil, fmt.Errorf("leasehold: %w", err)
	}
	return &Client{api: calls, address: address, onFailure: options.OnFailure}, nil
}

// Check decides whether a request may happen now, and consumes its cost if it may. A denial is a Decision, not an error.
// The error is a *RejectedError for an invalid request, or the context's. While the agent is away the failure mode
// decides; the error is an *UnavailableError if it is Raise.
func (c *Client) Check(ctx context.Context, check Check) (Decision, error) {
	response, err := c.api.Check(ctx, withOperation(check))
	if err != nil {
		return c.decideWithoutAgent(ctx, err)
	}
	return decisionOf(response)
}

// CheckBatch decides up to 1,000 checks in order, each as it would be in a call of its own. A rejected check has an
// error in its place, for others may have been charged.
func (c *Client) CheckBatch(ctx context.Context, checks []Check) ([]Result, error) {
	identified := make([]Check, len(checks))
	for i, check := range checks {
		identified[i] = withOperation(check)
	}
	response, err := c.api.CheckBatch(ctx, api.CheckBatch{Checks: identified})
	if err != nil {
		decision, err := c.decideWithoutAgent(ctx, err)
		if err != nil {
			return nil, err
		}
		results := make([]Result, len(checks))
		for i := range results {
			results[i].Decision = decision
		}
		return results, nil
	}
	return resultsOf(response)
}

// Explain tells for every policy whether it matches a check and, if not, why. Nothing is consumed. While the agent is away
// the error is an *UnavailableError, whatever the failure mode.
func (c *Client) Explain(ctx context.Context, check Check) (Explanation, error) {
	response, err := c.api.Explain(ctx, check)
	if err != nil {
		return Explanation{}, unwrapURLError(err)
	}
	var explanation Explanation
	err = decode(response, &explanation)
	return explanation, err
}

// Wait repeats a check when the denials say so, until it is allowed, can never pass, or the context would end before the
// next moment at which it may pass. It returns the last decision. Give the context a deadline.
func (c *Client) Wait(ctx context.Context, check Check) (Decision, error) {
	check = withOperation(check)
	for attempt := 0; ; attempt++ {
		decision, err := c.Check(ctx, check)
		if err != nil || decision.Allowed || decision.Never {
			return decision, err
		}
		pause := max(decision.RetryAfter, pauseAfter(attempt))
		if deadline, ok := ctx.Deadline(); ok && time.Now().Add(pause).After(deadline) {
			return decision, nil
		}
		if err := sleep(ctx, pause); err != nil {
			return decision, err
		}
	}
}

// Hold reserves units for work whose cost is not known yet. If there are not enough the error is a *DeniedError.
func (c *Client) Hold(ctx context.Context, request HoldRequest) (*Hold, error) {
	if request.OperationID == "" {
		request.OperationID = rand.Text()
	}
	if request.TTLMs == 0 {
		request.TTLMs = int(time.Minute.Milliseconds())
	}
	response, err := c.api.CreateHold(ctx, request)
	if err != nil {
		decision, err := c.decideWithoutAgent(ctx, err)
		if err != nil {
			return nil, err
		}
		if !decision.Allowed {
			return nil, &DeniedError{Decision: decision}
		}
		return &Hold{client: c, Units: request.Units, ExpiresIn: time.Duration(request.TTLMs) * time.Millisecond}, nil
	}
	if response.StatusCode != http.StatusCreated {
		decision, err := decisionOf(response)
		if err != nil {
			return nil, err
		}
		return nil, &DeniedError{Decision: decision}
	}
	var answer api.HoldAnswer
	if err := decode(response, &answer); err != nil {
		return nil, err
	}
	expiresIn := time.Duration(answer.ExpiresInMs) * time.Millisecond
	return &Hold{client: c, ID: answer.HoldID, Units: answer.Units, ExpiresIn: expiresIn}, nil
}

// Hold is a number of units that nothing else can spend. The ID is empty if the failure mode allowed the work, and then
// nothing is reserved.
type Hold struct {
	ID        string
	Units     int64
	ExpiresIn time.Duration

	client      *Client
	isCommitted bool
}

// Commit consumes the units that were used, also beyond the hold, and releases the rest. Repeating it changes nothing;
// another number is rejected. A failure is an error whatever the failure mode: a commit that is lost is not billed.
func (h *Hold) Commit(ctx context.Context, units int64) error {
	return h.commit(ctx, api.HoldCommit{Units: &units})
}

// CommitCosts consumes what was used of each quota, as Commit does for all of them alike.
func (h *Hold) CommitCosts(ctx context.Context, costs map[string]int64) error {
	return h.commit(ctx, api.HoldCommit{Costs: &costs})
}

func (h *Hold) commit(ctx context.Context, used api.HoldCommit) error {
	err := h.change(func() (*http.Response, error) { return h.client.api.CommitHold(ctx, h.ID, used) })
	h.isCommitted = h.isCommitted || err == nil
	return err
}

// Extend lets the hold last at least so long from now on.
func (h *Hold) Extend(ctx context.Context, ttl time.Duration) error {
	return h.change(func() (*http.Response, error) {
		return h.client.api.ExtendHold(ctx, h.ID, api.HoldExtension{TTLMs: int(ttl.Milliseconds())})
	})
}

// Release gives all units back. It does nothing after a commit, so that it can be deferred.
func (h *Hold) Release(ctx context.Context) error {
	if h.isCommitted {
		return nil
	}
	return h.change(func() (*http.Response, error) {
		return h.client.api.ReleaseHold(ctx, h.ID, api.HoldRelease{})
	})
}

func (h *Hold) change(call func() (*http.Response, error)) error {
	if h.ID == "" {
		return nil
	}
	response, err := call()
	if err != nil {
		return unwrapURLError(err)
	}
	var status api.HoldStatus
	return decode(response, &status)
}

// withOperation returns the check with an operation id, under which a repetition is charged once.
func withOperation(check Check) Check {
	if check.OperationID == "" && check.Mode != api.CheckModePeek {
		check.OperationID = rand.Text()
	}
	return check
}

// decode reads the body of a success into a value, and returns a *RejectedError for any other response.
func decode(response *http.Response, value any) error {
	if response.StatusCode >= http.StatusBadRequest {
		return rejectionOf(response)
	}
	if err := json.NewDecoder(response.Body).Decode(value); err != nil {
		return fmt.Errorf("leasehold: the agent answered %d with an unreadable body: %w", response.StatusCode, err)
	}
	return nil
}

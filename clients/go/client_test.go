package leasehold_test

import (
	"context"
	"errors"
	"net/http"
	"os"
	"testing"
	"time"

	leasehold "leasehold/client"
)

// agent returns the address of a running agent, whose tenants have 100 exports each.
func agent(t *testing.T) string {
	t.Helper()
	address := os.Getenv("LEASEHOLD_AGENT_URL")
	if address == "" {
		t.Skip("LEASEHOLD_AGENT_URL names no agent")
	}
	return address
}

func connect(t *testing.T, address string, options leasehold.Options) *leasehold.Client {
	t.Helper()
	client, err := leasehold.New(address, options)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// export returns a subject with an allowance of its own for each test.
func export(t *testing.T) leasehold.Subject {
	return leasehold.Subject{Tenant: t.Name(), Route: "/v1/exports", Method: "POST"}
}

func TestChecksAreDecided(t *testing.T) {
	client := connect(t, agent(t), leasehold.Options{})
	admitted, err := client.Check(t.Context(), leasehold.Check{Subject: export(t), Cost: 60})
	if err != nil || !admitted.Allowed || admitted.Policies[0].Remaining != 40 {
		t.Fatalf("admitted: %+v, %v", admitted, err)
	}
	if admitted.Header.Get("X-RateLimit-Remaining") != "40" || admitted.Header.Get("Retry-After") != "" {
		t.Fatalf("headers: %v", admitted.Header)
	}
	denied, err := client.Check(t.Context(), leasehold.Check{Subject: export(t), Cost: 60})
	if err != nil || denied.Allowed || denied.DeniedBy != "export" || denied.Reason != "limit" || denied.RetryAfter <= 0 {
		t.Fatalf("denied: %+v, %v", denied, err)
	}
	if denied.Header.Get("Retry-After") == "" {
		t.Fatalf("headers: %v", denied.Header)
	}
	never, err := client.Check(t.Context(), leasehold.Check{Subject: export(t), Cost: 101})
	if err != nil || !never.Never || never.Reason != "never" {
		t.Fatalf("never: %+v, %v", never, err)
	}
}

func TestAnOperationIsChargedOnce(t *testing.T) {
	client := connect(t, agent(t), leasehold.Options{})
	for range 3 {
		decision, err := client.Check(t.Context(), leasehold.Check{Subject: export(t), Cost: 60, OperationID: "a"})
		if err != nil || !decision.Allowed {
			t.Fatalf("%+v, %v", decision, err)
		}
	}
	_, err := client.Check(t.Context(), leasehold.Check{Subject: export(t), Cost: 61, OperationID: "a"})
	var rejected *leasehold.RejectedError
	if !errors.As(err, &rejected) || rejected.Status != http.StatusUnprocessableEntity {
		t.Fatalf("another body: %v", err)
	}
	if rejected.Problem.Type != "/problems/operation-conflict" {
		t.Fatalf("another body: %+v", rejected.Problem)
	}
}

func TestABatchIsAnsweredInOrder(t *testing.T) {
	client := connect(t, agent(t), leasehold.Options{})
	checks := []leasehold.Check{
		{Subject: export(t), Cost: 60},
		{Subject: export(t), Cost: 60},
		{Subject: export(t), Cost: -1},
		{Subject: export(t), Cost: 40},
	}
	results, err := client.CheckBatch(t.Context(), checks)
	if err != nil || len(results) != len(checks) {
		t.Fatalf("%v, %v", results, err)
	}
	var rejected *leasehold.RejectedError
	if !errors.As(results[2].Err, &rejected) || rejected.Status != http.StatusUnprocessableEntity {
		t.Fatalf("the third: %+v", results[2])
	}
	if !results[0].Decision.Allowed || results[1].Decision.Allowed || !results[3].Decision.Allowed {
		t.Fatalf("%+v", results)
	}
}

func TestAHoldIsCommittedOrReleased(t *testing.T) {
	client := connect(t, agent(t), leasehold.Options{})
	held, err := client.Hold(t.Context(), leasehold.HoldRequest{Subject: export(t), Units: 60})
	if err != nil || held.ID == "" || held.ExpiresIn <= 0 {
		t.Fatalf("%+v, %v", held, err)
	}
	_, err = client.Hold(t.Context(), leasehold.HoldRequest{Subject: export(t), Units: 60})
	var denied *leasehold.DeniedError
	if !errors.As(err, &denied) || denied.Decision.DeniedBy != "export" {
		t.Fatalf("%v", err)
	}
	if err := held.Extend(t.Context(), time.Hour); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := held.Commit(t.Context(), 25); err != nil {
			t.Fatal(err)
		}
	}
	if err := held.Release(t.Context()); err != nil {
		t.Fatalf("after a commit it does nothing: %v", err)
	}
	var rejected *leasehold.RejectedError
	if err := held.Commit(t.Context(), 26); !errors.As(err, &rejected) || rejected.Status != http.StatusConflict {
		t.Fatalf("another commit: %v", err)
	}
	rest, err := client.Hold(t.Context(), leasehold.HoldRequest{Subject: export(t), Units: 75})
	if err != nil {
		t.Fatal(err)
	}
	if err := rest.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if decision, err := client.Check(t.Context(), leasehold.Check{Subject: export(t), Cost: 75}); err != nil || !decision.Allowed {
		t.Fatalf("%+v, %v", decision, err)
	}
}

func TestACheckIsExplained(t *testing.T) {
	client := connect(t, agent(t), leasehold.Options{})
	check := leasehold.Check{Subject: export(t), Costs: map[string]int64{"exports": 9}}
	explanation, err := client.Explain(t.Context(), check)
	if err != nil {
		t.Fatal(err)
	}
	for _, policy := range explanation.Policies {
		if policy.Policy == "export" && (!policy.Matches || policy.Cost != 9 || len(policy.Unmet) != 0) {
			t.Fatalf("%+v", policy)
		}
	}
	check.Subject.Route = "/v1/nothing"
	explanation, err = client.Explain(t.Context(), check)
	if err != nil || explanation.Policies[0].Matches || explanation.Policies[0].Unmet[0].Condition != "match.route" {
		t.Fatalf("%+v, %v", explanation, err)
	}
}

func TestWaitReturnsWhatCannotPassInTime(t *testing.T) {
	client := connect(t, agent(t), leasehold.Options{})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for _, cost := range []int64{100, 1, 101} { // all of it; too late, at the end of the month; never
		decision, err := client.Wait(ctx, leasehold.Check{Subject: export(t), Cost: cost})
		if err != nil || decision.Allowed != (cost == 100) {
			t.Fatalf("cost %d: %+v, %v", cost, decision, err)
		}
	}
	if ctx.Err() != nil {
		t.Fatal("it waited for what cannot pass in time")
	}
}

func TestAnInvalidRequestIsRejected(t *testing.T) {
	client := connect(t, agent(t), leasehold.Options{OnFailure: leasehold.Open})
	_, err := client.Check(t.Context(), leasehold.Check{Subject: export(t), Cost: -1})
	var rejected *leasehold.RejectedError
	if !errors.As(err, &rejected) || rejected.Problem.InvalidParameters[0].Field != "cost" {
		t.Fatalf("%v", err)
	}
}

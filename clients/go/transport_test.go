package leasehold_test

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	leasehold "leasehold/client"
)

const allowed = `{"allowed":true,"degraded":null,"policies":[],"denied_by":null,"retry_after_ms":0}`

// scriptedAgent answers checks with one handler after the other, and keeps the operation ids that it got.
type scriptedAgent struct {
	*httptest.Server
	mutex      sync.Mutex
	handlers   []http.HandlerFunc
	operations []string
	times      []time.Time
	probed     chan<- struct{} // gets a value when the client has asked for a sign of life
}

func serve(t *testing.T, handlers ...http.HandlerFunc) *scriptedAgent {
	t.Helper()
	agent := &scriptedAgent{handlers: handlers}
	agent.Server = httptest.NewServer(agent)
	t.Cleanup(func() { agent.CloseClientConnections(); agent.Close() })
	return agent
}

func (a *scriptedAgent) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/healthz" {
		_, _ = w.Write([]byte("{}"))
		if a.probed != nil {
			a.probed <- struct{}{}
		}
		return
	}
	var body struct {
		OperationID string `json:"operation_id"`
	}
	_ = json.NewDecoder(r.Body).Decode(&body)
	a.mutex.Lock()
	a.operations = append(a.operations, body.OperationID)
	a.times = append(a.times, time.Now())
	handler := a.handlers[min(len(a.operations), len(a.handlers))-1]
	a.mutex.Unlock()
	handler(w, r)
}

func answer(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		if status == http.StatusServiceUnavailable {
			w.Header().Set("Retry-After", "1")
		}
		w.WriteHeader(status)
		_, _ = w.Write([]byte(body))
	}
}

func hangUp(w http.ResponseWriter, _ *http.Request) {
	connection, _, err := w.(http.Hijacker).Hijack()
	if err == nil {
		_ = connection.Close()
	}
}

func TestAnAnswerOfANewerAgentIsReadAsFarAsItIsKnown(t *testing.T) {
	agent := serve(t, answer(429, `{"allowed":false,"degraded":"neighbour","policies":[{"policy":"export","quota":"exports",
		"kind":"budget","allowed":false,"limit":1,"share":1,"remaining":0,"reset_ms":1,"retry_after_ms":1,"reason":"over_budget",
		"added":[1]}],"denied_by":"export","retry_after_ms":1,"blocked_by":"country","added":{"deep":null}}`))
	client := connect(t, agent.URL, leasehold.Options{OnFailure: leasehold.Raise})
	decision, err := client.Check(t.Context(), leasehold.Check{Subject: export(t)})
	if err != nil || decision.Allowed || decision.Degraded != "neighbour" || decision.Reason != "over_budget" {
		t.Fatalf("%+v, %v", decision, err)
	}
}

func TestALostCallIsRepeatedUnderTheSameOperation(t *testing.T) {
	agent := serve(t, hangUp, answer(500, `{"title":"oops"}`), answer(200, allowed))
	client := connect(t, agent.URL, leasehold.Options{OnFailure: leasehold.Raise})
	decision, err := client.Check(t.Context(), leasehold.Check{Subject: export(t)})
	if err != nil || !decision.Allowed {
		t.Fatalf("%+v, %v", decision, err)
	}
	if len(agent.operations) != 3 || agent.operations[0] == "" {
		t.Fatalf("operations: %q", agent.operations)
	}
	for _, operation := range agent.operations {
		if operation != agent.operations[0] {
			t.Fatalf("operations: %q", agent.operations)
		}
	}
	if _, err := client.Check(t.Context(), leasehold.Check{Subject: export(t)}); err != nil {
		t.Fatal(err)
	}
	if agent.operations[3] == agent.operations[0] {
		t.Fatal("two calls have one operation id")
	}
}

// breaking returns a client whose breaker opens after two calls without a sign of life.
func breaking(t *testing.T, agent *scriptedAgent, pause time.Duration) *leasehold.Client {
	t.Helper()
	options := leasehold.Options{OnFailure: leasehold.Raise, Attempts: 1, BreakerFailures: 2, BreakerPause: pause}
	return connect(t, agent.URL, options)
}

func TestTheBreakerStopsCallsToAnAgentThatIsAway(t *testing.T) {
	agent := serve(t, hangUp)
	client := breaking(t, agent, time.Hour)
	for range 4 {
		var unavailable *leasehold.UnavailableError
		if _, err := client.Check(t.Context(), leasehold.Check{Subject: export(t)}); !errors.As(err, &unavailable) {
			t.Fatalf("%v", err)
		}
	}
	if len(agent.operations) != 2 {
		t.Fatalf("%d calls", len(agent.operations))
	}
}

func TestAnyAnswerKeepsTheBreakerClosed(t *testing.T) {
	agent := serve(t, hangUp, answer(500, `{"title":"oops"}`), hangUp, answer(200, allowed))
	client := breaking(t, agent, time.Hour)
	for call := range 4 {
		decision, err := client.Check(t.Context(), leasehold.Check{Subject: export(t)})
		if decision.Allowed != (call == 3) || (err == nil) != (call == 3) {
			t.Fatalf("call %d: %+v, %v", call, decision, err)
		}
	}
}

func TestATrialClosesTheBreaker(t *testing.T) {
	agent := serve(t, hangUp, hangUp, answer(200, allowed))
	client := breaking(t, agent, time.Millisecond)
	check := leasehold.Check{Subject: export(t)}
	for decision, _ := client.Check(t.Context(), check); !decision.Allowed; decision, _ = client.Check(t.Context(), check) {
		time.Sleep(time.Millisecond)
	}
	if decision, err := client.Check(t.Context(), check); err != nil || !decision.Allowed {
		t.Fatalf("%+v, %v", decision, err)
	}
}

func TestRetryAfterIsHonoured(t *testing.T) {
	agent := serve(t, answer(503, `{"title":"Not ready"}`), answer(200, allowed))
	client := connect(t, agent.URL, leasehold.Options{})
	if decision, err := client.Check(t.Context(), leasehold.Check{Subject: export(t)}); err != nil || !decision.Allowed {
		t.Fatalf("%+v, %v", decision, err)
	}
	if pause := agent.times[1].Sub(agent.times[0]); pause < time.Second {
		t.Fatalf("repeated after %s", pause)
	}
}

func TestADenialIsNotRepeated(t *testing.T) {
	closed := strings.Replace(allowed, "true", "false", 1)
	for _, status := range []int{429, 503} {
		agent := serve(t, answer(status, closed))
		client := connect(t, agent.URL, leasehold.Options{OnFailure: leasehold.Open})
		decision, err := client.Check(t.Context(), leasehold.Check{Subject: export(t)})
		if err != nil || decision.Allowed || len(agent.operations) != 1 {
			t.Fatalf("%d: %+v, %v, %d calls", status, decision, err, len(agent.operations))
		}
	}
}

func TestTheFailureModeAnswersWhileTheAgentIsAway(t *testing.T) {
	agent := serve(t, answer(200, allowed))
	agent.Close()
	for mode, expected := range map[leasehold.FailureMode]string{leasehold.Open: "open", leasehold.Closed: "closed"} {
		client := connect(t, agent.URL, leasehold.Options{OnFailure: mode})
		decision, err := client.Check(t.Context(), leasehold.Check{Subject: export(t)})
		if err != nil || decision.Degraded != expected || decision.Allowed != (mode == leasehold.Open) {
			t.Fatalf("%+v, %v", decision, err)
		}
		results, err := client.CheckBatch(t.Context(), make([]leasehold.Check, 2))
		if err != nil || len(results) != 2 || results[1].Decision.Degraded != expected {
			t.Fatalf("%+v, %v", results, err)
		}
		held, err := client.Hold(t.Context(), leasehold.HoldRequest{Subject: export(t), Units: 1})
		var denied *leasehold.DeniedError
		if mode == leasehold.Open {
			if err != nil || held.ID != "" || held.Commit(t.Context(), 1) != nil {
				t.Fatalf("%+v, %v", held, err)
			}
		} else if !errors.As(err, &denied) {
			t.Fatalf("%v", err)
		}
	}
	client := connect(t, agent.URL, leasehold.Options{OnFailure: leasehold.Raise})
	_, err := client.Check(t.Context(), leasehold.Check{Subject: export(t)})
	var unavailable *leasehold.UnavailableError
	if !errors.As(err, &unavailable) || !strings.Contains(err.Error(), agent.URL) {
		t.Fatalf("%v", err)
	}
}

func TestAnAgentThatIsAliveMayTakeItsTime(t *testing.T) {
	probed := make(chan struct{}, 1)
	agent := serve(t, func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-probed:
			answer(200, allowed)(w, r)
		case <-r.Context().Done(): // the client gave up without a probe
		}
	})
	agent.probed = probed
	client := connect(t, agent.URL, leasehold.Options{OnFailure: leasehold.Raise, Silence: 2 * time.Second, Attempts: 1})
	if decision, err := client.Check(t.Context(), leasehold.Check{Subject: export(t)}); err != nil || !decision.Allowed {
		t.Fatalf("%+v, %v", decision, err)
	}
}

func TestASilentAgentIsUnavailable(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0") // accepts, and says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	options := leasehold.Options{OnFailure: leasehold.Raise, Silence: 50 * time.Millisecond, Attempts: 1}
	client := connect(t, "http://"+listener.Addr().String(), options)
	_, err = client.Check(t.Context(), leasehold.Check{Subject: export(t)})
	if err == nil || !strings.Contains(err.Error(), "no sign of life") {
		t.Fatalf("%v", err)
	}
}

func TestACallerThatGivesUpGetsItsOwnError(t *testing.T) {
	agent := serve(t, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	client := connect(t, agent.URL, leasehold.Options{OnFailure: leasehold.Open})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := client.Check(ctx, leasehold.Check{Subject: export(t)}); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("%v", err)
	}
}

func TestAUnixSocketAndATokenAreUsed(t *testing.T) {
	path := t.TempDir() + "/agent.sock"
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer secret" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		answer(200, allowed)(w, r)
	})}
	go func() { _ = server.Serve(listener) }()
	defer func() { _ = server.Close() }()
	client := connect(t, "unix://"+path, leasehold.Options{Token: "secret"})
	if decision, err := client.Check(t.Context(), leasehold.Check{Subject: export(t)}); err != nil || !decision.Allowed {
		t.Fatalf("%+v, %v", decision, err)
	}
}

func TestATokenThatChangesIsTakenFromItsSource(t *testing.T) {
	valid := "first"
	agent := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer "+valid {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		answer(200, allowed)(w, r)
	}))
	defer agent.Close()
	var failure error
	source := func(context.Context) (string, error) { return valid, failure }
	client := connect(t, agent.URL, leasehold.Options{Token: "old", TokenSource: source, OnFailure: leasehold.Raise, Attempts: 1})
	for _, valid = range []string{"first", "second"} {
		if decision, err := client.Check(t.Context(), leasehold.Check{Subject: export(t)}); err != nil || !decision.Allowed {
			t.Fatalf("%+v, %v", decision, err)
		}
	}
	failure = errors.New("the issuer is away")
	var unavailable *leasehold.UnavailableError
	if _, err := client.Check(t.Context(), leasehold.Check{Subject: export(t)}); !errors.As(err, &unavailable) || !errors.Is(err, failure) {
		t.Fatalf("%v", err)
	}
}

func TestAnotherAddressIsRefused(t *testing.T) {
	for _, address := range []string{"", "ftp://agent", "127.0.0.1:8411", "unix:"} {
		if _, err := leasehold.New(address, leasehold.Options{}); err == nil {
			t.Errorf("%q was accepted", address)
		}
	}
}

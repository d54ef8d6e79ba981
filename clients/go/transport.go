package leasehold

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

const (
	defaultSilence     = time.Second
	defaultLongestWait = time.Minute
	defaultAttempts    = 3
	firstPause         = 50 * time.Millisecond
	longestPause       = time.Minute
	maxBodyBytes       = 16 << 20
	connections        = 64
	idleTimeout        = time.Minute // the agent keeps connections for 75 s
	defaultFailures    = 5
	defaultPause       = time.Second
)

var errAlive = errors.New("the agent is alive, and did not answer in time")
var errBreakerOpen = errors.New("the circuit breaker is open after several calls without an answer")

// Options of a client. The zero value of each has a meaning.
type Options struct {
	// Token is sent as a bearer token.
	Token string
	// TokenSource returns the token of each attempt, in place of Token, for one that changes. If it fails, OnFailure
	// answers.
	TokenSource func(context.Context) (string, error)
	// OnFailure answers while the agent is away; Closed denies.
	OnFailure FailureMode
	// Silence is how long the agent may give no sign of life; 0 is a second. While it answers /healthz a call goes on
	// waiting, as a policy's `wait` asks for.
	Silence time.Duration
	// LongestWait bounds a call that the agent does not answer although it is alive; 0 is a minute.
	LongestWait time.Duration
	// Attempts is how often a call is sent before the failure mode answers; 0 is 3.
	Attempts int
	// BreakerFailures is how many times in a row the agent may give no sign of life before the failure mode answers at
	// once; 0 is 5.
	BreakerFailures int
	// BreakerPause is how long the failure mode answers then, before one call is let through on trial; 0 is a second.
	BreakerPause time.Duration
	// Transport replaces the connections, for example to trust a certificate authority of your own.
	Transport http.RoundTripper
}

// transport sends each request until it is answered: after a failure again, with the same body and so the same operation
// id.
type transport struct {
	http    *http.Client
	address string
	base    string
	token   string
	options Options
	breaker *breaker
}

func newTransport(address string, options Options) (*transport, string, error) {
	parsed, err := url.Parse(address)
	if err != nil {
		return nil, "", fmt.Errorf("leasehold: address: %w", err)
	}
	base, socket := address, ""
	switch {
	case parsed.Scheme == "unix" && parsed.Host == "" && parsed.Path != "":
		base, socket = "http://agent", parsed.Path
	case (parsed.Scheme == "http" || parsed.Scheme == "https") && parsed.Host != "":
	default:
		return nil, "", fmt.Errorf("leasehold: address: %q is neither http(s)://host:port nor unix:///path", address)
	}
	options.Silence = orDefault(options.Silence, defaultSilence)
	options.LongestWait = max(options.Silence, orDefault(options.LongestWait, defaultLongestWait))
	options.Attempts = orDefault(options.Attempts, defaultAttempts)
	stop := &breaker{
		failures: orDefault(options.BreakerFailures, defaultFailures),
		pause:    orDefault(options.BreakerPause, defaultPause),
	}
	if options.Transport == nil {
		options.Transport = newConnections(socket, options.Silence)
	}
	client := &http.Client{Transport: options.Transport}
	return &transport{client, address, base, options.Token, options, stop}, base, nil
}

func orDefault[T comparable](given, fallback T) T {
	var zero T
	if given == zero {
		return fallback
	}
	return given
}

func newConnections(socket string, silence time.Duration) *http.Transport {
	dialer := &net.Dialer{Timeout: silence}
	return &http.Transport{
		DialContext: func(ctx context.Context, network, host string) (net.Conn, error) {
			if socket != "" {
				return dialer.DialContext(ctx, "unix", socket)
			}
			return dialer.DialContext(ctx, network, host)
		},
		TLSHandshakeTimeout: silence,
		MaxIdleConnsPerHost: connections,
		IdleConnTimeout:     idleTimeout,
	}
}

// Do implements the doer of the generated calls. Its error is an *UnavailableError, or the context's.
func (t *transport) Do(request *http.Request) (*http.Response, error) {
	ctx := request.Context()
	for attempt := 1; ; attempt++ {
		if !t.breaker.mayCall(time.Now()) {
			return nil, &UnavailableError{Address: t.address, Err: errBreakerOpen}
		}
		response, err := t.send(request)
		if err == nil {
			t.breaker.succeeded()
			return response, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		pause := pauseAfter(attempt - 1)
		var failed *failedResponse
		switch {
		case errors.As(err, &failed):
			t.breaker.succeeded()
			pause = max(pause, failed.retryAfter)
		case !errors.Is(err, errAlive):
			t.breaker.failed(time.Now())
		}
		if attempt >= t.options.Attempts || pause > t.options.Silence*2 {
			return nil, &UnavailableError{Address: t.address, Err: err}
		}
		if err := sleep(ctx, pause); err != nil {
			return nil, err
		}
	}
}

// send sends a request once, and reads the whole response while the agent gives signs of life.
func (t *transport) send(request *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(request.Context())
	defer cancel(nil)
	watch := time.AfterFunc(t.options.Silence, func() { t.watch(ctx, cancel) })
	defer watch.Stop()
	again := request.Clone(ctx)
	if request.GetBody != nil {
		body, err := request.GetBody()
		if err != nil {
			return nil, err
		}
		again.Body = body
	}
	token := t.token
	if t.options.TokenSource != nil {
		var err error
		if token, err = t.options.TokenSource(ctx); err != nil {
			return nil, fmt.Errorf("there is no token: %w", err)
		}
	}
	if token != "" {
		again.Header.Set("Authorization", "Bearer "+token)
	}
	response, body, err := t.exchange(again)
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return nil, cause
		}
		return nil, unwrapURLError(err)
	}
	if response.StatusCode >= http.StatusInternalServerError && !isDecision(body) {
		return nil, &failedResponse{response.StatusCode, string(body), retryAfterOf(response)}
	}
	response.Body = io.NopCloser(bytes.NewReader(body))
	return response, nil
}

func (t *transport) exchange(request *http.Request) (*http.Response, []byte, error) {
	response, err := t.http.Do(request)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(response.Body, maxBodyBytes))
	return response, body, err
}

// watch cancels a call when the agent gives no sign of life, or when the call takes longer than any should.
func (t *transport) watch(ctx context.Context, cancel context.CancelCauseFunc) {
	deadline := time.Now().Add(t.options.LongestWait - t.options.Silence)
	for ctx.Err() == nil {
		if time.Now().After(deadline) {
			cancel(errAlive)
			return
		}
		if err := t.probe(ctx); err != nil {
			cancel(fmt.Errorf("the agent gave no sign of life: %w", err))
			return
		}
		if sleep(ctx, min(t.options.Silence, time.Until(deadline)+time.Millisecond)) != nil {
			return
		}
	}
}

// probe asks for a sign of life. Any response is one.
func (t *transport) probe(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, t.options.Silence)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, t.base+"/healthz", nil)
	if err != nil {
		return err
	}
	_, _, err = t.exchange(request)
	return unwrapURLError(err)
}

// failedResponse is a response without a decision, as from an agent that has just started.
type failedResponse struct {
	status     int
	body       string
	retryAfter time.Duration
}

func (e *failedResponse) Error() string {
	return fmt.Sprintf("the agent answered %d: %s", e.status, e.body)
}

func retryAfterOf(response *http.Response) time.Duration {
	seconds, err := strconv.Atoi(response.Header.Get("Retry-After"))
	if err != nil || seconds < 0 {
		return 0
	}
	return time.Duration(seconds) * time.Second
}

// pauseAfter returns the pause before the next attempt: doubling, and spread by a tenth.
func pauseAfter(attempt int) time.Duration {
	pause := min(longestPause, firstPause<<min(attempt, 20))
	return pause + time.Duration(rand.Int64N(int64(pause)/10+1))
}

func sleep(ctx context.Context, pause time.Duration) error {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

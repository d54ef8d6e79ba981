// Command loadgen sends one kind of request to one server and prints throughput and latencies as JSON.
//
// The same generator drives every server of the comparison, over HTTP/1.1 or gRPC. A request is a fixed sequence of
// bytes in which only the digits of the key change, so that the generator costs little and knows no schema.
package main

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"regexp"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// placeholder is where a request carries its key; all keys are as long as it is.
var placeholder = []byte("key-000000")

// A caller sends requests one at a time and returns the beginning of each response.
// The returned bytes are valid until the next call.
type caller interface {
	call(request []byte) ([]byte, error)
}

type options struct {
	target      string
	method      string // of gRPC; HTTP/1.1 if empty
	request     []byte
	accepted    *regexp.Regexp
	callers     int
	connections int // of gRPC; over HTTP/1.1 each caller has its own
	first       int // of the keys
	keys        int
	walk        bool
	perSecond   float64
	seconds     float64
	seed        uint64
}

type result struct {
	PerSecond float64 `json:"per_second"`
	Decisions int     `json:"decisions"`
	Refused   int     `json:"refused"`
	Refusal   string  `json:"refusal"` // the first response that was not accepted
	P50us     float64 `json:"p50_us"`
	P99us     float64 `json:"p99_us"`
	LateP99us float64 `json:"late_p99_us"` // open loop: how late the generator itself sent its requests
}

func main() {
	log.SetFlags(0)
	debug.SetGCPercent(400)
	chosen := parse()
	callers, err := connect(chosen)
	if err != nil {
		log.Fatalf("cannot connect to %s: %v", chosen.target, err)
	}
	run := newRun(chosen)
	measured, err := run.measure(callers)
	if err != nil {
		log.Fatalf("%s: %v", chosen.target, err)
	}
	if err := json.NewEncoder(os.Stdout).Encode(measured); err != nil {
		log.Fatal(err)
	}
}

func parse() options {
	var chosen options
	var request, accepted string
	flag.StringVar(&chosen.target, "target", "", "host:port of the server")
	flag.StringVar(&chosen.method, "grpc", "", "full name of the gRPC method; HTTP/1.1 if empty")
	flag.StringVar(&request, "request", "", "the request in base64, with key-000000 in the place of its key")
	flag.StringVar(&accepted, "accepted", "", "regular expression that the beginning of each response must match")
	flag.IntVar(&chosen.callers, "callers", 64, "requests in flight at most")
	flag.IntVar(&chosen.connections, "connections", 1, "connections of gRPC")
	flag.IntVar(&chosen.first, "first", 0, "number of the first key")
	flag.IntVar(&chosen.keys, "keys", 1, "number of keys to draw from; 1 is one hot key")
	flag.BoolVar(&chosen.walk, "walk", false, "use every key once, in order, instead of drawing keys")
	flag.Float64Var(&chosen.perSecond, "rate", 0, "open loop: requests a second on a fixed schedule; closed loop if 0")
	flag.Float64Var(&chosen.seconds, "seconds", 2, "length of the run")
	flag.Uint64Var(&chosen.seed, "seed", 1, "seed of the random keys")
	flag.Parse()
	var err error
	if chosen.request, err = base64.StdEncoding.DecodeString(request); err != nil {
		log.Fatalf("-request: %v", err)
	}
	if chosen.accepted, err = regexp.Compile(accepted); err != nil {
		log.Fatalf("-accepted: %v", err)
	}
	if chosen.keys < 1 || chosen.first < 0 || chosen.first+chosen.keys > 1_000_000 {
		log.Fatalf("-first %d -keys %d: keys are numbered from 0 to 999,999", chosen.first, chosen.keys)
	}
	return chosen
}

func connect(chosen options) ([]caller, error) {
	if chosen.method != "" {
		return connectGRPC(chosen)
	}
	return connectHTTP(chosen)
}

// A run is one measurement: the callers share its clock, its schedule and its walk over the keys.
type run struct {
	options
	begun  time.Time
	end    time.Time
	giveUp time.Time // of requests of an open loop that are still waiting for a caller
	walked atomic.Int64
	due    chan time.Time // of an open loop
}

// A tally is what one caller measured.
type tally struct {
	latencies []time.Duration
	late      []time.Duration
	unsent    []time.Duration // how long requests of an open loop had waited when the run gave up
	refused   int
	refusal   string
	err       error
}

func newRun(chosen options) *run {
	return &run{options: chosen}
}

func (r *run) measure(callers []caller) (result, error) {
	tallies := make([]tally, len(callers))
	r.begun = time.Now()
	length := time.Duration(r.seconds * float64(time.Second))
	r.end = r.begun.Add(length)
	r.giveUp = r.end.Add(length)
	if r.perSecond > 0 {
		r.due = make(chan time.Time, int(r.perSecond*r.seconds)+1)
		go r.schedule()
	}
	var waiting sync.WaitGroup
	for place, each := range callers {
		waiting.Go(func() { r.loop(each, &tallies[place], place) })
	}
	waiting.Wait()
	elapsed := time.Since(r.begun)
	return summarize(tallies, elapsed)
}

// schedule announces each request when it is due, whether or not a caller is free.
func (r *run) schedule() {
	every := time.Duration(float64(time.Second) / r.perSecond)
	for due := r.begun; due.Before(r.end); due = due.Add(every) {
		sleepUntil(due)
		r.due <- due
	}
	close(r.due)
}

func (r *run) loop(each caller, own *tally, place int) {
	request := bytes.Clone(r.request)
	digits := digitsOf(request)
	random := rand.New(rand.NewPCG(r.seed, uint64(place)))
	for {
		intended, ok := r.next()
		if !ok {
			return
		}
		if r.due != nil && time.Now().After(r.giveUp) {
			own.unsent = append(own.unsent, time.Since(intended))
			continue
		}
		key := 0
		if r.walk {
			if key = int(r.walked.Add(1)) - 1; key >= r.keys {
				return
			}
		} else if r.keys > 1 {
			key = random.IntN(r.keys)
		}
		writeKey(request, digits, r.first+key)
		sent := time.Now()
		response, err := each.call(request)
		if err != nil {
			own.err = err
			return
		}
		if r.accepted.Match(response) {
			if intended.IsZero() {
				intended = sent
			}
			own.latencies = append(own.latencies, time.Since(intended))
			own.late = append(own.late, sent.Sub(intended))
		} else {
			own.refused++
			own.refusal = fmt.Sprintf("%.200q", response)
		}
	}
}

// next waits until a request is to be sent. A request of an open loop counts from when it was due.
func (r *run) next() (intended time.Time, ok bool) {
	if r.due != nil {
		intended, ok = <-r.due
		return intended, ok
	}
	return time.Time{}, time.Now().Before(r.end)
}

// digitsOf returns where the digits of each key of the request begin.
func digitsOf(request []byte) []int {
	var places []int
	for from := 0; ; {
		found := bytes.Index(request[from:], placeholder)
		if found < 0 {
			return places
		}
		from += found + len(placeholder)
		places = append(places, from-6)
	}
}

func writeKey(request []byte, places []int, key int) {
	for _, place := range places {
		rest := key
		for digit := 5; digit >= 0; digit-- {
			request[place+digit] = byte('0' + rest%10)
			rest /= 10
		}
	}
}

func summarize(tallies []tally, elapsed time.Duration) (result, error) {
	var latencies, late, unsent []time.Duration
	var measured result
	for _, each := range tallies {
		if each.err != nil {
			return result{}, each.err
		}
		latencies = append(latencies, each.latencies...)
		late = append(late, each.late...)
		unsent = append(unsent, each.unsent...)
		measured.Refused += each.refused
		if measured.Refusal == "" {
			measured.Refusal = each.refusal
		}
	}
	measured.Decisions = len(latencies)
	measured.PerSecond = float64(len(latencies)) / elapsed.Seconds()
	latencies = append(latencies, unsent...) // each would have taken at least as long
	measured.P50us, measured.P99us = percentile(latencies, 0.5), percentile(latencies, 0.99)
	measured.LateP99us = percentile(late, 0.99)
	return measured, nil
}

// percentile returns microseconds, and sorts what it is given.
func percentile(samples []time.Duration, part float64) float64 {
	if len(samples) == 0 {
		return 0
	}
	slices.Sort(samples)
	place := min(int(part*float64(len(samples))), len(samples)-1)
	return float64(samples[place].Nanoseconds()) / 1e3
}
